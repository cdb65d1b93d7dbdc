"""What things really take, here: a training step, the link between the replicas, the codecs."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from diloco.errors import UserError
from diloco.exchange.control import share
from diloco.exchange.transport import Channel, Tag, Transport
from diloco.kernels.memory import empty
from diloco.wire import CODECS, Codec, codec

if TYPE_CHECKING:
    from diloco.training.config import TrainConfig
    from diloco.training.world import World


@dataclass(frozen=True, kw_only=True)
class WireSpeed:
    """GB/s of FP32 input: 4 bytes an element, whatever the codec makes of them."""

    num_threads: int
    """Threads of torch; on a GPU it does not matter."""
    copy_gbyte_s: float
    """Copying the vector, measured just before."""
    encode_gbyte_s: float
    """From the vector to a payload."""
    decode_add_gbyte_s: float
    """From a payload, added to a vector."""


@dataclass(frozen=True, kw_only=True)
class WireMeasurement:
    """One codec."""

    wire: str
    """Its name with every option."""
    bits_per_value: float
    """Of a payload of the measured length, header and scales included."""
    relative_error: float
    """‖decode(encode(Δ)) − Δ‖ / ‖Δ‖ on a real outer gradient."""
    speeds: tuple[WireSpeed, ...]
    """With one thread, and with all."""


def measure_wire(
    specs: Sequence[str] = tuple(CODECS), *, gradient_N: Tensor, num_values: int, device: str = "cpu"
) -> Iterator[WireMeasurement]:
    """Measure codecs, one after the other.

    Args:
        specs: their names, with options.
        gradient_N: a real outer gradient, flat FP32: what the error is measured on; speed, on repetitions of it.
        num_values: length of the vector that speed is measured on.
        device: where it lies: `cpu` or `cuda`.

    Raises:
        UserError: for a codec that does not exist, or a gradient that can't be sent.
    """
    codecs = [codec(spec) for spec in specs]
    if num_values < 1 or not gradient_N.any():
        raise UserError(f"nothing to measure: {num_values} values of a gradient of norm {gradient_N.norm():g}")
    gradient_N = gradient_N.to(device, torch.float32)
    repeats = -(-num_values // max(1, gradient_N.numel()))
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

    def gbyte_s(pass_over: Callable[[], object]) -> float:
        return 4e-9 * delta_N.numel() / _shortest_seconds(pass_over, delta_N.device)

    with _threads(num_threads):
        return WireSpeed(
            num_threads=num_threads,
            copy_gbyte_s=gbyte_s(lambda: _copy(total_N, delta_N, num_threads)),
            encode_gbyte_s=gbyte_s(lambda: wire.encode(delta_N)),
            decode_add_gbyte_s=gbyte_s(lambda: wire.decode_into(total_N, payload, add=True)),
        )


def _copy(to_N: Tensor, from_N: Tensor, num_threads: int) -> None:
    """As fast as can be: with one thread NumPy copies faster than torch."""
    if num_threads == 1 and to_N.device.type == "cpu":
        np.copyto(to_N.numpy(), from_N.numpy())
    else:
        to_N.copy_(from_N)


def _shortest_seconds(pass_over: Callable[[], object], device: torch.device) -> float:
    """Of several runs: others on the machine, and what is done once, only ever make it longer."""
    seconds: list[float] = []
    while len(seconds) < 20 and (len(seconds) < 4 or sum(seconds) < 0.5):
        start = time.perf_counter()
        pass_over()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > 2:
            break
    return min(seconds)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Machines:
    """What every replica and its link take, in replica order."""

    step_seconds: tuple[float, ...]
    """The median inner step, while all replicas compute."""
    link_gbit_s: tuple[float, ...]
    """Payload bits that a replica sends while it receives as many, to and from all others at once."""
    latency_seconds: tuple[float, ...]
    """From the start of an exchange of a few bytes to its end."""


def measurable(asked: "TrainConfig") -> "TrainConfig":
    """The config of a run whose step can be timed: resolved, on no data.

    Raises:
        UserError: if there is one replica alone, or for settings that contradict each other.
    """
    from diloco.data.tokenizers import load_tokenizer
    from diloco.training.config import resolve
    from diloco.training.state import check

    if asked.num_replicas < 2:
        raise UserError(f"a link has two ends: pass --num-replicas 2, or more, not {asked.num_replicas}")
    tokenizer = asked.data.prepared or asked.data.tokenizer
    kind, _, size = str(tokenizer).partition(":")
    vocab_size = int(size) if kind == "bpe" else load_tokenizer(tokenizer).vocab_size
    config = resolve(asked, vocab_size=vocab_size, prepared=Path())
    check(config)
    return config


def measure_machines(config: "TrainConfig") -> Machines:
    """Time a run's inner step, on random tokens, and the link between its replicas; each of them must call it.

    Args:
        config: as `measurable` gives it.

    Raises:
        ExchangeError: if other replicas are gone.
    """
    from diloco.training.world import join

    with join(config) as world:
        gbit_s, latency_seconds = measure_link(world.exchange, beside=world.everyone)
        gbit_s = world.over_shards(gbit_s, dist.ReduceOp.SUM)
        found = share(world.exchange, [_step_seconds(config, world), gbit_s, latency_seconds])
    return Machines(*map(tuple, zip(*found, strict=True)))


def measure_link(
    exchange: Transport, *, seconds: float = 2.0, beside: Transport | None = None
) -> tuple[float, float]:
    """Bandwidth, in Gbit/s, and latency, in seconds, as this replica sees them; each replica must call it.

    Args:
        exchange: the way to the others.
        seconds: payloads grow until an exchange takes so long, or they have 64 MiB.
        beside: the way to all that measure at the same time, where they share links; left out, `exchange`.
    """
    rounds, together = count(1), beside or exchange

    def exchange_seconds(num_bytes: int, times: int) -> float:
        payload = torch.zeros(num_bytes, dtype=torch.uint8)
        others = {replica: payload for replica in range(exchange.num_replicas) if replica != exchange.replica}
        share(together, None)  # all begin at once
        start = time.perf_counter()
        for _ in range(times):
            exchange.start(others, Tag(Channel.PROBE, round=next(rounds))).wait()
        return (time.perf_counter() - start) / times

    latency, num_bytes = exchange_seconds(8, 20), 1 << 16
    while True:
        taken = statistics.median(exchange_seconds(num_bytes, 1) for _ in range(3))
        # All must come to the same end, or some would wait for others that have finished.
        if num_bytes >= 1 << 26 or max(share(together, taken)) >= seconds:
            return 8e-9 * num_bytes * (exchange.num_replicas - 1) / max(taken - latency, 1e-9), latency
        num_bytes *= 4


def _step_seconds(config: "TrainConfig", world: "World") -> float:
    from diloco.training.loop import inner_step
    from diloco.training.state import initial_state

    state = initial_state(config, world)
    shape = config.process_batch, config.sequence_length + 1
    batch = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    taken: list[float] = []
    # All must come to the same end: the next step may need every process.
    while len(taken) < 5 or (len(taken) < 50 and max(share(world.everyone, sum(taken))) < 5):
        start = time.perf_counter()
        inner_step(state, batch, config, world, 0.0)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def flops_per_second(config: "TrainConfig", *, num_cores: int) -> float:
    """Floating-point operations, 6·N a token, of training on so many cores, a process each, without exchange."""
    from diloco.models.decoder import Decoder, next_token_loss
    from diloco.training.world import use_autocast

    with _threads(1):
        model = Decoder(replace(config.model, vocab_size=config.model.vocab_size or 257), seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens_BxT1 = torch.zeros(config.process_batch, config.sequence_length + 1, dtype=torch.int64)
        autocast = use_autocast(config, torch.device("cpu"))

        def step() -> None:
            for window_BxT1 in tokens_BxT1.split(config.micro_batch or config.process_batch):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits_BxTxV = model(window_BxT1[:, :-1])
                next_token_loss(logits_BxTxV, window_BxT1[:, 1:])[1].backward()
            optimizer.step()
            optimizer.zero_grad()

        seconds = _shortest_seconds(step, torch.device("cpu"))
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return num_cores * 6.0 * num_params * tokens_BxT1[:, 1:].numel() / seconds


def load_gradient(path: Path) -> Tensor:
    """A flat FP32 vector from a safetensors file: all its tensors, in the order of their names.

    Raises:
        UserError: if it is none.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no safetensors file with an outer gradient: {error}") from None
    return torch.cat([torch.zeros(0), *(tensors[name].reshape(-1).float() for name in sorted(tensors))])


def demo_gradient() -> Tensor:
    """The first outer gradient of the laptop recipe: all parameters, flat FP32, after its H inner steps."""
    from diloco.training.loop import inner_step, learning_rate, open_batches, open_split
    from diloco.training.prepare import prepare_run
    from diloco.training.recipes import recipe
    from diloco.training.state import initial_state
    from diloco.training.world import alone

    with TemporaryDirectory() as directory:
        laptop = recipe("laptop")
        asked = replace(
            laptop, runs=Path(directory), num_replicas=1, data=replace(laptop.data, cache=Path(directory) / "data")
        )
        config = prepare_run(asked, resume=None)
        world = alone(config)
        assert config.data.prepared is not None, "the config is resolved"
        batches = open_batches(config, world, open_split(config.data.prepared, "train"))
        state = initial_state(config, world)
        start = torch.nn.utils.parameters_to_vector(state.model.parameters()).detach().clone()
        for step in range(1, config.diloco.sync_every + 1):
            inner_step(state, batches.batch(step), config, world, learning_rate(config, step))
        return start - torch.nn.utils.parameters_to_vector(state.model.parameters()).detach()
