"""The place where a measurement runs: a GPU, or, dry, the CPU at a size of seconds."""

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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


def killed(process: "subprocess.Popen[bytes]") -> bool:
    """End a process and what it has started, in a session of its own; whether it was alive."""
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
