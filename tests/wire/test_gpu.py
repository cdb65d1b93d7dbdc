import pytest
import torch

from diloco.wire import codec
from diloco.wire.floats import E3M0
from diloco.wire.kernels import gpu


@pytest.mark.parametrize("missing", ["importlib.util.find_spec", "shutil.which", "sysconfig.get_path"])
def test_without_triton_or_a_compiler_there_are_none_and_one_warning(missing, monkeypatch):
    monkeypatch.setattr(missing, lambda *names: "/nowhere" if missing.endswith("path") else None)
    monkeypatch.delenv("CC", raising=False)
    gpu._has_triton.cache_clear()
    with pytest.warns(
        RuntimeWarning, match="Triton, or .* is not installed: using slower .* with identical payloads"
    ) as warnings:
        assert gpu.gpu_blocks(codec("e3m0").constants) is None
        assert gpu.gpu_blocks(codec("int8").constants) is None
        assert gpu.gpu_rows() is None
    assert len(warnings) == 1
    gpu._has_triton.cache_clear()


def test_a_subclass_with_other_maths_and_a_long_block_stay_in_torch():
    class Other(E3M0):
        pass

    class Cuda(torch.Tensor):
        is_cuda = True

    there = torch.empty(1).as_subclass(Cuda)

    assert Other()._gpu(there) is None
    with pytest.warns(RuntimeWarning, match="e3m0.* a block above 8192 elements is encoded by slower"):
        assert E3M0(block=16384)._gpu(there) is None
