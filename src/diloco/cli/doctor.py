"""`diloco doctor`: what is fast on this machine, what is missing, and how to get it. It needs no extra."""

import argparse
import dataclasses
import importlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NoReturn

from diloco.errors import DilocoError, MissingLibraryError, UserError
from diloco.files import memory_bytes, num_cores
from diloco.version import __version__

HELP = "what is fast on this machine, what is missing, and how to get it: diloco doctor [URL]"
ORDER = 10
OLDEST_TORCH, NEWEST_TORCH = (2, 9), (2, 14)
"""The versions of torch with which the tests ran."""
_IMPORTED = ("train", "store")
"""Extras whose libraries are imported to see that they work; others take seconds."""
_NOT_FOR_USERS = ("all", "dev", "docs", "peers", "release")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A part of the machine."""

    part: str
    state: Literal["good", "absent", "broken"]
    text: str
    """A version or a speed, or the reason why it is absent or broken, and what to do."""


def run(arguments: list[str]) -> None:
    """Show the findings; ends with 1 if something that is installed is broken."""
    parser = _Parser(prog="diloco doctor", description=HELP.partition(":")[0].capitalize() + ".")
    parser.add_argument("url", nargs="?", metavar="URL", help="check a store, too, as diloco store check does")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(arguments)
    findings = list(_findings(asked.url))
    if asked.json:
        print(json.dumps({"version": __version__, "parts": [dataclasses.asdict(one) for one in findings]}))
    else:
        print("\n".join(_screen(findings)))
    if broken := dict.fromkeys(one.part for one in findings if one.state == "broken"):
        raise DilocoError(f"{', '.join(broken)} can't work as it is")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help)")


def _screen(findings: list[Finding]) -> Iterator[str]:
    gigabytes = memory_bytes() / 1e9
    yield f"diloco {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"{num_cores()} cores, {gigabytes:.0f} GB of memory\n"
    marks = {"good": "+", "absent": "-", "broken": "!"}
    yield from (f"{marks[one.state]} {one.part:14} {one.text}" for one in findings)
    yield "\n+ there   - absent   ! broken"


def _findings(url: str | None) -> Iterator[Finding]:
    for part, find in _PARTS.items():
        try:
            yield find(part)
        except Exception as error:  # a library of another's that is broken may raise anything
            yield Finding(part, "broken", _reason(error))
    yield from _extras()
    if url is not None:
        yield _store(url)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _torch(part: str) -> Finding:
    import torch

    numbers = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    tried = f"{'.'.join(map(str, OLDEST_TORCH))} to {'.'.join(map(str, NEWEST_TORCH))}"
    if numbers < OLDEST_TORCH:
        return Finding(part, "broken", f"{torch.__version__} is too old: run pip install 'torch>={tried[:3]}'")
    within = "of those tried" if numbers <= NEWEST_TORCH else "newer than those tried"
    return Finding(part, "good", f"{torch.__version__}, {within}, {tried}")


def _native(part: str) -> Finding:
    from diloco.wire.kernels.compiling import SOURCE
    from diloco.wire.kernels.native import native

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        functions = native()
    if functions is None:
        why = re.findall(r"\((.*)\)$", str(caught[-1].message)) if caught else []
        return Finding(part, "absent", f"encoding is several times slower: {' '.join(why)}")
    if functions.path.parent == SOURCE.parent:
        name = functions.path.stem.rpartition("-")[2]
        return Finding(part, "good", f"{name}, from the wheel")
    return Finding(part, "good", f"compiled for this processor: {functions.path}")


def _compiler(part: str) -> Finding:
    from diloco.wire.kernels.compiling import compiler

    try:
        command = compiler()
        answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=20, check=True)
        return Finding(part, "good", answer.stdout.splitlines()[0])
    except OSError as error:
        return Finding(part, "absent", f"{error}; torch.compile needs one")


def _gpu(part: str) -> Finding:
    import torch

    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        torch.ones(8, dtype=torch.float32, device="cuda").sum().item()
        return Finding(part, "good", f"{torch.cuda.device_count()} of {', '.join(names)}, {runtime}")
    if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists():
        built = torch.version.cuda or torch.version.hip or "CPUs"
        return Finding(part, "broken", f"this torch, built for {built}, can't use it: see pytorch.org/get-started")
    if torch.backends.mps.is_available():
        return Finding(part, "good", "Apple's, with --device mps: no run has tried it")
    return Finding(part, "absent", "replicas train on the CPU")


def _triton(part: str) -> Finding:
    if find_spec("triton") is None:
        return Finding(part, "absent", "comes with a torch for GPUs, and is used on them alone")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.exists():
        return Finding(part, "absent", f"{version('triton')}, but {header} is missing: install Python's headers")
    return Finding(part, "good", version("triton"))


def _threads(part: str) -> Finding:
    import torch

    asked = os.environ.get("OMP_NUM_THREADS")
    return Finding(
        part, "good", f"{torch.get_num_threads()} of torch on {num_cores()} cores; OMP_NUM_THREADS={asked or ''}"
    )


def _network(part: str) -> Finding:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding(part, "broken", "this torch has no gloo: install another build")
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=10).close()
    interfaces = {name for _, name in socket.if_nameindex()}
    asked = os.environ.get("GLOO_SOCKET_IFNAME")
    if asked and not set(asked.split(",")) <= interfaces:
        there = ", ".join(sorted(interfaces))
        return Finding(part, "broken", f"GLOO_SOCKET_IFNAME={asked} is no interface: take one of {there}")
    return Finding(part, "good", f"loopback and gloo; interface for other machines: {asked or _address()}")


def _address() -> str:
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = ""
    if not address or address.startswith("127."):
        return "unknown, set GLOO_SOCKET_IFNAME"
    return f"that of {address}"


def _disk(part: str) -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    if not os.access(Path.cwd(), os.W_OK):
        return Finding(part, "broken", f"{Path.cwd()} can't be written to: change to another directory")
    return Finding(part, "good", f"{free:.0f} GB free here")


_PARTS: dict[str, Callable[[str], Finding]] = {
    "torch": _torch,
    "native code": _native,
    "C compiler": _compiler,
    "GPU": _gpu,
    "Triton": _triton,
    "threads": _threads,
    "network": _network,
    "disk": _disk,
}


def _extras() -> Iterator[Finding]:
    """The optional dependencies: extras that are there, broken ones among them, and those that are absent."""
    try:
        about = metadata("diloco")
    except PackageNotFoundError:
        yield Finding("extras", "absent", "diloco runs from its source: pip install --editable . names them")
        return
    needs: dict[str, list[str]] = {extra: [] for extra in about.get_all("Provides-Extra") or ()}
    for line in about.get_all("Requires-Dist") or ():
        if match := re.search(r"""extra\s*==\s*['"]([\w-]+)""", line):
            needs[match[1]].append(line)
    names = {extra: _distributions(extra, needs) for extra in sorted(needs) if extra not in _NOT_FOR_USERS}
    there = [extra for extra, some in names.items() if all(map(_is_installed, some))]
    if there:
        yield Finding("extras", "good", ", ".join(there))
    modules = _modules()
    for extra in (extra for extra in _IMPORTED if extra in there):
        faults = (_fault(one, modules.get(_normal(one), [])) for one in sorted(names[extra]))
        yield from (Finding(extra, "broken", fault) for fault in faults if fault)
    if absent := [extra for extra in names if extra not in there]:
        yield Finding("extras", "absent", f"{', '.join(absent)}: run pip install 'diloco[NAME]'")


def _distributions(extra: str, needs: dict[str, list[str]]) -> set[str]:
    """The libraries of an extra, those of the extras that it names included."""
    names: set[str] = set()
    for line in needs[extra]:
        name = re.match(r"[\w.-]+", line)
        assert name is not None, line
        inner = re.match(r"diloco\[([\w,-]+)\]", line)
        parts = [_distributions(one, needs) for one in inner[1].split(",")] if inner else [{name[0]}]
        names.update(*parts)
    return names


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def _modules() -> dict[str, list[str]]:
    """The public modules of each installed library, which may have other names: pyyaml has yaml."""
    modules: dict[str, list[str]] = {}
    for module, distributions in packages_distributions().items():
        for distribution in distributions if module.isidentifier() and module[0] != "_" else ():
            modules.setdefault(_normal(distribution), []).append(module)
    return modules


def _normal(distribution: str) -> str:
    """A library's name, whose metadata may write it otherwise: huggingface-hub is huggingface_hub."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _fault(distribution: str, modules: Sequence[str]) -> str:
    """The reason why a library that is installed can't be imported; empty if it can."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        return f"{distribution}, {_reason(error)}: run pip install --force-reinstall {distribution}"
    return ""


def _store(url: str) -> Finding:
    from diloco.rendezvous.check import check_store
    from diloco.units import rate

    try:
        checked = check_store(url)
    except MissingLibraryError as error:
        return Finding("store", "absent", str(error))
    except DilocoError as error:
        return Finding("store", "broken", str(error))
    create, get = (f"{1e3 * median:.1f} ms" for median, _ in (checked.create_seconds, checked.get_seconds))
    up, down = (rate(8e-9 * bytes_s) for bytes_s in (checked.up_bytes_s, checked.down_bytes_s))
    text = f"{checked.num_races} races had one winner each; create {create}, get {get}; {up} up, {down} down"
    return Finding("store", "good", f"{text}{checked.trouble and '; ' + checked.trouble}")
