"""The place where a measurement runs: a GPU, or, dry, the CPU at a size of seconds."""

import os
import runpy
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

import diloco
from diloco.exchange.transport import Transport
from diloco.models.decoder import Decoder
from diloco.models.decoder_config import DecoderConfig, ladder

T = TypeVar("T")
Row = dict[str, Any]


class OutOfTimeError(Exception):
    """The measurement goes on where it stopped when it is asked for again."""


@dataclass(frozen=True)
class Place:
    """The place and the time limit of a measurement."""

    dry: bool
    """True on the CPU, to see that everything runs."""
    data: Path
    """The folder with books/."""
    folder: Path
    """The folder for files of the piece."""
    deadline: float
    """`time.monotonic()` at which the piece is ended."""

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU."""
        return torch.device("cpu") if self.dry else torch.device("cuda", torch.cuda.current_device())

    def size(self, whole: T, dry: T) -> T:
        """A number for the GPU, or a small one."""
        return dry if self.dry else whole

    def wait(self) -> None:
        """Wait until the GPU has done all."""
        if not self.dry:
            torch.cuda.synchronize()

    def goal(self, is_met: bool) -> bool | None:
        """True if a goal is met; None where nothing can be said of a GPU's speed."""
        return None if self.dry else is_met

    def milliseconds(self, work: Callable[[], object], repeats: int = 10) -> float:
        """The median time of work on the device, after two runs to warm up, as its own clock has it."""
        for _ in range(2):
            work()
        times = []
        for _ in range(self.size(repeats, 2)):
            if self.dry:
                start = time.perf_counter()
                work()
                times.append(1e3 * (time.perf_counter() - start))
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    def model(self, scale: str) -> Decoder:
        """A decoder of the paper's ladder, or a tiny one."""
        return self.decoder(scale).build(seed=0).to(self.device)

    def decoder(self, scale: str) -> DecoderConfig:
        """The sizes of that decoder."""
        return DecoderConfig(num_layers=6, num_heads=2, width=16, vocab_size=512) if self.dry else ladder(scale)

    def window(self, num_sequences: int, length: int, vocab_size: int) -> Tensor:
        """Random tokens (B, T+1)."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = num_sequences, length + 1
        return torch.randint(0, vocab_size, shape, generator=generator, device=self.device)


def engine_of(
    model: nn.Module, *, sync_every: int, exchange: Transport | None = None, **arguments: Any
) -> diloco.StreamingDiLoCo:
    """An engine whose fragments are sent from the first due step on, one step before they are merged."""
    fragments = diloco.strided(model, layers_per_fragment=arguments.pop("layers_per_fragment", 3))
    schedule = diloco.Schedule(
        sync_every=sync_every,
        num_fragments=len(fragments),
        overlap_steps=min(1, sync_every - 1),
        first_sync="early",
    )
    exchange = exchange or diloco.LoopbackExchange()
    return diloco.StreamingDiLoCo(model, fragments=fragments, schedule=schedule, exchange=exchange, **arguments)


class Forked:
    """A process that has made this one's imports, in a session of its own, as `subprocess.Popen` has it.

    Args:
        words: `-m` and a module, or a script, and their arguments.
        place: its folder is the process's.
        log: an open file for its output.
        environment: variables beside those of this process.
    """

    def __init__(self, words: Sequence[str], place: Place, log: IO[bytes], environment: Mapping[str, str]) -> None:
        self._process = get_context("fork").Process(target=_be_program, args=(words, place, log, environment))
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end."""
        self._process.join(timeout)
        if timeout is not None and self.poll() is None:
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self.poll()


def _be_program(words: Sequence[str], place: Place, log: IO[bytes], environment: Mapping[str, str]) -> None:
    os.setsid()
    os.chdir(place.folder)
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    is_module = words[0] == "-m"
    sys.argv = [*words[is_module:]]
    run = partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
    run(sys.argv[0], run_name="__main__")


Job: TypeAlias = subprocess.Popen[bytes] | Forked


def started(words: Sequence[str], place: Place, log: Path, **environment: str) -> Job:
    """A Python process in a session of its own, with its output at the end of a file; dry, it is forked."""
    environment = {"OMP_NUM_THREADS": "1"} | environment
    with log.open("ab") as file:
        if place.dry:
            return Forked(words, place, file, environment)
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=place.folder,
            env=os.environ | environment,
            start_new_session=True,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def killed(process: Job) -> bool:
    """End a process and what it has started, in a session of its own; True if it was alive."""
    if process.poll() is not None:
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


Measurements = Mapping[str, Callable[[], Row]]
"""The measurements of a piece by their keys, in order."""


def rows_of(measurements: Measurements, done: set[str]) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The measurements that are left."""
    return ((key, measure) for key, measure in measurements.items() if key not in done)
