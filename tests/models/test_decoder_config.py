import pytest
import torch

from diloco.models.decoder_config import DecoderConfig, ladder


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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 3}, "model.width=16 must be a multiple of twice model.num_heads=3"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"vocab_size": -1}, "model.vocab_size=-1 must be at least 0"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**({"num_layers": 2, "num_heads": 2, "width": 16} | sizes))
    with pytest.raises(ValueError, match=r"'7B' is not a size.*35M.*10B"):
        ladder("7B")


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
