"""What an engine is told: what of it contradicts itself, and what all replicas must be told alike."""

from dataclasses import dataclass

from torch import nn

from diloco.engine.sharded import local
from diloco.errors import UserError
from diloco.fragments import Fragment, check_partition
from diloco.outer.nesterov import Nesterov
from diloco.reduction.combine import Combine, combine_by
from diloco.schedule import Schedule
from diloco.wire import Codec
from diloco.wire.formats import DARE


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `StreamingDiLoCo` that decide what is computed."""

    fragments: tuple[Fragment, ...]
    """A partition of the parameters."""
    schedule: Schedule
    """When each fragment is sent and merged."""
    outer: Nesterov
    """The outer optimizer."""
    mixing: float
    """α, how much of its own parameters a replica keeps at a merge."""
    wire: Codec
    """What the outer gradients are sent in."""
    combine: str
    """gather, reduce_scatter or reduce_scatter:CODEC."""
    error_feedback: float | None
    """β; None is none."""
    seed: int
    """What codecs that draw random numbers draw them from."""

    @property
    def way(self) -> Combine:
        """How the payloads are combined."""
        return combine_by(self.combine, self.wire)

    def check(self, model: nn.Module, num_replicas: int) -> None:
        """Refuse, without any other replica, what can't be trained; the model may be on `meta`.

        Raises:
            UserError: if the settings contradict each other or the model; the message names both values.
        """
        check_partition(model, self.fragments)
        self._check_schedule(num_replicas)
        if not 0 <= self.mixing <= 1:
            raise UserError(f"mixing must lie between 0 and 1, not {self.mixing}")
        _ = self.way
        self._check_error_feedback()
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise UserError(f"seed must be a whole number, at least 0 and below 2^64, not {self.seed}")
        _check_parameters(model)

    def facts(self, num_replicas: int) -> dict[str, object]:
        """What all replicas must be told alike, in the order in which a difference explains the most."""
        return {
            **self._facts_of_schedule(num_replicas),
            "outer learning rate": float(self.outer.lr),
            "outer momentum": float(self.outer.momentum),
            "mixing": float(self.mixing),
            "wire": self.wire.spec,
            "combine": self.way.spec,
            "error feedback": self.error_feedback,
            "seed": self.seed,
        }

    def facts_of_state(self, replica: int, num_replicas: int) -> dict[str, object]:
        """What gives the payloads in flight, and the error, of a replica's state their meaning."""
        schedule = self._facts_of_schedule(num_replicas)
        return {
            "wire": self.wire.spec,
            "combine": self.way.spec,
            "num_replicas": num_replicas,
            "error_feedback": self.error_feedback,
            "seed": self.seed,
            "schedule": ", ".join(f"{name}={value}" for name, value in schedule.items()),
            "own_overlap_steps": self.schedule.overlap(replica),
            "replica": replica,
        }

    def _facts_of_schedule(self, num_replicas: int) -> dict[str, object]:
        schedule = self.schedule
        return {
            "sync_every": schedule.sync_every,
            "num_fragments": schedule.num_fragments,
            "overlap_steps": [schedule.overlap(replica) for replica in range(num_replicas)],
            "offsets": [schedule.offset(fragment) for fragment in range(schedule.num_fragments)],
            "first_sync": schedule.first_sync,
        }

    def _check_schedule(self, num_replicas: int) -> None:
        if self.schedule.num_fragments != len(self.fragments):
            raise UserError(
                f"schedule.num_fragments={self.schedule.num_fragments}, but there are {len(self.fragments)} "
                "fragments: count all of them, the one outside the blocks included"
            )
        overlaps = self.schedule.overlap_steps
        if isinstance(overlaps, tuple) and len(overlaps) != num_replicas:
            raise UserError(f"overlap_steps={overlaps} must hold one number for each of {num_replicas} replicas")

    def _check_error_feedback(self) -> None:
        beta = self.error_feedback
        if beta is not None and not 0 < beta <= 1:
            raise UserError(f"error_feedback must be above 0 and at most 1, or None, not {beta}")
        if beta is not None and isinstance(self.wire, DARE) and beta * (1 / self.wire.density - 1) >= 1:
            raise UserError(
                f"error_feedback={beta} with wire={self.wire.spec} diverges: dare scales what it keeps up, "
                "and the error grows with it, unless error_feedback·(1/density − 1) < 1; take feddropout"
            )


def _check_parameters(model: nn.Module) -> None:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    first, device = next((name, local(parameter).device) for name, parameter in trained.items())
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise UserError(f"parameter {name} is {parameter.dtype}: only real floats can be exchanged")
        if (other := local(parameter).device) != device:
            raise UserError(f"parameter {first} is on {device} and {name} on {other}: one replica, one device")
