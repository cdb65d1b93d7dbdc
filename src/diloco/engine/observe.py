"""Reports about rounds: outer steps for logs, and errors with the parameter at fault.

Shapes: N elements of one fragment that this process holds.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.engine.lanes import DeviceLane
from diloco.engine.sharded import sum_over_shards
from diloco.errors import NonFiniteError
from diloco.kernels.memory import begin_to_host
from diloco.outer.step import OuterStep
from diloco.reduction import Reduction
from diloco.reduction.cohort import Cohort
from diloco.schedule import Sync
from diloco.wire.payload import Codec, Key
from diloco.wire.unsealed import Unsealed


@dataclass(eq=False)
class Record:
    """Measurements of an engine's syncs; those of earlier parts of a resumed run are not in it."""

    encode_seconds: float = 0.0
    """Time in which outer gradients were made and encoded."""
    merge_seconds: float = 0.0
    """Time in which payloads were decoded and averaged, and outer steps and merges taken."""
    exchange_mbit_s: float | None = None
    """Payload bits that this process sent in the last exchange, over the time until the others' had come."""
    was_waited_for: bool = False
    """True if training waited for that exchange; otherwise it was over earlier, and was faster."""
    _sample_N: Tensor | None = None
    _key: Key | None = None

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Time the work in this context as encoding."""
        start = time.perf_counter()
        yield
        self.encode_seconds += time.perf_counter() - start

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Time the work in this context as merging."""
        start = time.perf_counter()
        yield
        self.merge_seconds += time.perf_counter() - start

    def sample(self, delta_N: Tensor, key: Key) -> None:
        """Keep the first elements of an outer gradient, so that the codec's error can be measured later."""
        self._sample_N, self._key = delta_N[:_SAMPLED].clone(), key

    def received(self, num_bytes: int, seconds: float, blocked_seconds: float) -> None:
        """Note an exchange of so many bytes in each direction, and how long training waited for its end."""
        if num_bytes:
            self.exchange_mbit_s = num_bytes * 8e-6 / seconds
            self.was_waited_for = blocked_seconds > max(_NO_WAIT_SECONDS, _NO_WAIT_SHARE * seconds)

    def codec_errors(self, wire: Codec) -> tuple[Tensor, Tensor] | None:
        """‖Δ − decode(encode(Δ))‖² and ‖Δ‖² of the sample, on its device; None before the first sync."""
        if self._sample_N is None or self._key is None:
            return None
        unsealed = Unsealed(wire)
        payload = unsealed.encode(self._sample_N, self._key)
        error_N = unsealed.decode(payload, self._sample_N.numel(), self._key) - self._sample_N
        return error_N.square().sum(), self._sample_N.square().sum()


_SAMPLED = 1 << 14
_NO_WAIT_SECONDS = 1e-3
_NO_WAIT_SHARE = 0.05  # of an exchange's time: less may be the scheduler's delay, not the network's


def outer_step(
    reduction: Reduction,
    payloads: dict[int, Tensor],
    sync: Sync,
    key: Key,
    cohort: Cohort,
    *,
    like_N: Tensor,
    blocked_seconds: float,
    spans: Mapping[str, tuple[int, int]],
    shard_group: dist.ProcessGroup | None,
    lane: DeviceLane,
) -> OuterStep:
    """An outer step that makes averages and outer gradients again when they are asked for.

    Args:
        reduction: how the payloads were averaged.
        payloads: of the last phase, by member.
        sync: fragment, round and step.
        key: of this replica's payloads.
        cohort: whose outer gradients were averaged.
        like_N: a vector of the fragment's length, on its device; not kept, since it may be reused.
        blocked_seconds: how long training waited for the payloads.
        spans: where the fragment's blocks lie.
        shard_group: the processes that hold the replica's shards.
        lane: where norms and cosines are computed.
    """
    num_elements, device = like_N.numel(), like_N.device

    def average() -> Tensor:
        to_N = torch.empty(num_elements, dtype=torch.float32, device=device)
        return reduction.average(payloads, to_N, key, cohort).divided()

    deltas = partial(reduction.each, payloads, num_elements, key, device)
    step = described(sync, blocked_seconds, average, deltas, spans, shard_group)
    # The payloads have come: nothing waits for training.
    return replace(step, begin_work=lambda work: lane.queue(lambda: begin_to_host(work()), after_training=False))


def described(
    sync: Sync,
    blocked_seconds: float,
    make_average: Callable[[], Tensor],
    make_deltas: Callable[[], Iterator[Tensor]],
    spans: Mapping[str, tuple[int, int]],
    shard_group: dist.ProcessGroup | None,
    cohort: Cohort | None = None,
) -> OuterStep:
    """An outer step, from what makes its vectors again; see `OuterStep`."""
    add_up = partial(sum_over_shards, group=shard_group)
    return OuterStep(sync, blocked_seconds, make_average, make_deltas, spans, add_up, cohort)


def non_finite(step: int, replica: int, fragment: int, parameter: str | None) -> NonFiniteError:
    """The error for an outer gradient that is not finite; `parameter` is None if error feedback made it so."""
    where = f"step {step}: the outer gradient of {parameter or 'some parameter'}"
    reason = "is not finite" if parameter else "is finite, but not with what error feedback adds"
    return NonFiniteError(
        f"{where} (replica {replica}, fragment {fragment}) {reason}; nothing was sent: lower the learning rate"
    )
