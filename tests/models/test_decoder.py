import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from diloco.models.decoder import Decoder, DecoderConfig, generate, next_token_loss, rotary, rotate
from diloco.models.ladder import LADDER, ladder, num_matrix_params

SMALL = DecoderConfig(num_layers=2, num_heads=2, width=16, vocab_size=11)


@pytest.mark.parametrize(
    ("scale", "num_params"),
    [
        ("35M", 35_651_584),
        ("90M", 88_866_816),
        ("180M", 184_549_376),
        ("330M", 336_855_040),
        ("550M", 559_939_584),
        ("1.3B", 1_275_068_416),
        ("2.4B", 2_443_182_080),
    ],
)
def test_ladder_counts_parameters_as_the_paper(scale, num_params):
    config = ladder(scale)
    with torch.device("meta"):
        model = Decoder(config, seed=0)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    gains = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    head_width = config.width // config.num_heads
    assert matrices == num_params == num_matrix_params(config)
    assert gains == config.num_layers * (2 * config.width + 2 * head_width) + config.width
    assert all(p.dim() in (1, 2) for p in model.parameters())


def test_the_ladder_refuses_an_unknown_size():
    with pytest.raises(ValueError, match=r"'7B' is not a size.*35M.*10B"):
        ladder("7B")
    assert len(LADDER) == 9


def test_forward_equals_a_decoder_written_out_by_hand():
    model = Decoder(SMALL, seed=1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=torch.Generator().manual_seed(2))
    tokens = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(
        model(tokens), by_hand(dict(model.named_parameters()), tokens), rtol=1e-4, atol=1e-5
    )


def by_hand(p, tokens):
    """Head by head and position by position, with complex numbers for RoPE."""
    width, heads, k = SMALL.width, SMALL.num_heads, SMALL.width // SMALL.num_heads
    x = p["embedding.weight"][tokens]
    for layer in range(SMALL.num_layers):
        b = f"blocks.{layer}."
        h = normed(x, p[b + "attention_norm.weight"])
        q, key, v = (h @ w.T for w in p[b + "attention.qkv.weight"].split(width))
        out = torch.zeros_like(x)
        for i in range(heads):
            part = slice(i * k, (i + 1) * k)
            qi = turned(normed(q[..., part], p[b + "attention.query_norm.weight"]))
            ki = turned(normed(key[..., part], p[b + "attention.key_norm.weight"]))
            for t in range(tokens.shape[1]):
                score = (qi[:, t : t + 1] * ki[:, : t + 1]).sum(-1) / math.sqrt(k)
                out[:, t, part] = (score.softmax(-1)[..., None] * v[:, : t + 1, part]).sum(1)
        x = x + out @ p[b + "attention.out.weight"].T
        h = normed(x, p[b + "mlp_norm.weight"]) @ p[b + "mlp_in.weight"].T
        gelu = h * (1 + torch.erf(h / math.sqrt(2))) / 2
        x = x + gelu @ p[b + "mlp_out.weight"].T
    return normed(x, p["norm.weight"]) @ p["embedding.weight"].T


def normed(x, gain):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * gain


def turned(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def test_the_future_does_not_change_the_past():
    model = Decoder(SMALL, seed=0)
    tokens = torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 11
    torch.testing.assert_close(model(tokens)[0, :5], model(changed)[0, :5])
    assert not torch.allclose(model(tokens)[0, 5], model(changed)[0, 5])


def test_rope_depends_on_distance_alone():
    rotation = rotary(12, 8, torch.device("cpu"))
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = (rotate(x.expand(1, 1, 12, 8), rotation)[0, 0] for x in (q, k))
    torch.testing.assert_close(turned_q[3] @ turned_k[1], turned_q[10] @ turned_k[8])


def test_bfloat16_autocast_rounds_and_nothing_else():
    """Norms, RoPE, softmax and loss stay in FP32; products of matrices lose 8 of 24 bits."""
    config = DecoderConfig(num_layers=4, num_heads=2, width=32, vocab_size=50)
    tokens = torch.randint(0, 50, (4, 33), generator=torch.Generator().manual_seed(0))
    found = {}
    for enabled in (False, True):
        model = Decoder(config, seed=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(tokens[:, :-1])
        loss, _ = next_token_loss(logits, tokens[:, 1:])
        loss.backward()
        assert loss.dtype == torch.float32
        found[enabled] = loss.item(), [p.grad.flatten() for p in model.parameters()]
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-3) and found[True][0] != found[False][0]
    for one, other in zip(found[False][1], found[True][1], strict=True):
        assert F.cosine_similarity(one, other, dim=0) > 0.99


def test_the_same_seed_gives_the_same_parameters():
    one, two, other = (dict(Decoder(SMALL, seed=seed).named_parameters()) for seed in (5, 5, 6))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(not torch.equal(one[name], other[name]) for name in one if one[name].dim() == 2)


def test_every_matrix_begins_with_variance_one_over_its_inputs():
    config = ladder("35M")
    for name, parameter in Decoder(replace(config, num_layers=2, vocab_size=1000), seed=0).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        ends_in_the_residual_stream = name.endswith(("attention.out.weight", "mlp_out.weight"))
        variance = 1 / parameter.shape[1] / (2 * 2 if ends_in_the_residual_stream else 1)
        assert parameter.var().item() == pytest.approx(variance, rel=0.02), name
        assert abs(parameter.mean().item()) < 5 * math.sqrt(variance / parameter.numel()), name


def test_on_meta_it_costs_no_import():
    code = """
import sys, torch
from diloco.models.decoder import Decoder, DecoderConfig
with torch.device("meta"):
    Decoder(DecoderConfig(num_layers=2, num_heads=2, width=8, vocab_size=11), seed=0)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_loss_is_cross_entropy_and_z_loss():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 11, generator=generator, dtype=torch.float32)
    targets = torch.randint(0, 11, (2, 3), generator=generator)
    loss, objective = next_token_loss(logits, targets, 0.1)
    torch.testing.assert_close(loss, F.cross_entropy(logits.view(-1, 11), targets.view(-1)))
    torch.testing.assert_close(objective - loss, 0.1 * logits.exp().sum(-1).log().square().mean())


def test_generate_takes_the_likeliest_token_where_only_one_is_allowed():
    model = Decoder(SMALL, seed=0)
    written = generate(model, [1, 2], 6, seed=0, context=4, top_k=1)
    tokens = [1, 2]
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens[-4:]]))[0, -1].argmax()))
    assert written == tokens[2:]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 3}, "width=16 must be a multiple of 2·num_heads=6"),
        ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
        ({"vocab_size": -1}, "vocab_size must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**({"num_layers": 2, "num_heads": 2, "width": 16} | sizes))


def test_what_was_read_before_is_remembered():
    model = Decoder(SMALL, seed=1)
    tokens = torch.randint(0, 11, (3, 12), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    cache = model.new_cache()
    parts = [model(tokens[:, first:last], cache) for first, last in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert cache.num_tokens == 12

    cache = model.new_cache()
    model(tokens[:, :5], cache)
    rows = torch.tensor([2, 0, 2])
    torch.testing.assert_close(model(tokens[rows, 5:], cache.select(rows)), whole[rows, 5:])
    assert cache.num_tokens == 5
