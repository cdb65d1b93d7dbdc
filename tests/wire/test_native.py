import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wire.cases import BLOCK_SPECS, NAMES, SPARSE_SPECS, UNSCALED, implementation, sealed

from diloco.errors import NonFiniteError, PayloadError
from diloco.outer.averages import Average
from diloco.outer.cohort import Cohort
from diloco.outer.merge import Mixing
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.outer.step import take_outer_step
from diloco.schedule import Sync
from diloco.wire import codec
from diloco.wire.formats import HEADER_BYTES
from diloco.wire.kernels import native
from diloco.wire.kernels.compiling import features, variants

HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))


def test_native_code_is_compiled_where_there_is_a_compiler():
    assert isinstance(native.native(), native.Native) == HAS_COMPILER


@pytest.mark.skipif(not HAS_COMPILER, reason="native.c needs a C compiler")
def test_native_code_knows_its_functions():
    functions = native.native()
    assert functions.has("outer_step") and functions.has("e3m0_pack") and not functions.has("e3m1_pack")


@pytest.mark.skipif(not HAS_COMPILER, reason="native.c needs a C compiler")
def test_the_types_of_arguments_that_another_thread_may_read_are_never_replaced():
    functions, types = native.native(), []
    for _ in range(2):
        codec("e3m0").encode(torch.ones(8))
        types.append(functions._library.e3m0_pack.argtypes)
    assert types[0] is not None and types[0] is types[1]


@pytest.mark.parametrize("spec", [*UNSCALED, *BLOCK_SPECS, *SPARSE_SPECS, "topk:density=0.01"])
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), length=st.sampled_from([1, 2, 3, 31, 257, 640, 1283]))
def test_any_bytes_are_decoded_to_the_same_bits_or_refused_alike(spec, seed, length):
    wire, generator = codec(spec), torch.Generator().manual_seed(seed)
    payload = wire.encode(torch.zeros(length))
    body = payload[HEADER_BYTES:]
    body.copy_(torch.randint(0, 256, body.shape, generator=generator))
    sealed(payload)
    results = []
    for how in ("native", "torch"):
        to = torch.linspace(-1, 1, length)
        with implementation(how):
            try:
                results.append((wire.decode(payload, length), wire.decode_into(to, payload, add=True)))
            except PayloadError as error:
                results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.skipif(not HAS_COMPILER, reason="native.c needs a C compiler")
@pytest.mark.parametrize("spec", [*NAMES, "e3m0:block=640", "int2:block=8", "topk:density=0.9"])
def test_threads_change_nothing(spec, monkeypatch):
    wire = codec(spec)
    # Of few magnitudes, so that many equal the threshold of Top-K in each thread's range.
    delta = torch.randn(12_345, generator=torch.Generator().manual_seed(0)).mul_(8).round_().div_(8)
    alone = wire.encode(delta)
    expected = wire.decode(alone, 12_345)
    monkeypatch.setattr(native, "_ELEMENTS_PER_THREAD", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    pools = []
    with patch.object(native, "ThreadPoolExecutor", lambda n: pools.append(n) or ThreadPoolExecutor(n)):
        assert torch.equal(wire.encode(delta), alone)
        assert torch.equal(wire.decode(alone, 12_345), expected)
        delta[10_000] = float("nan")
        with pytest.raises(NonFiniteError):
            wire.encode(delta)
    assert pools and set(pools) == {4 if spec == "sparseloco" else 5}, "it has four blocks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.floats(0.01, 2), st.floats(0, 0.999), st.floats(0, 1))
def test_the_outer_step_has_the_bits_of_plain_torch(dtype, seed, divisor, lr, momentum, mixing):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 30, (4, 533), generator=generator)
    exponents[3, :6] = torch.tensor([124, -127, -130, -133, -134, 120])  # subnormals of BF16, and 0, among them
    values = torch.randn(4, 533, generator=generator) * torch.exp2(exponents)
    vectors = [*values[:3], values[3].to(dtype)]
    copies = [vector.clone() for vector in vectors]
    rule = Nesterov(lr=lr, momentum=momentum)

    def take(outer, velocity, total, theta) -> None:
        parameters = [theta[:33], theta[33:]]
        fragment = FragmentState({"outer": outer, "velocity": velocity}.__getitem__)
        how = (fragment, parameters, Average(total, divisor), Sync(0, 1, 1), Cohort.equal(1))
        take_outer_step(rule, Mixing(mixing), *how)

    take(*vectors)
    with patch("diloco.outer.step.native", return_value=None):
        take(*copies)
    for one, other in zip(vectors, copies, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.skipif(not HAS_COMPILER, reason="native.c needs a C compiler")
def test_no_address_is_taken_of_memory_that_does_not_suit():
    functions, delta = native.native(), torch.ones(300)
    scales, codes = torch.zeros(2, dtype=torch.uint8), torch.zeros(150, dtype=torch.uint8)
    message = r"the (scales|codes|vector), .* must be \d+ of torch.*, contiguous and"
    misaligned = torch.frombuffer(bytearray(1201), dtype=torch.float32, offset=1)
    for wrong in (
        (scales[:1], codes, delta),
        (scales, codes[:-1], delta),
        (scales, torch.zeros(300, dtype=torch.uint8)[::2], delta),
        (scales.view(torch.int8), codes, delta),
        (scales, codes, delta.double()),
        (scales, codes, misaligned),
        (scales, codes.to("meta"), delta),
    ):
        with pytest.raises(PayloadError, match=message):
            functions.pack("e3m0", 256, wrong[2], wrong[0], wrong[1])
        with pytest.raises(PayloadError, match=message):
            functions.unpack("e3m0", 256, *wrong, add=False)
    with pytest.raises(PayloadError, match=r"θ, \(299,\) of torch.float32 on cpu, must be 300"):
        functions.outer_step([delta, delta, delta, delta[1:]], [1.0] * 5)
    with pytest.raises(PayloadError, match=r"θ, \(300,\) of torch.float16 on cpu, must be 300 of torch.float32"):
        functions.outer_step([delta, delta, delta, delta.half()], [1.0] * 5)
    assert functions.pack("e3m0", 256, delta, scales, codes)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="native.c needs a C compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_native_code_is_sound_under_the_sanitizers(sanitizer, tmp_path):
    """Lengths, blocks, hostile bytes and threads of sanitized.c, whose faults the sanitizer must notice, too."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))))
    has_avx2 = any(v.name == "avx2" and v.needs <= features() for v in variants(platform.machine()))
    flags = [
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
        "-fsanitize-undefined-trap-on-error",  # without a report, which takes the compiler as long as all else
        "-pthread",
        "-std=c11",
        "-ffp-contract=off",
        *(["-march=x86-64-v3"] if sanitizer != "thread" and has_avx2 else []),
    ]
    flags += [f"-I{Path(native.__file__).parent}", "-lm", "-o", str(tmp_path / "driver")]

    def run(*command: str | Path) -> tuple[int, str]:
        environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        return done.returncode, done.stderr

    code, complaint = run(compiler, Path(__file__).with_name("sanitized.c"), *flags)
    if code:
        (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
        assert run(compiler, tmp_path / "empty.c", *flags)[0], complaint
        pytest.skip(f"{compiler} has no -fsanitize={sanitizer}")
    assert run(tmp_path / "driver") == (0, "")
    for faults in (["faulty"], ["faulty", "outer step"]):
        code, report = run(tmp_path / "driver", *faults)
        assert code and ("data race" if sanitizer == "thread" else "heap-buffer-overflow") in report


@pytest.mark.parametrize("part", ["ctypes.CDLL", "diloco.wire.kernels.native.compiled_library"])
def test_a_library_that_cannot_be_had_is_done_without_and_one_warning(part, monkeypatch, tmp_path):
    def fail(*arguments: object) -> None:
        raise OSError("wrong architecture")

    (tmp_path / "short.c").write_text("int short_bits = 4;\n")  # compiled in less time
    monkeypatch.setattr(native, "SOURCE", tmp_path / "short.c")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(part, fail)
    message = r"native.c could not be compiled or loaded: using slower PyTorch code .* results .wrong architecture"
    with pytest.warns(RuntimeWarning, match=message) as warnings:
        assert native.native.__wrapped__() is None
    assert len(warnings) == 1
