"""Measurements on this machine: the inner step, the links between replicas, the codecs.

Shapes: N elements.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from diloco.data.tokenizers import load_tokenizer
from diloco.errors import UserError
from diloco.exchange.transport import Channel, Tag, Transport, share
from diloco.files import reading
from diloco.training.config.config import TrainConfig
from diloco.training.config.engine_settings import check
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolve, resolved
from diloco.training.data_parallel import DataParallel
from diloco.training.hardware import chosen_device, wait_for
from diloco.training.loop import inner_step, open_batches, open_training_text
from diloco.training.optimizer import inner_optimizer, learning_rate
from diloco.training.prepare import prepare_run
from diloco.training.state import FixedProgress, TrainState, initial_state
from diloco.training.world import World, alone, join
from diloco.wire import CODECS, Codec, codec
from diloco.wire.kernels.memory import empty


@dataclass(frozen=True)
class Machines:
    """Step time and link of each replica, in replica order."""

    step_seconds: tuple[float, ...]
    """Median duration of an inner step while all replicas compute."""
    link_gbit_s: tuple[float, ...]
    """Payload bits that a replica sends to all others together, while it receives as many."""
    latency_seconds: tuple[float, ...]
    """Duration of an exchange of a few bytes."""


def measurable(config: TrainConfig) -> TrainConfig:
    """A resolved config whose inner step can be timed, without data.

    Raises:
        UserError: if there is only one replica, or settings contradict each other.
    """
    if config.num_replicas < 2:
        raise UserError(
            f"num_replicas={config.num_replicas}, but a link has two ends: take 2 or more", "num_replicas"
        )
    tokenizer = config.data.prepared or config.data.tokenizer
    kind, _, size = str(tokenizer).partition(":")
    vocab_size = int(size) if kind == "bpe" else load_tokenizer(tokenizer).vocab_size
    resolved = resolve(config, vocab_size=vocab_size, prepared=Path())
    check(resolved)
    return resolved


def measure_machines(config: TrainConfig) -> Machines:
    """Time a run's inner step on random tokens, and the links between its replicas; each replica must call it.

    Args:
        config: the result of `measurable`.

    Raises:
        ExchangeError: if another replica is gone.
    """
    with join(config) as world:
        gbit_s, latency_seconds = measure_link(world.exchange, beside=world.everyone)
        gbit_s = world.over_ranks(gbit_s)
        rows = share(world.exchange, [_step_seconds(config, world), gbit_s, latency_seconds], list[float])
    return Machines(*map(tuple, zip(*rows, strict=True)))


def measure_alone(config: TrainConfig) -> float:
    """Time a step of one replica of a run, which has this machine to itself; `config` as in `measure_machines`.

    Raises:
        UserError: if a replica of the run has several processes.
    """
    if config.processes_per_replica > 1:
        raise UserError(
            f"link: the step of a replica of {config.processes_per_replica} processes is timed with its link, on "
            "the machines that will train: leave link out",
            "link",
        )
    return _step_seconds(config, alone(config.precision, chosen_device(config.device, 0, shares=True)))


def _step_seconds(config: TrainConfig, world: World) -> float:
    """The median time of an inner step, after two that warm up."""
    state = initial_state(config, world)
    shape = config.process_batch, config.sequence_length + 1
    batch = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    seconds: list[float] = []
    # All must stop alike: the next step may need every process.
    while len(seconds) < 5 or (len(seconds) < _MOST_STEPS and max(share(world.everyone, sum(seconds), float)) < 5):
        start = time.perf_counter()
        inner_step(state, batch, world, 0.0)
        wait_for(world.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


_MOST_STEPS = 50


def flops_per_second(config: TrainConfig, *, num_cores: int) -> float:
    """Floating-point operations per second, 6·N per token, of `num_cores` processes that train without exchange.

    One process is measured, on one CPU thread; several are assumed not to slow each other down.
    """
    model = replace(config.model, vocab_size=config.model.vocab_size or 257).build(seed=0)
    inner, micro_batch = replace(config.optimizer, weight_decay=0.0), config.micro_batch or config.process_batch
    sync, progress = DataParallel(model, model, 1), FixedProgress(1, 1)
    state = TrainState(model, model, inner_optimizer(model, inner), inner, micro_batch, sync, progress)
    batch = np.zeros((config.process_batch, config.sequence_length + 1), dtype=np.int64)
    with torch_threads(1):
        world = alone(config.precision)
        seconds = shortest_seconds(lambda: inner_step(state, batch, world, 0.0), world.device)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return num_cores * 6.0 * num_params * batch[:, 1:].size / seconds


def measure_link(
    exchange: Transport, *, seconds: float = 2.0, beside: Transport | None = None
) -> tuple[float, float]:
    """Bandwidth in Gbit/s and latency in seconds of this replica's link; each replica must call it.

    Args:
        exchange: to the other replicas.
        seconds: payloads grow until an exchange takes so long, or until they have 64 MiB.
        beside: an exchange among all processes that share links and measure at the same time; None is `exchange`.

    Returns:
        payload bits that this replica sends to all others together, while it receives as many; and the median
        duration of an exchange of a few bytes.
    """
    rounds, together = count(1), beside or exchange

    def exchange_seconds(num_bytes: int, times: int) -> float:
        payload = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        others = {replica: payload for replica in range(exchange.num_replicas) if replica != exchange.replica}
        share(together, None)  # all begin at once
        times_seconds = [time.perf_counter()]
        for _ in range(times):
            exchange.start(others, Tag(Channel.PROBE, round=next(rounds))).wait()
            times_seconds.append(time.perf_counter())
        # Two at a time: where one end begins later than the other, every second exchange seems to take longer.
        step = min(times, 2)
        return statistics.median(
            (end - start) / step for start, end in zip(times_seconds, times_seconds[step:], strict=False)
        )

    latency_seconds, num_bytes = exchange_seconds(8, 20), 1 << 16
    while True:
        taken_seconds = statistics.median(exchange_seconds(num_bytes, 1) for _ in range(3))
        # All must decide alike, or some would wait for others that have finished.
        if num_bytes >= 1 << 26 or max(share(together, taken_seconds, float)) >= seconds:
            gbits_sent = 8e-9 * num_bytes * (exchange.num_replicas - 1)
            return gbits_sent / max(taken_seconds - latency_seconds, 1e-9), latency_seconds
        num_bytes *= 4


@dataclass(frozen=True, kw_only=True)
class WireSpeed:
    """Speeds in GB/s of FP32 input: 4 bytes an element with every codec."""

    num_threads: int
    """CPU threads of torch; on a GPU they do not matter."""
    copy_gbyte_s: float
    """Speed of copying the vector, measured just before."""
    encode_gbyte_s: float
    """Speed from the vector to a payload."""
    decode_add_gbyte_s: float
    """Speed from a payload to its sum with a vector."""


@dataclass(frozen=True, kw_only=True)
class WireMeasurement:
    """Bits, error and speed of one codec."""

    wire: str
    """The codec's name with every option."""
    bits_per_value: float
    """Bits of a payload for each value, header and scales included."""
    relative_error: float
    """‖decode(encode(Δ)) − Δ‖ / ‖Δ‖ on a real outer gradient."""
    speeds: tuple[WireSpeed, ...]
    """Speeds with one thread, and with all."""


def measure_wire(
    specs: Sequence[str] = tuple(CODECS), *, gradient_N: Tensor, num_values: int, device: str = "cpu"
) -> Iterator[WireMeasurement]:
    """Measure codecs, one after the other.

    Args:
        specs: names of codecs, with options.
        gradient_N: a real outer gradient, flat FP32: error is measured on it, speed on repetitions of it.
        num_values: length of the vector that speed is measured on.
        device: where the vector is: `cpu` or `cuda`.

    Raises:
        UserError: if a codec does not exist, there is nothing to measure, or the gradient can't be encoded.
    """
    codecs = [codec(spec) for spec in specs]
    if num_values < 1:
        raise UserError(f"num_values must be at least 1, not {num_values}", "num_values")
    if not gradient_N.any():
        raise UserError("the gradient holds nothing but zeros, so that a relative error can't be measured")
    gradient_N = gradient_N.to(device, torch.float32)
    repeats = -(-num_values // gradient_N.numel())
    delta_N = empty(num_values, torch.float32, gradient_N.device).copy_(gradient_N.repeat(repeats)[:num_values])
    for wire in codecs:
        decoded_N = wire.decode(wire.encode(gradient_N), gradient_N.numel())
        yield WireMeasurement(
            wire=wire.spec,
            bits_per_value=8 * wire.payload_bytes(num_values) / num_values,
            relative_error=((decoded_N - gradient_N).norm() / gradient_N.norm()).item(),
            speeds=tuple(_speed(wire, delta_N, n) for n in sorted({1, torch.get_num_threads()})),
        )


def _speed(wire: Codec, delta_N: Tensor, num_threads: int) -> WireSpeed:
    payload = wire.encode(delta_N)
    total_N = empty(delta_N.numel(), torch.float32, delta_N.device).zero_()

    def gbyte_s(work: Callable[[], object]) -> float:
        return 4e-9 * delta_N.numel() / shortest_seconds(work, delta_N.device)

    with torch_threads(num_threads):
        return WireSpeed(
            num_threads=num_threads,
            copy_gbyte_s=gbyte_s(lambda: _copy(total_N, delta_N, num_threads)),
            encode_gbyte_s=gbyte_s(lambda: wire.encode(delta_N)),
            decode_add_gbyte_s=gbyte_s(lambda: wire.decode_into(total_N, payload, add=True)),
        )


def _copy(to_N: Tensor, from_N: Tensor, num_threads: int) -> None:
    """The fastest copy: with one thread NumPy copies faster than torch."""
    if num_threads == 1 and to_N.device.type == "cpu":
        np.copyto(to_N.numpy(), from_N.numpy())
    else:
        to_N.copy_(from_N)


def load_gradient(path: Path) -> Tensor:
    """All tensors of a safetensors file as one flat FP32 vector, in the order of their names.

    Raises:
        FileError: if the file can't be read as safetensors.
    """
    with reading(path, "gradient"):
        tensors = load_file(path)
    nothing = torch.zeros(0, dtype=torch.float32, device="cpu")
    return torch.cat([nothing, *(tensors[name].reshape(-1).float() for name in sorted(tensors))])


def demo_gradient(recipe_name: str = "laptop") -> Tensor:
    """The first outer gradient of a recipe: all parameters, flat FP32, after H inner steps of one replica."""
    with TemporaryDirectory() as directory:
        default = recipe(recipe_name)
        data = replace(default.data, cache=Path(directory) / "data")
        settings = replace(default, runs=Path(directory), num_replicas=1, data=data)
        config = resolved(prepare_run(settings))
        world = alone(config.precision)
        batches = open_batches(config, world, open_training_text(config.data))
        state = initial_state(config, world)
        start_N = torch.nn.utils.parameters_to_vector(state.model.parameters()).detach().clone()
        for step in range(1, config.diloco.sync_every + 1):
            rate = learning_rate(config.optimizer, step, num_steps=config.num_steps)
            inner_step(state, batches.batch(step), world, rate)
        return start_N - torch.nn.utils.parameters_to_vector(state.model.parameters()).detach()


def shortest_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs: other processes and first-time work only ever make one longer."""
    seconds: list[float] = []
    while len(seconds) < 20 and (len(seconds) < 4 or sum(seconds) < 0.5):
        start = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > 2:
            break
    return min(seconds)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Let torch use so many CPU threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
