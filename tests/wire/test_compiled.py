import shutil
import subprocess
import sys

import pytest

from diloco.wire.compiled import compiled
from diloco.wire.floats import E3M0


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_every_codec_compiles_once_for_all_lengths_and_blocks_to_the_same_bits():
    """The code that a GPU runs, compiled for the CPU."""
    subprocess.run([sys.executable, "-m", "tests.wire.compiled"], check=True, timeout=220)


def test_without_triton_the_reference_is_used_with_one_warning(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    compiled.cache_clear()
    with pytest.warns(
        RuntimeWarning, match="Triton.* is not installed: using slower .* identical results"
    ) as warnings:
        for _ in range(2):
            pack = compiled(E3M0, "pack_reference")
    assert len(warnings) == 1 and pack == E3M0.pack_reference
    compiled.cache_clear()
