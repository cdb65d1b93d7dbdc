"""Settings of the libraries for all tests, and fixtures that are made once for all test processes."""

import fcntl
import gc
import json
import os
import shutil
import signal
import sys
from pathlib import Path

# Before anything starts threads: a core for each test process, and each replica that it starts.
os.environ["OMP_NUM_THREADS"] = "1"

# Small files come and go by the thousand: in memory, where that has room, this takes no disk's time. Tests compile
# programs, which some containers do not run from there.
if os.access("/dev/shm", os.W_OK):
    memory = os.statvfs("/dev/shm")
    if memory.f_bavail * memory.f_frsize > 4 << 30 and not memory.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

from collections import Counter
from collections.abc import Callable, Iterator

# All processes of the tests begin with tests/startup/sitecustomize.py; forks inherit it from this one.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).with_name("startup")), os.environ.get("PYTHONPATH")])
)

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

CHECKED = [
    "diloco.outer.merge",
    "diloco.wire.blocks",
    "diloco.wire.floats",
    "diloco.wire.integers",
    "diloco.wire.sparse",
]
"""Modules in which shapes and types of the mathematics are checked at every call, in replicas, too."""

# Before anything imports one of them.
install_import_hook(CHECKED, "beartype.beartype")

from tests.forks import fork_pythons, start_pythons
from tests.memory import backgrounds
from tests.processes import find_server, share_server
from tests.servers import azurite as azurite
from tests.servers import directory as directory
from tests.servers import hugging_face as hugging_face
from tests.servers import moto as moto
from tests.servers import seaweedfs as seaweedfs
from tests.servers import server as server
from tests.servers import short_pauses as short_pauses
from tests.servers import use_environment as use_environment
from tests.startup import sitecustomize as sitecustomize
from tests.training.runs import BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT, complaints, run

from diloco.training.processes import num_cores

# No test survives a power failure, and a busy computer takes long to write to its disk.
os.fsync = lambda descriptor: None

LONGEST = ("test_elastic_scripts.py", "test_two_homes.py", "test_tutorial.py")
"""Files whose tests take half a minute or more each; of others the number of slow tests tells."""

# The same examples in every run, however slow the computer is; the quick tests try fewer of each property.
settings.register_profile("all", deadline=None, derandomize=True)
settings.register_profile("quick", settings.get_profile("all"), max_examples=25)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hostile-examples", type=int, help="mutations of each input in tests/hostile, other ones each time"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores them, and so would its children.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if config.getoption("numprocesses", None):
        share_server()
    else:
        find_server()
        install_import_hook(["diloco.models.decoder"], "beartype.beartype")
    is_quick = config.getoption("markexpr") == "not slow"
    settings.load_profile("quick" if is_quick else "all")
    if num_examples := config.getoption("hostile_examples"):
        random = settings(settings.get_profile("all"), derandomize=False, database=None)
        settings.register_profile("hostile", random, max_examples=num_examples)
        config.option.timeout = 0  # as long as it takes
    else:
        settings.register_profile("hostile", settings.get_profile("all"), max_examples=25 if is_quick else 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two test processes more than there are cores: a third of the time, a test waits for sockets or seconds."""
    return num_cores() + 2


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out helpers, and modules whose tests are all slow: importing a framework takes seconds."""
    if not collection_path.is_relative_to(Path(__file__).parent) or collection_path.suffix != ".py":
        return None
    if not collection_path.name.startswith("test_"):
        return True
    only_quick = config.getoption("markexpr") == "not slow"
    return (only_quick and "\npytestmark = pytest.mark.slow" in collection_path.read_text()) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: one that comes last keeps one core busy, and the others idle."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.path.name not in LONGEST, -num_slow[item.path]))


def pytest_collection_finish() -> None:
    """Spare the modules and tests from collections of garbage, each of which would visit all of their objects."""
    gc.freeze()


@pytest.fixture(autouse=True)
def the_same_random_numbers() -> None:
    """Let a test draw the same numbers whatever ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture
def forked_pythons() -> Iterator[None]:
    """Processes of Python that the test starts are forks of this one, which has imported torch."""
    fork_pythons()
    yield
    start_pythons()


@pytest.fixture(autouse=True, scope="module")
def no_replica_outlives_its_module() -> Iterator[None]:
    """A replica that a test leaves would ask its store for news, and its engine warn, until the process ends."""
    yield
    for background in list(backgrounds()):
        background.stop()
    if streaming := sys.modules.get("diloco.engine.streaming"):
        for engine in [*streaming._WATCHED]:
            streaming.silence_end_warning(engine)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`once(name, make)`: a folder that `make` has filled, by the first of the test processes that asks for it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder, finished = root / name, root / f"{name}.finished"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not finished.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                finished.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def small_corpus(once) -> Path:
    """A file of sentences that a tiny model can learn something of."""
    return once("corpus", _write_corpus) / "text.jsonl"


def _write_corpus(folder: Path) -> None:
    subjects, verbs, objects = (
        ("the cat", "a ship", "my aunt"),
        ("sees", "carries", "forgets"),
        ("rain", "salt", "him"),
    )
    sentences = [f"{s} {v} {o}, {i}." for i in range(40) for s in subjects for v in verbs for o in objects]
    rows = [{"id": str(i), "text": " ".join(sentences[i : i + 30])} for i in range(0, len(sentences), 10)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def finished_run(once, small_corpus: Path) -> Path:
    """A finished run of two replicas; a test that changes it copies it first."""

    def train(folder: Path) -> None:
        shutil.copy(small_corpus, folder / "text.jsonl")
        flags = ["--num-tokens", "61440", "--log-layer-cosine", "--data.cache", str(folder / "data")]
        flags += ["--evaluation.every-steps", "60", "--evaluation.num-tokens", "8192"]
        flags += BOTH_REPLICAS_HAVE_FRAGMENTS_IN_FLIGHT
        process = run(folder, "--name", "streaming", *flags)
        assert process.returncode == 0, process.stdout + process.stderr
        assert not complaints(process), process.stderr
        (folder / "printed.txt").write_text(process.stdout)

    return once("finished_run", train) / "runs" / "streaming"
