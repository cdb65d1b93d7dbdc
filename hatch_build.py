"""Put native code into the wheel: all variants for the machine that CC compiles for, another than this one too.

Without a compiler the wheel has no native code, and fits any machine: native.c is then compiled where it is first
used.
"""

import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "diloco/wire/kernels"
sys.path.insert(0, str(Path(__file__).parent / "src" / PLACE))
import compiling  # noqa: E402

OLDEST_GLIBC = 17
"""The minor version of the oldest glibc that pip knows a name for, manylinux_2_17."""


class NativeLibraries(BuildHookInterface):
    """Adds them to a wheel, and names the machines that it fits."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them; an editable install compiles native.c as it is when it is used."""
        if version == "editable":
            return
        self._scratch = TemporaryDirectory()
        folder = Path(self._scratch.name)
        try:
            libraries, triple = compiled(folder)
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"the wheel has no native code: {error}")
            return
        build_data["tag"] = f"py3-none-{platform_tag(triple, libraries)}"
        build_data["pure_python"] = False
        build_data["force_include"] |= {str(library): f"{PLACE}/{library.name}" for library in libraries}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete what was compiled."""
        if version != "editable":
            self._scratch.cleanup()


def compiled(folder: Path) -> tuple[list[Path], str]:
    """The libraries in a folder, and the compiler's name for the machines that they are for."""
    command = compiling.compiler()
    answer = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, timeout=60, check=True)
    triple = answer.stdout.strip()
    machine = triple.partition("-")[0]

    def library(variant: compiling.Variant) -> Path:
        output = folder / variant.file(machine)
        compiling.compile_native([*command, "-s"], [variant.flags], output, compiling.SOURCE)
        return output

    with ThreadPoolExecutor() as threads:
        return list(threads.map(library, compiling.variants(machine))), triple


def platform_tag(triple: str, libraries: list[Path]) -> str:
    """The platform in a wheel's name: for glibc, that of the newest symbols that the libraries use."""
    if not re.search("-linux-gnu$", triple):
        return re.sub("[-.]", "_", sysconfig.get_platform())
    symbols = (re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes()) for library in libraries)
    newest = max([OLDEST_GLIBC, *(int(minor) for some in symbols for minor in some)])
    return f"manylinux_2_{newest}_{triple.partition('-')[0]}"
