import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from diloco.models.decoder import causal_attention
from diloco.models.decoder_config import DecoderConfig, ladder

SMALL = DecoderConfig(num_layers=2, num_heads=2, width=16, vocab_size=11)


def test_forward_equals_a_decoder_written_out_by_hand():
    model = SMALL.build(seed=1)
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


def test_bfloat16_autocast_rounds_and_nothing_else():
    """Norms, RoPE, softmax and loss stay in FP32; products of matrices lose 8 of 24 bits."""
    config = DecoderConfig(num_layers=4, num_heads=2, width=32, vocab_size=50)
    tokens = torch.randint(0, 50, (4, 33), generator=torch.Generator().manual_seed(0))
    results = {}
    for enabled in (False, True):
        model = config.build(seed=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(tokens[:, :-1])
        loss, _ = model.loss(logits, tokens[:, 1:])
        loss.backward()
        assert loss.dtype == torch.float32
        results[enabled] = loss.item(), [p.grad.flatten() for p in model.parameters()]
    assert results[True][0] == pytest.approx(results[False][0], rel=1e-3) and results[True][0] != results[False][0]
    for one, other in zip(results[False][1], results[True][1], strict=True):
        assert F.cosine_similarity(one, other, dim=0) > 0.99


def test_attention_that_forms_all_scores_is_as_exact_as_torchs():
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, 3, 200, 16, generator=generator).requires_grad_() for _ in range(3)]
    y, toward = (
        F.scaled_dot_product_attention(*exact, is_causal=True),
        torch.randn(2, 3, 200, 16, generator=generator),
    )
    expected = [y, *torch.autograd.grad(y, exact, toward)]
    errors = []
    for attention in (causal_attention, partial(F.scaled_dot_product_attention, is_causal=True)):
        rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
        y = attention(*rounded)
        results = [y, *torch.autograd.grad(y, rounded, toward.bfloat16())]
        assert all(x.dtype == torch.bfloat16 for x in results)
        errors.append([((x - z).norm() / z.norm()).item() for x, z in zip(results, expected, strict=True)])
    ours, torchs = errors
    assert all(0 < one < 1.5 * other for one, other in zip(ours, torchs, strict=True)), errors


def test_the_same_seed_gives_the_same_parameters():
    one, two, other = (dict(SMALL.build(seed=seed).named_parameters()) for seed in (5, 5, 6))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(not torch.equal(one[name], other[name]) for name in one if one[name].dim() == 2)


def test_every_matrix_begins_with_variance_one_over_its_inputs():
    config = ladder("35M")
    for name, parameter in replace(config, num_layers=2, vocab_size=1000).build(seed=0).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        ends_in_the_residual_stream = name.endswith(("attention.out.weight", "mlp_out.weight"))
        variance = 1 / parameter.shape[1] / (2 * 2 if ends_in_the_residual_stream else 1)
        assert parameter.var().item() == pytest.approx(variance, rel=0.02), name
        assert abs(parameter.mean().item()) < 5 * math.sqrt(variance / parameter.numel()), name


def test_a_cache_gives_the_logits_of_the_whole_sequence():
    model = SMALL.build(seed=1)
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


@pytest.mark.parametrize(
    ("scale", "num_params"),
    [
        *(("35M", 35_651_584), ("90M", 88_866_816), ("180M", 184_549_376), ("330M", 336_855_040)),
        *(("550M", 559_939_584), ("1.3B", 1_275_068_416), ("2.4B", 2_443_182_080)),
    ],
)
def test_ladder_counts_parameters_as_the_paper(scale, num_params):
    config = ladder(scale)
    with torch.device("meta"):
        model = config.build(seed=0)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    gains = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    head_width = config.width // config.num_heads
    assert matrices == num_params == config.num_matrix_params
    assert gains == config.num_layers * (2 * config.width + 2 * head_width) + config.width
    assert all(p.dim() in (1, 2) for p in model.parameters())


@pytest.mark.slow
def test_persimmon_computes_the_same_function():
    transformers = pytest.importorskip("transformers")
    config = DecoderConfig(num_layers=3, num_heads=4, width=32, vocab_size=50)
    ours = config.build(seed=0)
    with torch.no_grad():
        for parameter in ours.parameters():  # so that gains differ, too
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    values, state = config.to_hugging_face(ours.state_dict(), context=64, bos_id=0)
    theirs = transformers.PersimmonForCausalLM(transformers.PersimmonConfig(**values)).eval()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    theirs.tie_weights()
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=2e-5, rtol=1e-4)
