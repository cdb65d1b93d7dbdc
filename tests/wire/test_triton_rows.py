import os
import subprocess
import sys
from collections import defaultdict

import pytest

from .ptx import ptx_of

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


def test_interpreted_they_give_loss_and_gradient():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.wire.interpreted_rows"]
    subprocess.run(command, check=True, timeout=120, env=environment)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_they_compile_for_gpus(dtype, capability, tmp_path, monkeypatch):
    from diloco.wire.kernels import gpu, triton_rows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"logits_ptr": f"*{dtype}", "gradient_ptr": f"*{dtype}", "target_ptr": "*i64"}
    types = defaultdict(lambda: "*fp32", types, stride="i64", num_logits="i32")
    options = {"capability": capability, "options": gpu._ROW_OPTIONS}
    for function in (triton_rows.log_sums, triton_rows.gradients):
        assert "ex2.approx" in ptx_of(function, types, {"CHUNK": gpu._CHUNK}, **options)
