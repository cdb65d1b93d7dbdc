"""Compile native.c for this processor, and keep the library in the user's cache."""

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from diloco.files import sha256

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# 512 bits make encoding a fifth slower on Zen 4.
_PROCESSOR_FLAGS = (("-march=native", "-mprefer-vector-width=256"), ("-march=native",), ("-mcpu=native",), ())


def compiled_library() -> Path:
    """The library of this source, compiler and processor, from the user's cache or compiled now.

    Raises:
        OSError: if there is no compiler, or it fails.
        subprocess.SubprocessError: if the compiler does not end.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or list(filter(shutil.which, ("cc", "gcc", "clang")))[:1]
    if not compiler:
        raise OSError("no C compiler was found (install gcc or clang, or name one in CC)")
    identity = repr((_SOURCE.read_bytes(), compiler, _FLAGS, _PROCESSOR_FLAGS, platform.machine(), _processor()))
    name = f"native-{sha256(identity.encode())[:16]}.so"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco"
    if (cache / name).exists():
        return cache / name
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / name
        _compile(compiler, library)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            partial = cache / f"{name}.{os.getpid()}"
            shutil.copy(library, partial)
            return partial.replace(cache / name)
        except OSError:  # the home can't be written to: compile for this process alone
            return Path(shutil.copy(library, tempfile.mkdtemp(prefix="diloco-")))


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
