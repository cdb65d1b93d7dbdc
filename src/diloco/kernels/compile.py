"""Compile native.c for this processor, keep the library in the user's cache, and load it."""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from diloco.files import sha256, write_atomically

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# 512 bits make encoding a fifth slower on Zen 4.
_PROCESSOR_FLAGS = (("-march=native", "-mprefer-vector-width=256"), ("-march=native",), ("-mcpu=native",), ())


def compiled_library() -> ctypes.CDLL:
    """The library of this source, compiler and processor, from the user's cache or compiled now.

    Raises:
        OSError: if there is no compiler, or it fails, or what it makes can't be loaded.
        subprocess.SubprocessError: if the compiler does not end.
    """
    compiler = _compiler()
    identity = repr((_SOURCE.read_bytes(), compiler, _FLAGS, _PROCESSOR_FLAGS, platform.machine(), _processor()))
    name = f"native-{sha256(identity.encode())[:16]}.so"
    cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco" / name
    if cached.exists():
        with suppress(OSError):  # cut short, or of another C library: compile it anew
            return ctypes.CDLL(str(cached))
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / name
        _compile(compiler, library)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cached, [library.read_bytes()])
            return ctypes.CDLL(str(cached))
        except OSError:  # the home can't be written to, or nothing there can be run: for this process alone
            return ctypes.CDLL(str(library))  # which stays when its file is gone


def _compiler() -> list[str]:
    """The command of a C compiler."""
    try:
        compiler = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise OSError(f"CC={os.environ['CC']} is no command: {error}") from error
    compiler = compiler or list(filter(shutil.which, ("cc", "gcc", "clang")))[:1]
    if not compiler:
        raise OSError("no C compiler was found (install gcc or clang, or name one in CC)")
    return compiler


def _compile(compiler: list[str], output: Path) -> None:
    """Compile with the first flags for the processor that the compiler knows."""
    complaint = ""
    for processor_flags in _PROCESSOR_FLAGS:
        command = [*compiler, *_FLAGS, *processor_flags, str(_SOURCE), "-o", str(output), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode == 0:
            return
        complaint = " ".join(done.stderr.split())[-300:]
    raise OSError(f"{shlex.join(compiler)} failed: {complaint}")


def _processor() -> str:
    """The properties of the processor on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return repr(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )
