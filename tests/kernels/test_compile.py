import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from diloco.kernels import compile as compiling
from diloco.kernels.compile import compiled_library


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
    with patch.object(compiling, "_compile", side_effect=lambda compiler, output: output.touch()) as made:
        first = compiled_library()
        assert compiled_library() == first and first.parent == tmp_path / "cache" / "diloco"
        assert made.call_count == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_home_that_cannot_be_written_to_is_no_hindrance(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with patch.object(compiling, "_compile", side_effect=lambda compiler, output: output.touch()):
        library = compiled_library()
    assert library.exists() and isinstance(library, Path) and tmp_path not in library.parents
