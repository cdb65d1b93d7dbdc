import ctypes
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.cases import BLOCK_SPECS, implementation

from diloco.errors import PayloadError
from diloco.kernels import native
from diloco.outer.mixing import Mixing
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import FragmentState
from diloco.reduction.cohort import Cohort
from diloco.reduction.reduction import Average
from diloco.schedule import Sync
from diloco.wire import codec


def test_it_is_compiled_where_there_is_a_compiler():
    assert isinstance(native.native(), native.Native) == any(map(shutil.which, ("cc", "gcc", "clang")))


@pytest.mark.parametrize("spec", BLOCK_SPECS)
@given(seed=st.integers(0, 2**32 - 1), length=st.sampled_from([1, 2, 3, 31, 257, 640, 1283]))
def test_any_bytes_are_decoded_to_the_same_bits_or_refused_alike(spec, seed, length):
    wire, generator = codec(spec), torch.Generator().manual_seed(seed)
    payload = wire.encode(torch.zeros(length))
    payload[16:] = torch.randint(0, 256, (payload.numel() - 16,), generator=generator)
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


@pytest.mark.parametrize("spec", BLOCK_SPECS)
def test_threads_change_nothing(spec, monkeypatch):
    wire = codec(spec)
    delta = torch.randn(12_345, generator=torch.Generator().manual_seed(0))
    alone = wire.encode(delta)
    monkeypatch.setattr(native, "_ELEMENTS_A_THREAD", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    pools = []
    with patch.object(native, "ThreadPoolExecutor", lambda n: pools.append(n) or ThreadPoolExecutor(n)):
        assert torch.equal(wire.encode(delta), alone)
        with implementation("torch"):
            expected = wire.decode(alone, 12_345)
        assert torch.equal(wire.decode(alone, 12_345), expected)
        delta[10_000] = float("nan")
        with pytest.raises(ValueError, match="NaN"):
            wire.encode(delta)
    assert pools == [5, 5, 5]


@given(st.integers(0, 2**32 - 1), st.integers(1, 7), st.floats(0.01, 2), st.floats(0, 0.999), st.floats(0, 1))
def test_the_outer_step_has_the_bits_of_plain_torch(seed, divisor, lr, momentum, mixing):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 30, (4, 533), generator=generator)
    vectors = torch.randn(4, 533, generator=generator) * torch.exp2(exponents)
    copies = vectors.clone()
    rule = Nesterov(lr=lr, momentum=momentum)

    def take(outer, velocity, total, theta) -> None:
        parameters = [theta[:33], theta[33:]]
        vectors = {"outer": outer, "velocity": velocity}
        fragment = FragmentState(vectors.__getitem__, rule.slots, parameters, Mixing(mixing))
        rule.on_average(fragment, Average(total, divisor), Sync(0, 1, 1), Cohort.equal(1))

    take(*vectors)
    with patch("diloco.outer.nesterov.native", return_value=None):
        take(*copies)
    assert torch.equal(vectors.view(torch.int32), copies.view(torch.int32))


def test_without_a_compiler_there_is_one_warning_that_says_what_to_do(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.warns(RuntimeWarning, match="no C compiler was found .install gcc or clang") as warnings:
        assert native.native.__wrapped__() is None
    assert len(warnings) == 1


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="failed: the disk is on fire"):
        assert native.native.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


def test_a_compiler_may_be_a_command_with_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", f"{sys.executable} -c 'import sys; sys.exit(sys.argv[1])' 'a b'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="'a b' failed: a b"):
        assert native.native.__wrapped__() is None


def test_it_is_compiled_once_for_all_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with patch.object(native, "_compile", side_effect=lambda compiler, source, output: output.touch()) as made:
        first = native._compiled()
        assert native._compiled() == first and first.parent == tmp_path / "cache" / "diloco"
        assert made.call_count == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_home_that_cannot_be_written_to_is_no_hindrance(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with patch.object(native, "_compile", side_effect=lambda compiler, source, output: output.touch()):
        library = native._compiled()
    assert library.exists() and isinstance(library, Path) and tmp_path not in library.parents


def test_a_library_that_cannot_be_loaded_is_done_without(monkeypatch):
    def no_library(path: str) -> None:
        raise OSError("wrong architecture")

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    with pytest.warns(RuntimeWarning, match="wrong architecture"):
        assert native.native.__wrapped__() is None
