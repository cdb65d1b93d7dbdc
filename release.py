"""Build the release, prove that it can be built again with the same bytes, check it, install it, and run it.

    make release

The sdist and the wheels are built from the tree, and once more from the unpacked sdist. The wheel for ARM needs
aarch64-linux-gnu-gcc. Each wheel is checked by auditwheel and twine. This machine's is installed in new
environments, in which neither compiler nor git can be found: core, train and all, and without torch where a Python
has none to install.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent
ARM = "aarch64-linux-gnu-gcc"
EXTRAS = ("", "train", "all")
WITHOUT_TORCH = ("numpy", "jaxtyping", "safetensors", "msgspec", "xxhash", "tyro", "rich")


def main() -> None:
    """Print each check, and a table of the installs; ends with 1 at the first that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--pythons", nargs="*", default=["python3.11"], help="those that have a torch to install")
    parser.add_argument("--without-torch", nargs="*", default=[], help="those that have none")
    asked = parser.parse_args()
    clear(asked.output)
    files = build(ROOT, asked.output)
    for name, digest in again(asked.output).items():
        if digest != sha256(asked.output / name):
            raise SystemExit(f"{name} has other bytes when it is built again")
        print(f"{name}: {(asked.output / name).stat().st_size:,} bytes, the same when built again: {digest}")
    check(files)
    wheel = next(file for file in files if file.name.endswith(f"{os.uname().machine}.whl"))
    print("\n| Python | install | packages | MB | seconds | seconds of CPU |\n|---|---|---|---|---|---|")
    for python in asked.pythons:
        for extra in EXTRAS:
            installed(python, wheel, extra)
    for python in asked.without_torch:
        without_torch(python, wheel)


def clear(output: Path) -> None:
    """Delete an earlier release; ends with 1 at a directory that holds anything else."""
    files = [*output.iterdir()] if output.exists() else []
    for file in files:
        if not (file.is_file() and file.name.startswith("diloco-") and file.name.endswith((".whl", ".tar.gz"))):
            raise SystemExit(f"{output} holds {file.name}, which is no part of a release: choose another --output")
    for file in files:
        file.unlink()


def build(source: Path, output: Path) -> list[Path]:
    """The sdist and the wheels of a source tree; without a compiler for it, none for ARM."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1577836800"}  # 2020-01-01
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(output)]
    subprocess.run(command, cwd=source, env=environment, check=True, stdout=subprocess.DEVNULL)
    if shutil.which(ARM):
        arm = environment | {"CC": ARM}
        subprocess.run([*command, "-t", "wheel"], cwd=source, env=arm, check=True, stdout=subprocess.DEVNULL)
    else:
        print(f"no wheel for ARM: {ARM} is missing")
    return sorted(output.glob("diloco-*"))


def again(output: Path) -> dict[str, str]:
    """The digests of the same files, built from the sdist."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(next(output.glob("*.tar.gz"))) as sdist:
            sdist.extractall(scratch, filter="data")
        source = next(Path(scratch).iterdir())
        return {file.name: sha256(file) for file in build(source, Path(scratch) / "again")}


def sha256(file: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check(files: Sequence[Path]) -> None:
    """Ask auditwheel and twine."""
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    for wheel in (file for file in files if file.suffix == ".whl"):
        command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
        answer = " ".join(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
        tag = wheel.stem.rpartition("-")[2]
        if f'"{tag}"' not in answer:
            raise SystemExit(f"auditwheel does not find {tag}: {answer}")
        print(f"auditwheel: {wheel.name} is consistent with {tag}")


def installed(python: str, wheel: Path, extra: str) -> None:
    """Install the wheel with an extra; run what it can, and print a row of the table."""
    with tempfile.TemporaryDirectory() as scratch:
        call, seconds = environment(python, Path(scratch), f"{wheel}[{extra}]" if extra else str(wheel))
        parts = {one["part"]: one for one in json.loads(call("doctor", "--json"))["parts"]}
        assert parts["native code"]["text"].endswith("from the wheel"), parts["native code"]
        assert parts["C compiler"]["state"] == "absent", parts["C compiler"]
        trained = call("train", "tiny", succeeds=bool(extra))
        row(python, extra or "core", Path(scratch), seconds, trained)


def without_torch(python: str, wheel: Path) -> None:
    """Install the wheel without its dependencies, and some of these; run what needs no torch."""
    with tempfile.TemporaryDirectory() as scratch:
        call, seconds = environment(python, Path(scratch), "--no-deps", str(wheel), others=WITHOUT_TORCH)
        assert "train" in call("--help")
        planned = call("plan", "--num-params", "1B", "--step-seconds", "1", "--link", "100Mbit")
        row(python, "without torch", Path(scratch), seconds, planned)


def environment(
    python: str, folder: Path, *words: str, others: Sequence[str] = ()
) -> tuple[Callable[..., str], tuple[float, float]]:
    """A function that runs diloco in a new environment, where no compiler is found; and seconds of installing."""
    subprocess.run([python, "-m", "venv", folder / "env"], check=True)
    bare = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC")}
    pip = [folder / "env/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", ROOT / "constraints.txt"]
    began, before = time.perf_counter(), os.times()
    for some in filter(None, (others, words)):
        subprocess.run([*pip, *some], check=True, env=bare)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    seconds = (time.perf_counter() - began, cpu)
    bare |= {"PATH": str(folder / "env/bin"), "HOME": str(folder)}

    def call(*command: str, succeeds: bool = True) -> str:
        diloco = [folder / "env/bin/diloco", *command]
        done = subprocess.run(diloco, cwd=folder, env=bare, capture_output=True, text=True, timeout=600)
        assert (done.returncode == 0) == succeeds, (command, done.stdout, done.stderr)
        return done.stdout if succeeds else done.stderr

    return call, seconds


def row(python: str, name: str, folder: Path, seconds: tuple[float, float], printed: str) -> None:
    """Print the sizes of an environment, and the last line of what ran in it."""
    packages = next((folder / "env/lib").glob("python3*/site-packages"))
    count = sum(1 for _ in packages.glob("*.dist-info")) - 2  # pip and diloco
    size = sum(file.stat().st_size for file in files_in(packages)) / 1e6
    print(f"| {python} | {name} | {count} | {size:.0f} | {seconds[0]:.0f} | {seconds[1]:.0f} |", flush=True)
    print(f"  {printed.strip().splitlines()[-1][:110]}", file=sys.stderr)


def files_in(folder: Path) -> Iterator[Path]:
    """The files below a folder."""
    return (file for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
