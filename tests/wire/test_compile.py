import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from diloco.wire.kernels import native as compiling
from diloco.wire.kernels.native import compiled_library


@pytest.fixture(autouse=True)
def _compiled_in_less_time(monkeypatch, tmp_path_factory):
    source = tmp_path_factory.mktemp("source") / "short.c"
    source.write_text("int short_bits = 4;\n")
    monkeypatch.setattr(compiling, "SOURCE", source)


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(OSError, match=r"no C compiler was found .install gcc or clang"):
        compiled_library()


def test_a_compiler_that_fails_is_quoted_with_its_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", f"{sys.executable} -c 'import sys; sys.exit(sys.argv[1])' 'a b'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match="'a b' failed: a b"):
        compiled_library()
    assert not list(tmp_path.rglob("*.so"))


def test_native_code_is_compiled_once_for_all_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with patch.object(compiling, "compile_native", wraps=compiling.compile_native) as made:
        first = Path(compiled_library()._name)
        assert Path(compiled_library()._name) == first and first.parent == tmp_path / "cache" / "diloco"
        assert made.call_count == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    damaged = tmp_path / "other" / "diloco" / first.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"cut short")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert Path(compiled_library()._name) == damaged and damaged.stat().st_size > 1000, "it is made anew"


def test_processes_that_start_together_compile_once(monkeypatch, tmp_path):
    """A compiler that takes a second and counts its calls; both begin before there is a library."""
    calls = tmp_path / "calls"
    script = f"import subprocess, sys, time; open({str(calls)!r}, 'a').write('call ')\ntime.sleep(1)\n"
    script += "sys.exit(subprocess.run(['cc', *sys.argv[1:]]).returncode)"
    (tmp_path / "slow.py").write_text(script)
    monkeypatch.setenv("CC", f"{sys.executable} {tmp_path / 'slow.py'}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: Path(compiled_library()._name), range(2))
    assert first == second and calls.read_text() == "call "


def test_a_home_that_cannot_be_written_to_is_no_hindrance(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library = Path(compiled_library()._name)
    assert not library.exists() and [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left"


def test_a_command_with_an_open_quote_is_no_compiler(monkeypatch):
    monkeypatch.setenv("CC", "gcc -DX='a")
    with pytest.raises(OSError, match=r"CC=gcc -DX='a is no command: No closing quotation"):
        compiled_library()
