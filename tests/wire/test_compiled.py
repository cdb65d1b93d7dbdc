import shutil
import subprocess
import sys

import pytest

from diloco.wire import codec
from diloco.wire.compiled import compiled


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_the_reference_compiles_as_one_graph_to_the_same_bits():
    """The code that a GPU runs, compiled for the CPU."""
    subprocess.run([sys.executable, "-m", "tests.wire.compiled", "bits"], check=True, timeout=200)


def test_every_codec_and_option_compiles_once_for_all_lengths():
    subprocess.run([sys.executable, "-m", "tests.wire.compiled", "graphs"], check=True, timeout=200)


def test_without_triton_the_reference_is_used_with_one_warning(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    compiled.cache_clear()
    with pytest.warns(
        RuntimeWarning, match="Triton.* is not installed: using slower .* identical results"
    ) as warnings:
        for spec in ("e3m0", "e3m0", "e3m0:block=256"):
            pack = compiled(codec(spec), "pack_reference")
    assert len(warnings) == 1 and pack == pack.__self__.pack_reference
    compiled.cache_clear()
