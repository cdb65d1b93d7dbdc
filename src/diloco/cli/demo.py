"""`diloco demo`: three replicas on slow links; one is killed and comes back, and the model writes."""

import math
import os
import shlex
import signal
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diloco.cli._command import call, train_command
from diloco.errors import DilocoError
from diloco.files import num_cores, require
from diloco.training.config.config import TrainConfig
from diloco.training.processes import SIGNALS, Ancestor, Call
from diloco.units import Amount, Rate, rate

if TYPE_CHECKING:
    from diloco.rendezvous.status import Timeline

HELP = "see it work in two minutes: three replicas on slow links, one is killed and comes back: diloco demo"
ORDER = 1

_NAMES = ("home", "lab", "spot")
_VICTIM = "spot"
_ROUND_TRIP_SECONDS = 0.06
_LINK = "DILOCO_STORE_LINK"
_LOOK_SECONDS = 0.25
_SECONDS_TO_END, _SECONDS_TO_CONCLUDE = 10.0, 120.0
_PROMPT = "import os\n\ndef read("
_MOST_SILENT_SECONDS = 120.0
"""Time without a new entry of the log after which the demonstration gives up."""
_MOST_SECONDS_AWAY = 20.0
_STEPS_AWAY = 3
"""Outer steps without the killed replica after which it is started again, or else the time above."""


def run(arguments: list[str]) -> None:
    """Give the demonstration."""
    call(_demo, arguments, prog="diloco demo")


def _demo(
    recipe: Literal["laptop", "tiny"] = "laptop",
    num_tokens: Amount = 1.2e6,
    link: Rate = 0.005,
    store: str = "",
    browser: bool = True,
) -> None:
    """Train with three replicas that meet in a store behind slow links, kill one, start it again, check the run.

    Each is the command `diloco train` in processes of its own; the links are pretended (DILOCO_STORE_LINK). Their
    runs are left in runs/, as those of any other command.

    Args:
        recipe: The model: laptop has 1.2M parameters, tiny 58k.
        num_tokens: Token budget of the run.
        link: Rate of each replica's link to the store, each way, with its unit.
        store: The place in which they meet, a directory or a URL of a bucket; left out, a new directory in runs/.
        browser: Open the live page in a browser, where there is a display.
    """
    require("obstore", extra="store")  # before anything is started
    name = _free_name()
    url = store or str(TrainConfig.runs / f"{name}-store")
    directories = {each: TrainConfig.runs / f"{name}-{each}" for each in _NAMES}
    TrainConfig.runs.mkdir(parents=True, exist_ok=True)
    words = [recipe, *_FLAGS, "--num-tokens", f"{num_tokens:.0f}", "--rendezvous", url, "--name"]
    pretended = f"{1e3 * link:g}Mbit,{1e3 * _ROUND_TRIP_SECONDS:g}ms"
    tell = _Narrator()
    tell(f"three replicas of {recipe}; they meet in {url} alone")
    tell(f"the link of each is pretended: {rate(link)} each way, {1e3 * _ROUND_TRIP_SECONDS:g} ms per request")
    first = [f"{_LINK}={pretended}", "diloco", "train", *words, directories[_NAMES[0]].name]
    tell(f"each is one command: {shlex.join(first)}")
    # Before this process starts threads.
    with Ancestor("fork" if sys.platform == "linux" else "spawn") as ancestor, _ended(replicas := []):
        for each, directory in directories.items():
            command, log = [*words, directory.name], Path(f"{directory}.log")
            replicas.append(_Replica(each, command, log, {_LINK: pretended}, ancestor))
        with _live_page([url, *map(str, directories.values())], browser, tell):
            ended = _play(_Watch(url, replicas, tell), tell)
    _judge(url, [directories[each] for each in ended], link, tell)
    _talk(directories[ended[0]], tell)


_FLAGS = (
    *("--num-replicas", "3", "--global-batch", "12", "--replica-batch", "4"),
    *("--diloco.sync-every", "20", "--diloco.overlap-steps", "8"),
    *("--checkpoint.every-steps", "10", "--evaluation.num-tokens", "16384"),
)
"""The settings of the run beside the recipe's: many outer steps in little time."""


def _free_name() -> str:
    """The first of demo, demo-2, … that no earlier demonstration has taken."""
    number, name = 1, "demo"
    while any(TrainConfig.runs.glob(f"{name}-[hls]*")):
        number += 1
        name = f"demo-{number}"
    return name


class _Narrator:
    """Prints one line per event, with the time since the beginning."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._begun), 60)
        print(f"{minutes}:{seconds:02}  {text}", flush=True)


class _Replica:
    """A replica: a command line of the trainer, in processes of its own, which write into a log.

    Args:
        name: in what is told.
        words: of `diloco train`.
        log: the file.
        environment: variables of its own.
        ancestor: from which it is forked.
    """

    def __init__(
        self, name: str, words: Sequence[str], log: Path, environment: Mapping[str, str], ancestor: Ancestor
    ) -> None:
        self.name, self._ancestor, self._log = name, ancestor, log
        self._arguments = list(words), str(log), dict(environment)
        self.start()

    def start(self) -> None:
        """Start the command, again after it has ended."""
        self._exit_code: int | None = None
        self._is_killed = False
        self._call = Call(_be_replica, *self._arguments, imports=("diloco.rendezvous.store_rendezvous",))
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._exit_code = self._ancestor.run(self._call)
        except EOFError:
            self._exit_code = -signal.SIGKILL

    def kill(self) -> int | None:
        """Kill all its processes, at once and without a word; the number of the first."""
        pid, self._is_killed = self._call.pid, True
        if pid is not None and self._thread.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return pid

    def join(self, seconds: float) -> bool:
        """Wait for the end of the command; False if it has not come in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def has_succeeded(self) -> bool:
        """True once the command has ended well."""
        return self._exit_code == 0

    def check(self) -> None:
        """Raise the error with which the command has ended, if it has."""
        if self._exit_code and not self._is_killed:
            lines = (
                self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
            )
            raise DilocoError(f"{self.name} has ended with {self._exit_code}: {lines[-1] if lines else self._log}")


def _be_replica(words: Sequence[str], log: str, environment: Mapping[str, str]) -> int:
    """Be a replica's command: the leader of a group of processes, which a terminal's signals do not reach."""
    import torch

    from diloco.cli.main import main

    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number, each in enumerate((os.open(os.devnull, os.O_RDONLY), file, file)):
        os.dup2(each, number)
    threads = max(1, num_cores() // len(_NAMES))
    os.environ.update({"OMP_NUM_THREADS": str(threads), **environment})
    torch.set_num_threads(threads)  # the ancestor's torch has looked for the variable before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        main(["train", *words])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


@contextmanager
def _ended(replicas: "list[_Replica]") -> Iterator[None]:
    """Kill, at the end, the replicas that still run."""
    try:
        yield
    finally:
        for replica in replicas:
            replica.kill()


@contextmanager
def _live_page(sources: Sequence[str], browser: bool, tell: _Narrator) -> Iterator[None]:
    """Serve the live page, and open it where a display is."""
    from diloco.report.server import LiveServer
    from diloco.report.sources import Sources

    server = LiveServer(Sources(sources, command_of=train_command), title="diloco demo")
    threading.Thread(target=server.serve, daemon=True).start()
    tell(f"live page: {server.url}")
    if browser and (sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(server.url)
    try:
        yield
    finally:
        server.close()


class _Watch:
    """Follows the run's log, and tells joins and progress.

    Args:
        url: of the store.
        replicas: those that are to run.
        tell: prints a line.
    """

    def __init__(self, url: str, replicas: Sequence[_Replica], tell: _Narrator) -> None:
        from diloco.report.stores import StoreTail

        self.replicas, self._tail, self._tell = {each.name: each for each in replicas}, StoreTail(url), tell
        self.cohorts: list[list[str]] = []
        """The names of the replicas in each outer step."""
        self._num_lives, self._tenths, self._entries, self._changed = 0, 0, -1, time.monotonic()

    @property
    def part(self) -> float:
        """The share of the token budget that is counted."""
        return self._tail.part or 0.0

    def until(self, is_so: Callable[[], bool], *, most_seconds: float = math.inf) -> bool:
        """Wait until something is so, the run is finished, or a time is over; True if it is so.

        Raises:
            DilocoError: if a replica has failed, or the log does not grow any more.
        """
        begun = time.monotonic()
        while not is_so():
            if self.is_finished or time.monotonic() > begun + most_seconds:
                return False
            time.sleep(_LOOK_SECONDS)
            self._look()
        return True

    @property
    def is_finished(self) -> bool:
        """True if an entry closes the run."""
        return self._tail.status is not None and self._tail.status.finished

    def _look(self) -> None:
        self._tail.again()
        status, timeline = self._tail.status, self._tail.timeline
        if status is not None and timeline is not None and status.entries > self._entries:
            self._entries, self._changed = status.entries, time.monotonic()
            self._tell_news(timeline, status.training_loss)
        if time.monotonic() > self._changed + _MOST_SILENT_SECONDS:
            raise DilocoError(
                f"nothing new for {_MOST_SILENT_SECONDS:g} s in {self._tail.url}: {self._tail.trouble}"
            )
        for replica in () if self.is_finished else self.replicas.values():
            replica.check()

    def _tell_news(self, timeline: "Timeline", loss: float | None) -> None:
        for number, life in enumerate(timeline.lives):
            name = _short(life.name)
            if number >= self._num_lives:
                self._tell(f"{name} has joined, as replica {number}")
            for step in life.counted:
                self.cohorts += [[] for _ in range(step - len(self.cohorts))]
                if name not in self.cohorts[step - 1]:
                    self.cohorts[step - 1].append(name)
        self._num_lives = len(timeline.lives)
        if self._tenths < (tenths := int(10 * self.part)) < 10:
            self._tenths = tenths
            text = "" if loss is None else f", training loss {loss:.2f}"
            self._tell(f"{tenths / 10:.0%} of the tokens, {len(self.cohorts)} outer steps{text}")


def _short(name: str) -> str:
    """The name of a replica, without that of the demonstration."""
    return name.rpartition("-")[2]


def _play(watch: _Watch, tell: _Narrator) -> list[str]:
    """Kill a replica amid the run, start it again, wait for the end; the names of those that ended well."""
    victim, cohorts = watch.replicas[_VICTIM], watch.cohorts
    watch.until(lambda: watch.part >= 1 / 8 and _VICTIM in cohorts[-1])
    tell(f"kill -9 {victim.kill()}: {_VICTIM} is gone, and has told nobody")
    victim.join(_SECONDS_TO_END)
    gone = len(cohorts)
    if watch.until(lambda: len(cohorts) > gone and _VICTIM not in cohorts[-1], most_seconds=_MOST_SECONDS_AWAY):
        tell(f"outer step {len(cohorts)} counts {' and '.join(cohorts[-1])}: they train on")
    watch.until(lambda: len(cohorts) >= gone + _STEPS_AWAY, most_seconds=_MOST_SECONDS_AWAY)
    victim.start()
    again = len(cohorts)
    tell(f"{_VICTIM} is started again, by the same command")
    if watch.until(lambda: len(cohorts) > again and _VICTIM in cohorts[-1]):
        tell(f"outer step {len(cohorts)} counts {_VICTIM} again, which has gone on from its checkpoint")
    watch.until(lambda: False)
    tell("the tokens are spent: the log is closed, and each replica takes what it has not taken yet")
    ended: list[str] = []
    for replica in watch.replicas.values():
        if not replica.join(_SECONDS_TO_CONCLUDE):
            raise DilocoError(f"{replica.name} has not ended {_SECONDS_TO_CONCLUDE:g} s after the run")
        if replica is victim and not any(_VICTIM in cohort for cohort in cohorts[again:]):
            tell(f"{_VICTIM} has come back too late: none of its work after that is counted")
            if not replica.has_succeeded:
                continue
        replica.check()
        ended.append(replica.name)
    return ended


def _judge(url: str, directories: Sequence[Path], link: float, tell: _Narrator) -> None:
    """Take the run's outer steps again from the log, compare Θ, and count the bytes.

    Raises:
        DilocoError: if a replica's Θ is another one.
    """
    from diloco.outer.step import parameters_hash
    from diloco.rendezvous.replay import replayed
    from diloco.report.text import factor, long_duration, megabytes
    from diloco.schema import read_json
    from diloco.training.records.store_runs import initial_parameters
    from diloco.training.records.summary import SUMMARY_FILE, Summary

    replay = replayed(url, initial=initial_parameters)
    outer_hash = parameters_hash(replay.parameters())
    done = replay.checked
    summaries = [read_json(each / SUMMARY_FILE, Summary, most_bytes=1 << 20) for each in directories]
    others = [each.name for each, one in zip(directories, summaries, strict=True) if one.outer_hash != outer_hash]
    if others:
        raise DilocoError(f"the outer parameters of {', '.join(others)} are not those of the log in {url}")
    tell(
        f"verified: {done.steps} of {done.rounds} outer steps, taken again from the log, end at the bits of all "
        f"{len(directories)} replicas, {outer_hash[:16]}"
    )
    first = summaries[0]
    sent, dense = first.bytes_sent_per_replica, first.data_parallel_bytes_per_replica
    tell(
        f"{_NAMES[0]} has sent {megabytes(sent)}; Data-Parallel would send {megabytes(dense)}, "
        f"{factor(dense / sent)}× as much"
    )
    tell(
        f"on this link that alone takes {long_duration(dense * 8e-9 / link)}; the replicas have trained for "
        f"{long_duration(first.wall_seconds)}"
    )


def _talk(directory: Path, tell: _Narrator) -> None:
    """Let the model write, and say what may come next."""
    import torch

    from diloco.cli._writing import Writing, read_text, show
    from diloco.data.tokenizers import text_pieces
    from diloco.models.writer import generate

    torch.set_num_threads(1)  # a token at a time is too little work for several
    writing = Writing(max_tokens=240, temperature=0.7)
    writer, tokenizer = writing.load(str(directory))
    tell(f"the model writes, after {_PROMPT!r}:\n")
    tokens = read_text(writer, tokenizer, _PROMPT)
    print(_PROMPT, end="")
    for _ in show(
        text_pieces(tokenizer, generate(writer, writing.max_tokens, stop=tokenizer.bos_id), after=tokens)
    ):
        pass
    print("\n")
    tell(f"next: diloco chat {directory} --serve, diloco report {directory}")
