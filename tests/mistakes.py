"""Mistakes of a newcomer: command lines that can't work, typed anew.

`tests/mistakes.jsonl` holds one mistake per line: what is typed, the sentence that ends it after `diloco: `, and
the exit code. `python -m tests.mistakes` writes today's sentences into that file.

Each mistake has a process of its own, forked from one that has imported torch, and a folder of its own. The folder
has `text.jsonl`, which is as it should be, and files whose names say what is wrong with them; `runs/first` is a
finished run of `tiny`, and `store` holds the finished run of the replica `a`.
"""

import gc
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from diloco.cli.main import main as diloco
from diloco.cli.main import verbs
from diloco.training.records.runs import running

LIST = Path(__file__).with_suffix(".jsonl")
HOME = "/home/me"
"""The folder of every mistake, in the list."""
MOST_SECONDS = 60.0
MOST_LINES = 5
PREPARED = (
    "diloco train tiny --data.train text.jsonl --num-tokens 10240 --name first",
    "diloco train tiny --data.train text.jsonl --num-tokens 10240 --rendezvous store --name a",
    "diloco data prepare --train stdlib --max-train-bytes 100000 --output prepared",
)
"""The runs that are there before a mistake is made."""
_ALSO_IMPORTED = (
    *("diloco.training.records.finished", "diloco.training.config.forecast", "diloco.training.prepare"),
    *("diloco.training.loop", "diloco.report.terminal.training", "diloco.rendezvous.store_rendezvous"),
    "torch.distributed.run",
)


@dataclass(frozen=True)
class Mistake:
    """A line of the list."""

    typed: str
    """The line as one types it in a shell, of which `NAME=value`, `ulimit -f N;` and `> FILE` are understood."""
    sentence: str = ""
    """The sentence that ends it."""
    exit_code: int = 0
    remark: str = ""
    """Words for what the command line does not show."""
    meanwhile: str = ""
    """Key of `_MEANWHILE`: what goes on while the line is typed."""
    has_report: bool = False
    """Another program adds lines to the sentence."""


def read_list() -> list[Mistake]:
    """All mistakes, with the sentences that the list expects."""
    return [Mistake(**json.loads(line)) for line in LIST.read_text().splitlines()]


def write_list(mistakes: Sequence[Mistake], path: Path = LIST) -> None:
    """Write mistakes as the list has them."""
    fields = ({name: value for name, value in asdict(mistake).items() if value} for mistake in mistakes)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in fields))


@dataclass(frozen=True)
class Answer:
    """The output, the errors and the exit code of a command line."""

    output: str
    errors: str
    exit_code: int
    """Exit code of the process; negative if it was still running after `MOST_SECONDS`."""

    @property
    def sentence(self) -> str:
        """The first line of the errors without the program's name."""
        return self.errors.partition("\n")[0].removeprefix("diloco: ")


def make_all(path: Path) -> None:
    """Make all mistakes of the list, and write them with today's sentences."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as many mistakes as there are cores are made at a time
    for module in (*(f"diloco.cli.{verb}" for verb in verbs()), *_ALSO_IMPORTED):
        import_module(module)
    mistakes = read_list()
    with tempfile.TemporaryDirectory() as root:
        home = Path(root).resolve() / "home"
        home.mkdir()
        with chdir(home):
            write_files()
        preparing = answers(list(map(Mistake, PREPARED)), [home] * len(PREPARED))
        for command, answer in zip(PREPARED, preparing, strict=True):
            if answer.exit_code != 0:
                raise SystemExit(f"{command}: {answer}")
        gc.freeze()  # no process then copies the pages of what has been imported
        made = answers(mistakes, list(_copies(home, len(mistakes))))
    pairs = list(zip(mistakes, made, strict=True))
    if complaints := [f"{one.typed}: {text}" for one, answer in pairs for text in faults(one, answer)]:
        raise SystemExit("\n".join(complaints))
    write_list([replace(one, sentence=answer.sentence, exit_code=answer.exit_code) for one, answer in pairs], path)


def _copies(folder: Path, number: int) -> Iterator[Path]:
    for index in range(number):
        copy = folder.with_name(f"copy-{index}")
        shutil.copytree(folder, copy, copy_function=_copy)
        for config in copy.glob("runs/*/config.json"):  # it names the place of its text
            config.write_text(config.read_text().replace(str(folder), str(copy)))
        yield copy


def _copy(source: str, target: str) -> None:
    """Copy a file, or name it twice where it is large, of tensors or tokens: those are replaced, never changed."""
    (shutil.copy2 if Path(source).stat().st_size < 1 << 14 else os.link)(source, target)


def answers(mistakes: Sequence[Mistake], folders: Sequence[Path]) -> list[Answer]:
    """The answers to mistakes, of which as many as there are cores are made at a time."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        return list(pool.map(_answer, mistakes, folders))


def _answer(mistake: Mistake, folder: Path) -> Answer:
    """The answer to a mistake, without the words that differ from one machine to another."""
    streams = Path(tempfile.mkdtemp(dir=folder.parent))
    os.chdir(folder)
    with _MEANWHILE[mistake.meanwhile]():
        process = get_context("fork").Process(target=_make, args=(mistake.typed, folder, streams))
        process.start()
        process.join(MOST_SECONDS)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
    output, errors = (path.read_text() if path.exists() else "" for path in _files_of(streams))
    output, errors = (_same_everywhere(text.replace(str(folder), HOME)) for text in (output, errors))
    return Answer(output, errors, process.exitcode or 0)


def _same_everywhere(text: str) -> str:
    text = re.sub(r"/data/[0-9a-f]{16}", "/data/0123456789abcdef", text)
    process = r"process \d+ on \S+ since [\d-]+ [\d:]+"
    return re.sub(process, "process 4242 on host since 2026-01-31 12:00", text)


def _files_of(streams: Path) -> tuple[Path, Path]:
    return streams / "output", streams / "errors"


def _make(typed: str, folder: Path, streams: Path) -> None:
    """Do as a shell would, in this process."""
    os.setsid()
    os.chdir(folder)
    typed, _, output = typed.partition(" > ")
    if limit := re.match(r"ulimit -f (\d+); ", typed):
        typed = typed.removeprefix(limit[0])
        most_bytes = int(limit[1]) * 1024
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    words = shlex.split(typed)
    for name in [name for name in os.environ if name.startswith(_THEIR_OWN)]:
        del os.environ[name]
    os.environ["HF_HOME"] = str(folder / "hub")
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    ordinary, errors = _files_of(streams)
    paths = Path(os.devnull), Path(output) if output else ordinary, errors
    for stream, path in zip((sys.stdin, sys.stdout, sys.stderr), paths, strict=True):
        os.dup2(os.open(path, os.O_RDONLY if stream is sys.stdin else os.O_CREAT | os.O_WRONLY), stream.fileno())
    program = {"diloco": diloco, "torchrun": import_module("torch.distributed.run").main}[words[0]]
    program(words[1:])


_THEIR_OWN = ("AWS_", "AZURE_", "COLUMNS", "DILOCO_", "GOOGLE_", "HF_", "RANK", "WORLD_SIZE")
"""Beginnings of variables that would change what is said."""


def faults(mistake: Mistake, answer: Answer) -> Iterator[str]:
    """The faults of an answer's form, in words."""
    if answer.exit_code not in (1, 2):
        yield f"exit code {answer.exit_code}"
    if mistake.has_report:
        answer = Answer("", answer.errors.partition("\n")[0] + "\n", answer.exit_code)
    if not answer.errors.startswith("diloco: ") or answer.errors.count("\n") != 1:
        yield f"no sentence: {answer.errors}"
    if answer.output.count("\n") >= MOST_LINES:
        yield f"too much beside it: {answer.output}"


def write_files() -> None:
    """Write the files with which the mistakes are made into the working directory."""
    subjects, verbs = ("the cat", "a ship", "my aunt"), ("sees", "carries", "forgets")
    sentences = [
        f"{s} {v} {o}, {i}." for i in range(40) for s in subjects for v in verbs for o in ("rain", "salt")
    ]
    rows = [{"text": " ".join(sentences[i : i + 30])} for i in range(0, len(sentences), 5)]
    texts = {
        "text.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "empty.txt": "",
        "notes/README.md": "",
        "chats.jsonl": json.dumps({"content": "Hello."}) + "\n",
        "table.csv": "number,body\n1,Hello.\n",
        "short.txt": "Hello.\n",
        "notes.json": '{"a": 1}\n',
        "broken.toml": 'recipe = "tiny"\n[diloco\nsync_every = 10\n',
        "typo.toml": 'recipe = "tiny"\n[diloco]\nsync_evry = 10\n',
        "section.toml": 'recipe = "tiny"\nsync_every = 10\n',
        "gpt2.json": '{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 257}',
        "old/model.safetensors": "",
        "tables/overlap.csv": "tier,seed,run,eval_loss\nsmall,0,run-0123456789ab,1.7\n",
    }
    for name, text in texts.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("photo.txt").write_bytes(b"\x89PNG\r\n\x1a\n")
    Path("photo.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    Path("notes.json").chmod(0o644)
    for path in Path().rglob("*.*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))  # the names of prepared directories depend on them


@contextmanager
def _busy(port: int) -> Iterator[None]:
    with socket.socket() as other:
        with suppress(OSError):  # then it is in use by somebody else
            other.bind(("127.0.0.1", port))
            other.listen()
        yield


@contextmanager
def _a_run_that_goes_on() -> Iterator[None]:
    with running(Path("runs/first").absolute()):
        yield


@contextmanager
def _moved_data() -> Iterator[None]:
    shutil.move("data", "elsewhere")
    yield


@contextmanager
def _checkpoints_elsewhere() -> Iterator[None]:
    shutil.rmtree("runs/first/checkpoints/replica-1")
    yield


_MEANWHILE: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    "port 8899 is busy": partial(_busy, 8899),
    "port 8898 is busy": partial(_busy, 8898),  # a second one: the process of another mistake may keep one open
    "the run goes on": _a_run_that_goes_on,
    "its data was moved": _moved_data,
    "a checkpoint is elsewhere": _checkpoints_elsewhere,
}


if __name__ == "__main__":
    make_all(LIST)
