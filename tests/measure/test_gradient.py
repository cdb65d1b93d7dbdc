import pytest
import torch
from safetensors.torch import save_file

from diloco.errors import UserError
from diloco.measure.gradient import demo_gradient, load_gradient


def test_a_gradient_is_read_from_a_file_in_the_order_of_its_names(tmp_path):
    tensors = {"b": torch.ones(2, 3), "a": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "gradient.safetensors")
    assert torch.equal(load_gradient(tmp_path / "gradient.safetensors"), torch.tensor([0.0] * 4 + [1.0] * 6))


@pytest.mark.parametrize("content", [None, b"a text"])
def test_any_other_file_is_refused(content, tmp_path):
    path = tmp_path / "gradient.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"gradient\.safetensors is no safetensors file"):
        load_gradient(path)


@pytest.mark.slow
def test_the_demo_gradient_is_that_of_a_trained_model():
    gradient_N = demo_gradient("tiny")
    assert gradient_N.dtype == torch.float32 and gradient_N.ndim == 1
    assert torch.isfinite(gradient_N).all() and 1e-5 < gradient_N.abs().mean() < 1e-1
    assert (gradient_N != 0).float().mean() > 0.7  # AdamW moves every parameter that a batch uses
