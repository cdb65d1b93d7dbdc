import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from diloco.wire import CODECS, codec

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
BLOCKS = [name for name in CODECS if getattr(codec(name), "constants", None)]


def test_interpreted_they_give_the_bits_of_the_cpu_and_the_loss_and_gradient_of_autograd():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.wire.interpreted"], check=True, timeout=220, env=environment)


@pytest.mark.parametrize(
    ("name", "capability"),
    [*((name, 90) for name in BLOCKS), *((name, 80) for name in ("e4m3", "e3m0", "int4"))],
)
def test_blocks_compile_for_gpus_and_round_as_torch_does(name, capability, tmp_path, monkeypatch):
    """No product and sum in one rounding, no subnormal number taken for 0, no approximate division."""
    from diloco.wire.kernels import gpu, triton_blocks

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = codec(name).constants
    sizes = {"BLOCK": 256, "ROWS": 8, "COLUMNS": 256, **constants}
    pack, unpack = triton_blocks.pack, triton_blocks.unpack
    kernels: list[tuple[Any, str]] = [(pack, "STOCHASTIC"), (unpack, "ADD")]
    for (function, choice), is_chosen in product(kernels, (False, True)):
        fixed = sizes | {choice: is_chosen}
        types = {"delta_ptr": "*fp32", "to_ptr": "*fp32", "codes_ptr": "*u8", "bad_ptr": "*i32"}
        types = defaultdict(lambda: "i64", types, scales_ptr="*u8" if constants["FLOAT"] else "*fp32")
        code = ptx_of(function, types, fixed, capability=capability, options=gpu._OPTIONS)
        assert not re.search(r"\bfma\.|\.ftz|div\.(full|approx)", code)
        assert ("div.rn" in code) == (function is pack and not constants["FLOAT"])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rows_compile_for_gpus(dtype, capability, tmp_path, monkeypatch):
    from diloco.wire.kernels import gpu, triton_rows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"logits_ptr": f"*{dtype}", "gradient_ptr": f"*{dtype}", "target_ptr": "*i64"}
    types = defaultdict(lambda: "*fp32", types, stride="i64", num_logits="i32")
    options = {"capability": capability, "options": gpu._ROW_OPTIONS}
    for function in (triton_rows.log_sums, triton_rows.gradients):
        assert "ex2.approx" in ptx_of(function, types, {"CHUNK": gpu._CHUNK}, **options)


def ptx_of(
    function: Any, types: Mapping[str, str], fixed: Mapping[str, Any], *, capability: int, options: dict[str, Any]
) -> str:
    """PTX of a kernel with arguments of these types, `fixed` being those that are constants of the code."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = function.arg_names
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    places = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(function, signature, constexprs=places)
    return compiled(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
