import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


def test_interpreted_they_give_loss_and_gradient():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreted_rows"]
    subprocess.run(command, check=True, timeout=120, env=environment)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_they_compile_for_gpus(dtype, capability, tmp_path, monkeypatch):
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from diloco.kernels import gpu, triton_rows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"logits_ptr": f"*{dtype}", "gradient_ptr": f"*{dtype}", "target_ptr": "*i64"}
    types |= {"stride": "i64", "num_logits": "i32", "CHUNK": "constexpr"}
    functions: tuple[Any, ...] = triton_rows.log_sums, triton_rows.gradients
    for function in functions:
        signature = {argument: types.get(argument, "*fp32") for argument in function.arg_names}
        place = (function.arg_names.index("CHUNK"),)
        source = ASTSource(function, signature, constexprs={place: gpu._CHUNK})
        code = compiled(source, target=GPUTarget("cuda", capability, 32), options=gpu._ROW_OPTIONS).asm["ptx"]
        assert "ex2.approx" in code
