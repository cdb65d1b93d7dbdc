"""The wheel and the sdist: their files, the bits of native code, and a run in an environment of its own."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from diloco.wire.kernels.compiling import SOURCE, Variant, compile_native, compiler, features, variants
from diloco.wire.kernels.native import compiled_library

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
ARM, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"


def hurried(command: str, folder: Path, level: str) -> str:
    """A compiler that optimizes less than it is asked to: -O0 takes a tenth of the time of -O3."""
    program = folder / "cc"
    program.write_text(f'#!/bin/sh\nexec {command} "$@" {os.environ.get("WHEEL_OPTIMIZATION", level)}\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    environment = os.environ.copy()
    if HAS_COMPILER:
        environment["CC"] = hurried(shlex.join(compiler()), tmp_path_factory.mktemp("compiler"), "-O0")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def package_files() -> set[str]:
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT / "src").as_posix() for path in files if ".egg-info" not in str(path)}


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    machine = platform.machine()
    native = {f"diloco/wire/kernels/{one.file(machine)}" for one in variants(machine)} if HAS_COMPILER else set()
    assert names == package_files() | native
    assert {"diloco/py.typed", "diloco/wire/kernels/native.c"} <= names


@pytest.fixture(scope="module")
def libraries(built: tuple[Path, Path], tmp_path_factory) -> dict[Variant, Path]:
    """The native libraries of the wheel."""
    folder, machine = tmp_path_factory.mktemp("wheel"), platform.machine()
    with zipfile.ZipFile(built[0]) as wheel:
        return {
            one: Path(wheel.extract(f"diloco/wire/kernels/{one.file(machine)}", folder))
            for one in variants(machine)
        }


def bits(folder: Path, library: Path, compiler: list[str], *emulator: str) -> str:
    """The output of bits.c about a library, which runs on this machine or in an emulator."""
    program = folder / "bits"
    subprocess.run([*compiler, "-O1", ROOT / "tests/wire/bits.c", "-o", program, "-ldl"], check=True, timeout=60)
    done = subprocess.run([*emulator, program, library], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not HAS_COMPILER, reason="native.c needs a C compiler")
def test_each_library_that_can_run_here_has_the_bits_of_what_is_compiled_here(libraries, tmp_path):
    expected = bits(tmp_path, Path(compiled_library()._name), compiler())
    assert len(expected.splitlines()) == 18 and len(set(expected.split()[1::2])) == 18
    for variant, library in libraries.items():
        if variant.needs <= features():
            assert bits(tmp_path, library, compiler()) == expected, variant.name


@pytest.mark.skipif(not (shutil.which(ARM) and shutil.which(EMULATOR)), reason=f"needs {ARM} and {EMULATOR}")
def test_the_library_for_arm_has_the_same_bits(tmp_path):
    compile_native([hurried(ARM, tmp_path, "-Og")], [variants("aarch64")[0].flags], tmp_path / "arm.so", SOURCE)
    emulator = [EMULATOR, "-L", "/usr/aarch64-linux-gnu"]
    here = bits(tmp_path, Path(compiled_library()._name), compiler())
    assert bits(tmp_path, tmp_path / "arm.so", [ARM], *emulator) == here


@pytest.mark.skipif(not HAS_COMPILER, reason="native.c needs a C compiler")
def test_the_wheel_fits_any_linux_with_an_old_glibc_and_needs_no_other_library(built, libraries):
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        assert built[0].stem.split("-")[2:] == ["py3", "none", f"manylinux_2_17_{platform.machine()}"]
    for library in libraries.values():
        assert {*re.findall(rb"\0(lib\w+)\.so", library.read_bytes())} <= {b"libc", b"libm"}


def test_the_sdist_holds_what_the_tests_need(built: tuple[Path, Path]):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in package_files()} <= names
    assert {"hatch_build.py", "README.md", "LICENSE", "pyproject.toml", "constraints.txt", "Makefile"} <= names
    assert {"tests/conftest.py", "benchmarks/links.py", "examples/own_loop.py"} <= names


TRAIN_AND_TELL = """
import diloco.wire.kernels.native as it
from diloco.cli.main import main
main()
print(it.__file__, it.native() and it.native().path.parent)
"""


def test_the_wheel_trains_in_an_environment_of_its_own(
    built: tuple[Path, Path], tmp_path: Path, small_corpus: Path
):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    # The dependencies are those of this environment; its .pth files, such as an editable diloco's, are not read.
    site_packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(site_packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC")}
    environment |= {
        "PATH": str(python.parent),
        "XDG_CACHE_HOME": str(tmp_path),
    }  # without a compiler

    def call(*command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    installer = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    call(*installer, "--ignore-installed", "--disable-pip-version-check", built[0])
    data = ["--data.train", small_corpus, "--data.held-out-fraction", "0.1", "--num-replicas", "1"]
    train = ["train", "tiny", "--name", "packaged", "--num-tokens", 20 * 8 * 64, *data]
    *_, file, folder = call(python, "-c", TRAIN_AND_TELL, *train).split()
    assert Path(file).parent.is_relative_to(site_packages)
    assert folder == (str(Path(file).parent) if HAS_COMPILER else "None")
    assert call(python.with_name("diloco"), "--version")
    assert (tmp_path / "runs" / "packaged" / "summary.json").exists()
