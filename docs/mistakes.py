"""Makes the mistakes of a newcomer, and writes what diloco says to each into reference/mistakes.md.

python docs/mistakes.py [PAGE]

Each mistake has a process of its own, forked from this one, which has imported torch, and a folder of its own.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch starts threads: as many mistakes as there are cores are made

import gc
import html
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

from mistakes_list import PREPARED, SECTIONS, Mistake, write_files

from diloco.cli.main import main as diloco
from diloco.cli.main import verbs

PAGE = Path(__file__).parent / "reference" / "mistakes.md"
HOME = "/home/me"
"""The folder of every mistake, on the page."""
MOST_SECONDS = 60.0
MOST_LINES = 5
_ALSO_IMPORTED = (
    *(
        "diloco.training.records.finished",
        "diloco.training.config.forecast",
        "diloco.training.loop",
        "diloco.training.prepare",
    ),
    *("diloco.report.terminal.training", "diloco.rendezvous.store_rendezvous", "torch.distributed.run"),
)


@dataclass(frozen=True)
class Answer:
    """The output, the errors and the exit code of a command line."""

    output: str
    errors: str
    exit_code: int
    """Exit code of the process; -9 if it was still running after `MOST_SECONDS`."""

    @property
    def sentence(self) -> str:
        """The first line of the errors without the program's name."""
        return self.errors.partition("\n")[0].removeprefix("diloco: ")


def main(page: Path = PAGE) -> None:
    """Make all mistakes, and write the page."""
    for module in (*(f"diloco.cli.{verb}" for verb in verbs()), *_ALSO_IMPORTED):
        import_module(module)
    mistakes = [mistake for rows in SECTIONS.values() for mistake in rows]
    with tempfile.TemporaryDirectory() as root:
        home = Path(root).resolve() / "home"
        home.mkdir()
        with chdir(home):
            write_files()
        for command, answer in zip(
            PREPARED, answers(list(map(Mistake, PREPARED)), [home] * len(PREPARED)), strict=True
        ):
            if answer.exit_code != 0:
                raise SystemExit(f"{command}: {answer}")
        gc.freeze()  # no process then copies the pages of what has been imported
        made = dict(zip(mistakes, answers(mistakes, list(_copies(home, len(mistakes)))), strict=True))
    if complaints := [f"{one.typed}: {text}" for one, answer in made.items() for text in faults(one, answer)]:
        raise SystemExit("\n".join(complaints))
    page.write_text(page_of(made))


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
    cores = len(os.sched_getaffinity(0))
    made: dict[int, Answer] = {}
    at_work: dict[int, _Attempt] = {}
    waiting = list(enumerate(zip(mistakes, folders, strict=True)))[::-1]
    while waiting or at_work:
        while waiting and len(at_work) < cores:
            index, (mistake, folder) = waiting.pop()
            at_work[index] = _Attempt(mistake, folder)
        wait([attempt.process.sentinel for attempt in at_work.values()], timeout=1.0)
        for index, attempt in list(at_work.items()):
            if attempt.is_over():
                made[index] = attempt.answer()
                del at_work[index]
    return [made[index] for index in range(len(mistakes))]


class _Attempt:
    """A mistake that is being made."""

    def __init__(self, mistake: Mistake, folder: Path) -> None:
        self._folder, self._began, self._during = folder, time.monotonic(), ExitStack()
        self._streams = Path(tempfile.mkdtemp(dir=folder.parent))
        with chdir(folder):
            self._during.enter_context(mistake.during())
        self.process = get_context("fork").Process(target=_make, args=(mistake.typed, folder, self._streams))
        self.process.start()

    def is_over(self) -> bool:
        """True if the process has ended or was killed after `MOST_SECONDS`; its context is then closed."""
        if self.process.exitcode is None and time.monotonic() - self._began < MOST_SECONDS:
            return False
        if self.process.exitcode is None:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.join()
        self._during.close()
        return True

    def answer(self) -> Answer:
        """The answer, without the words that differ from one machine to another."""
        output, errors = (path.read_text() if path.exists() else "" for path in _files_of(self._streams))
        return Answer(self._same_everywhere(output), self._same_everywhere(errors), self.process.exitcode or 0)

    def _same_everywhere(self, text: str) -> str:
        process = r"process \d+ on \S+ since [\d-]+ [\d:]+"
        return re.sub(
            process, "process 4242 on host since 2026-01-31 12:00", text.replace(str(self._folder), HOME)
        )


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


def page_of(answers: Mapping[Mistake, Answer]) -> str:
    """The page: a table a section."""
    tables = []
    for title, mistakes in SECTIONS.items():
        rows = [
            f"| {_code(one.typed)}{one.remark and f'<br>{one.remark}'} | {_code(answers[one].sentence)} "
            f"| {answers[one].exit_code} |"
            for one in mistakes
        ]
        tables.append("\n".join([f"## {title}", "", "| typed | said | exit code |", "|---|---|---|", *rows]))
    return _HEAD.format(number=len(answers)) + "\n\n".join(tables) + "\n"


def _code(text: str) -> str:
    """Text in a cell of a table, as it was written."""
    if not set("`|") & set(text):
        return f"`{text}`"
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;').replace('`', '&#96;')}</code>"


_HEAD = """# Mistakes

{number} command lines that can't work, and the sentence with which each of them ends, after `diloco: `. Exit code
2 is a user's mistake, 1 a failure that a resume may mend. `docs/mistakes.py` makes all of them to write this page,
and a test compares.

They were typed in a folder with `text.jsonl`, which is as it should be, and files whose names say what is wrong
with them; `runs/first` is a finished run of `tiny`, and `store` holds the finished run of the replica `a`.

"""


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
