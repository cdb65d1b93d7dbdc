import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from diloco.wire import codec

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


def test_interpreted_they_give_the_bits_of_the_cpu_and_the_loss_and_gradient_of_autograd():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "tests.wire.interpreted"], check=True, timeout=220, env=environment)


@pytest.mark.parametrize(
    ("name", "capability", "is_chosen"),
    [("int8", 90, False), ("int2", 80, True), ("e3m0", 80, False), ("e4m3", 90, True)],
)
def test_blocks_compile_for_gpus_and_round_as_torch_does(name, capability, is_chosen, tmp_path, monkeypatch):
    """No product and sum in one rounding, no subnormal number taken for 0, no approximate division.

    Of whole numbers and of floats, the kernels to the nearest that write, and the stochastic ones that add.
    """
    from diloco.wire.kernels import gpu, triton_blocks

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = codec(name).constants
    pack, unpack = triton_blocks.pack, triton_blocks.unpack
    rows, size = {"ROWS": 8, "COLUMNS": 256}, {"SIZE": 2048}
    kernels: list[tuple[Any, str, dict[str, int]]] = [(pack, "STOCHASTIC", rows), (unpack, "ADD", size)]
    for function, choice, sizes in kernels:
        fixed = {"BLOCK": 256, **sizes, **constants, choice: is_chosen}
        types = {"delta_ptr": "*fp32", "to_ptr": "*fp32", "codes_ptr": "*u8", "bad_ptr": "*i32"}
        types = defaultdict(lambda: "i64", types, scales_ptr="*u8" if constants["FLOAT"] else "*fp32")
        code = ptx_of(function, types, fixed, capability=capability, options=gpu._OPTIONS)
        assert not re.search(r"\bfma\.|\.ftz|div\.(full|approx)", code)
        assert ("div.rn" in code) == (function is pack and not constants["FLOAT"])


def test_sparse_and_cast_kernels_compile_for_gpus(tmp_path, monkeypatch):
    from diloco.wire.kernels import gpu, triton_casts, triton_sparse

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    vectors = {
        "outer_ptr": "*fp32",
        "delta_ptr": "*fp32",
        "to_ptr": "*fp32",
        "kept_ptr": "*fp32",
        "places_ptr": "*i64",
    }
    names = "counts_ptr", "bad_ptr", "least_ptr", "threshold_ptr", "above_ptr", "equal_ptr"
    counts = dict.fromkeys(names, "*i32")
    sums = dict.fromkeys(("ends_ptr", "ties_ptr"), "*i64")
    types = defaultdict(lambda: "i32", **vectors, **counts, **sums, num_elements="i64", room="i64")
    ends = types | {"above_ptr": "*i64", "equal_ptr": "*i64"}
    kernels: list[tuple[Any, Mapping[str, str], dict[str, Any]]] = [
        (triton_sparse.mask_counts, types, {}),
        (triton_sparse.mask_pack, types, {}),
        (triton_sparse.mask_unpack, types, {"ADD": False}),
        (triton_sparse.mask_unpack, types, {"ADD": True}),
        (triton_sparse.histogram, types, {"UPPER": True, "GROUP": 8, "COPIES": 8}),
        (triton_sparse.histogram, types, {"UPPER": True, "GROUP": 1, "COPIES": 8}),
        (triton_sparse.histogram, types, {"UPPER": False, "GROUP": 1, "COPIES": 8}),
        (triton_sparse.largest_counts, types, {}),
        (triton_sparse.largest_pack, ends, {}),
        (triton_sparse.block_pack, types, {"BLOCK": 1024, "KEPT": 16}),
        (triton_sparse.gate, types, {"BF16": True}),
        (triton_sparse.gate, types, {"BF16": False}),
    ]
    for mantissa, code in ((23, "*i32"), (7, "*i16")):
        packed = types | {"delta_ptr": "*i32", "body_ptr": code}
        kernels.append((triton_casts.pack, packed, {"MANTISSA": mantissa}))
        kernels += [(triton_casts.unpack, packed, {"MANTISSA": mantissa, "ADD": add}) for add in (False, True)]
    for number, (function, signature, fixed) in enumerate(kernels):
        sizes, capability = {"SIZE": 1024, **fixed}, (80, 90)[number % 2]
        ptx = ptx_of(function, signature, sizes, capability=capability, options=gpu._OPTIONS)
        assert not re.search(r"\bfma\.|\.ftz", ptx)


@pytest.mark.parametrize(("dtype", "capability"), [("fp32", 80), ("bf16", 90)])
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
