import os
import re
import subprocess
import sys
from typing import Any

import pytest

from diloco.wire import CODECS, codec
from diloco.wire.blocks import BlockCodec

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
BLOCKS = [name for name, kind in CODECS.items() if issubclass(kind, BlockCodec)]


def test_interpreted_they_give_the_bits_of_the_cpu():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreted"]
    subprocess.run(command, check=True, timeout=220, env=environment)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", BLOCKS)
def test_they_compile_for_gpus_and_round_as_torch_does(name, capability, tmp_path, monkeypatch):
    """No product and sum in one rounding, no subnormal number taken for 0, no approximate division."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from diloco.kernels import triton_blocks

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = codec(name).numbers
    sizes = {"BLOCK": 256, "ROWS": 8, "COLUMNS": 256, **numbers}
    kernels: list[tuple[Any, dict[str, bool]]] = [
        (triton_blocks.pack, {"STOCHASTIC": True}),
        (triton_blocks.unpack, {"ADD": True}),
    ]
    for function, more in kernels:
        constants = sizes | more
        types = {"delta_ptr": "*fp32", "to_ptr": "*fp32", "codes_ptr": "*u8", "bad_ptr": "*i32"}
        types |= {"scales_ptr": "*u8" if numbers["FLOAT"] else "*fp32"}
        signature = {
            argument: "constexpr" if argument in constants else types.get(argument, "i64")
            for argument in function.arg_names
        }
        places = {(function.arg_names.index(argument),): value for argument, value in constants.items()}
        source = ASTSource(function, signature, constexprs=places)
        options = {"num_warps": 4, "enable_fp_fusion": False}
        code = compiled(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        assert not re.search(r"\bfma\.|\.ftz|div\.(full|approx)", code)
        assert ("div.rn" in code) == (function is triton_blocks.pack and not numbers["FLOAT"])
