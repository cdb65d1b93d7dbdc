"""The wheel and the sdist: their files, and a run from the wheel in an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def package_files() -> set[str]:
    files = (path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT / "src").as_posix() for path in files if ".egg-info" not in str(path)}


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == package_files()
    assert {"diloco/py.typed", "diloco/wire/kernels/native.c"} <= names


def test_the_sdist_holds_what_the_tests_need(built: tuple[Path, Path]):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in package_files()} <= names
    assert {"README.md", "LICENSE", "pyproject.toml", "constraints.txt", "Makefile"} <= names
    assert {"tests/conftest.py", "benchmarks/links.py", "examples/own_loop.py"} <= names


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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    installer = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"]
    call(*installer, "--ignore-installed", "--disable-pip-version-check", built[0])
    assert call(python, "-c", "import diloco; print(diloco.__file__)").startswith(site_packages)
    data = ["--data.train", small_corpus, "--data.held-out-fraction", "0.1", "--num-replicas", "1"]
    call(python.with_name("diloco"), "train", "tiny", "--name", "packaged", "--num-tokens", 20 * 8 * 64, *data)
    assert (tmp_path / "runs" / "packaged" / "summary.json").exists()
