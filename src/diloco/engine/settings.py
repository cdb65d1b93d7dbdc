"""The engine's settings: their validation, and which of them all replicas must share."""

from dataclasses import dataclass

import torch
from torch import nn

from diloco.engine.sharded import local
from diloco.errors import UserError
from diloco.exchange.transport import Transport
from diloco.fragments import Fragment, check_partition
from diloco.outer.mixing import MergeRule
from diloco.outer.rule import RULE, OuterRule
from diloco.reduction import Reduction, reduction_of
from diloco.schedule import Schedule
from diloco.wire.formats import VERSION, VERY_LONG
from diloco.wire.payload import Codec

COUNTERS = ("num_steps", "drained_step", "bytes_sent", "bytes_received", "blocked_seconds")
"""The plain numbers of the engine's state."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `StreamingDiLoCo` that decide what is computed."""

    fragments: tuple[Fragment, ...]
    """A partition of the parameters."""
    schedule: Schedule
    """The steps at which each fragment is sent and merged."""
    outer: OuterRule
    """The outer rule."""
    mixing: MergeRule
    """The merge rule, by which Θ enters a replica's own parameters."""
    wire: Codec
    """The codec of the outer gradients."""
    combine: str
    """The reduction: gather, reduce_scatter or reduce_scatter:CODEC."""
    error_feedback: float | None
    """β; None turns error feedback off."""
    seed: int
    """The seed of codecs that draw random numbers."""

    @property
    def reduction(self) -> Reduction:
        """The way from payloads to an average."""
        return reduction_of(self.combine, self.wire)

    def check(self, model: nn.Module, num_replicas: int | None) -> None:
        """Refuse, without any other replica, what can't be trained; the model may be on `meta`.

        Args:
            model: whose parameters are exchanged.
            num_replicas: M; None where replicas come and go.

        Raises:
            UserError: if the settings contradict each other or the model; the message names both values.
        """
        check_partition(model, self.fragments)
        self._check_schedule(num_replicas)
        _ = self.reduction
        self._check_slots()
        self._check_error_feedback()
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise UserError(f"seed must be a whole number, at least 0 and below 2^64, not {self.seed}", "seed")
        _check_parameters(model)

    def check_transport(self, transport: Transport) -> None:
        """Refuse a transport that can't do what the settings need.

        Raises:
            UserError: naming both.
        """
        if transport.ordered and self.reduction.num_phases > 1:
            raise UserError(
                f"combine={self.combine} sends its averages when they are ready, and the exchange, "
                f"{type(transport).__name__}, matches messages by their order, as nccl does: give "
                "ProcessGroupExchange a group that has gloo, or set combine=gather",
                "combine",
            )

    def check_rendezvous(self) -> None:
        """Refuse what replicas that come and go can't share.

        Raises:
            UserError: naming the setting.
        """
        if not self.outer.shared:
            raise UserError(
                f"outer={type(self.outer).__name__} keeps other outer parameters on each replica, and where "
                "replicas come and go they are made from the log, the same for all: take diloco.Nesterov",
                "outer",
            )

    def shared_facts(self) -> dict[str, object]:
        """The settings that replicas which come and go must share: not their number, nor τ."""
        facts = self.facts(1)
        return {name: facts[name] for name in facts if name not in ("num_replicas", "overlap_steps")}

    def facts(self, num_replicas: int) -> dict[str, object]:
        """The settings that all replicas must share, in the order in which a difference explains the most."""
        return {
            "num_replicas": num_replicas,
            **self._facts_of_schedule(num_replicas),
            "outer rule": type(self.outer).__name__,
            **{f"{RULE}{name}": value for name, value in self.outer.facts().items()},
            "merge rule": type(self.mixing).__name__,
            **{f"merge rule's {name}": value for name, value in self.mixing.facts().items()},
            "version of the wire format": VERSION,
            "wire": self.wire.spec,
            "combine": self.reduction.spec,
            "error feedback": self.error_feedback,
            "seed": self.seed,
        }

    def facts_of_state(self, replica: int, num_replicas: int) -> dict[str, object]:
        """The settings that give meaning to the payloads in flight, and to the error, in a saved state."""
        schedule = self._facts_of_schedule(num_replicas)
        return {
            "wire": self.wire.spec,
            "combine": self.reduction.spec,
            "num_replicas": num_replicas,
            "error_feedback": self.error_feedback,
            "seed": self.seed,
            "schedule": ", ".join(f"{name}={value}" for name, value in schedule.items()),
            "own_overlap_steps": self.schedule.overlap(replica),
            "replica": replica,
            "outer_rule": type(self.outer).__name__,
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

    def _check_schedule(self, num_replicas: int | None) -> None:
        if self.schedule.num_fragments != len(self.fragments):
            raise UserError(
                f"schedule.num_fragments={self.schedule.num_fragments}, but there are {len(self.fragments)} "
                "fragments: count all of them, the one outside the blocks included",
                "schedule.num_fragments",
            )
        overlaps = self.schedule.overlap_steps
        if isinstance(overlaps, tuple) and num_replicas is None:
            raise UserError(
                f"overlap_steps={overlaps} with replicas that come and go: give each replica its own number",
                "overlap_steps",
            )
        if isinstance(overlaps, tuple) and len(overlaps) != num_replicas:
            raise UserError(
                f"overlap_steps={overlaps} must hold one number for each of {num_replicas} replicas",
                "overlap_steps",
            )

    def _check_slots(self) -> None:
        slots = self.outer.slots
        taken = {
            "outer",
            "error",
            "sent",
            "in_flight",
            "fragments",
            "last_sent",
            "tokens",
            *self.facts_of_state(0, 1),
            *COUNTERS,
        }
        if len(set(slots)) < len(slots) or taken & set(slots):
            raise UserError(
                f"{type(self.outer).__name__}.slots={slots} must be different names, and none of "
                f"{', '.join(sorted(taken))}, which the engine's state has already"
            )

    def _check_error_feedback(self) -> None:
        beta, gain = self.error_feedback, self.wire.gain(VERY_LONG)
        if beta is not None and not 0 < beta <= 1:
            raise UserError(f"error_feedback must be above 0 and at most 1, or None, not {beta}", "error_feedback")
        if beta is not None and beta * (gain - 1) >= 1:
            raise UserError(
                f"error_feedback={beta} with wire={self.wire.spec} diverges: {self.wire.name} multiplies what it "
                f"keeps by {gain:g}, and the error grows with it, unless error_feedback·(that − 1) < 1; "
                "take another codec, such as feddropout",
                "error_feedback",
                "wire",
            )


def _check_parameters(model: nn.Module) -> None:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    first, device = next((name, local(parameter).device) for name, parameter in trained.items())
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise UserError(f"parameter {name} is {parameter.dtype}: only real floats can be exchanged")
        if parameter.dtype == torch.float64:
            raise UserError(
                f"parameter {name} is torch.float64, and outer parameters are FP32, to which a merge would round "
                "it: train the model in FP32, model.float()"
            )
        if (other := local(parameter).device) != device:
            raise UserError(f"parameter {first} is on {device} and {name} on {other}: one replica, one device")
