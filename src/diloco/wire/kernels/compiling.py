"""The compiler of native.c: for this very processor, or, as a wheel is built, in variants for any of its kind.

All variants, and the code that is compiled for one processor, give the same bits. `hatch_build.py` runs this file
where nothing is installed: it imports the standard library alone.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
SOURCES = SOURCE, SOURCE.with_name("native_cells.h")
"""The files that the compiler reads."""
FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# 512 bits make encoding a fifth slower on Zen 4.
_NARROW = "-mprefer-vector-width=256"
THIS_PROCESSOR = (("-march=native", _NARROW), ("-march=native",), ("-mcpu=native",), ())
"""Flags for the processor that compiles: the first that the compiler knows are used."""


@dataclass(frozen=True)
class Variant:
    """A library that a wheel holds."""

    name: str
    flags: tuple[str, ...] = ()
    """The compiler's flags for it."""
    needs: frozenset[str] = frozenset()
    """The processor's features without which it can't run, as Linux names them."""

    def file(self, machine: str) -> str:
        """The name of the library beside native.c."""
        return f"native-{machine}-{self.name}.so"


# Without VBMI, or tuned for no processor, AVX-512 encodes e3m0 a fifth slower than code for Zen 4 alone.
_TUNED = "-mtune=znver3"
_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vbmi"])
_X86 = (
    Variant("avx512", ("-march=x86-64-v4", "-mavx512vbmi", _TUNED, _NARROW), _AVX512),
    Variant("avx2", ("-march=x86-64-v3", _TUNED), _AVX2),
    Variant("baseline"),
)


def variants(machine: str) -> tuple[Variant, ...]:
    """The variants for an architecture, as `platform.machine` names it; the fastest first."""
    return _X86 if machine == "x86_64" else (Variant("baseline"),)


def features() -> frozenset[str]:
    """The features of this processor; none are known outside Linux."""
    return frozenset(word for line in processor_lines(("flags",)) for word in line.partition(":")[2].split())


def processor_lines(names: tuple[str, ...]) -> set[str]:
    """The lines that Linux has about its processors and that begin with one of the names; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {line for line in lines if line.startswith(names)}


def compiler() -> list[str]:
    """The command of a C compiler.

    Raises:
        OSError: if there is none.
    """
    try:
        command = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise OSError(f"CC={os.environ['CC']} is no command: {error}") from error
    command = command or list(filter(shutil.which, ("cc", "gcc", "clang")))[:1]
    if not command:
        raise OSError("no C compiler was found (install gcc or clang, or name one in CC)")
    return command


def compile_native(command: Sequence[str], flags: Iterable[Sequence[str]], output: Path, source: Path) -> None:
    """Compile native.c with the first of `flags` that the compiler knows.

    Raises:
        OSError: if it knows none, or fails.
        subprocess.SubprocessError: if it does not end.
    """
    complaint = ""
    for some in flags:
        words = [*command, *FLAGS, *some, str(source), "-o", str(output), "-lm"]
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="replace", timeout=300, check=False
        )
        if done.returncode == 0:
            return
        complaint = " ".join(done.stderr.split())[-300:]
    raise OSError(f"{shlex.join(command)} failed: {complaint}")
