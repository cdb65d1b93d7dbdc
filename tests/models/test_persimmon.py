import pytest
import torch

from diloco.models.decoder_config import DecoderConfig

transformers = pytest.importorskip("transformers")


def test_persimmon_computes_the_same_function():
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
