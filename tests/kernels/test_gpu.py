import pytest

from diloco.kernels import gpu
from diloco.wire import codec


def test_without_triton_there_are_none_and_one_warning(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    gpu._has_triton.cache_clear()
    with pytest.warns(RuntimeWarning, match="Triton is not installed: using slower .* identical") as warnings:
        assert gpu.gpu_blocks(codec("e3m0").numbers) is None
        assert gpu.gpu_blocks(codec("int8").numbers) is None
    assert len(warnings) == 1
    gpu._has_triton.cache_clear()
