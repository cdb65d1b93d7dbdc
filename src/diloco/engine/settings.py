"""The engine's settings, and the arguments that it refuses."""

import operator
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco.engine.shards import local
from diloco.errors import DilocoError, UserError, setting
from diloco.exchange.process_group import ProcessGroupExchange
from diloco.exchange.transport import Transport
from diloco.fragments import Fragment, check_partition
from diloco.outer.averages import Reduction, reduction_of
from diloco.outer.merge import MergeRule, Mixing
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import RULE, OuterRule
from diloco.rendezvous.contract import Rendezvous, is_rendezvous
from diloco.schedule import Schedule
from diloco.wire import codec
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


def settings_of(
    *,
    fragments: object,
    schedule: object,
    outer: object,
    mixing: object,
    wire: object,
    combine: object,
    error_feedback: object,
    seed: int,
) -> Settings:
    """The settings that the engine's arguments stand for.

    Raises:
        UserError: if one is of a wrong type; the message says what to pass.
    """
    if not isinstance(schedule, Schedule):
        raise _wrong("schedule", schedule, "diloco.Schedule(sync_every=…, num_fragments=…)")
    if not isinstance(combine, str):
        raise _wrong("combine", combine, '"gather" or "reduce_scatter"')
    if error_feedback is not None and not isinstance(error_feedback, Real):
        raise _wrong("error_feedback", error_feedback, "a number above 0 and at most 1, or None")
    of_payloads = _codec(wire)
    with setting("combine", combine):
        reduction_of(combine, of_payloads)
    return Settings(
        fragments=_fragments(fragments),
        schedule=schedule,
        outer=_outer_rule(outer),
        mixing=_merge_rule(mixing),
        wire=of_payloads,
        combine=combine,
        error_feedback=None if error_feedback is None else float(error_feedback),
        seed=seed,
    )


def check_exchange(exchange: object) -> None:
    """Refuse what is no transport.

    Raises:
        UserError: that says what to pass.
    """
    if isinstance(exchange, dist.ProcessGroup):
        raise _wrong("exchange", exchange, "diloco.ProcessGroupExchange(group)")
    if not is_rendezvous(exchange) and not _offers(exchange, _members(Transport)):
        advice = "diloco.ProcessGroupExchange(group), what diloco.connect(address) returns, "
        advice += "diloco.StoreRendezvous(url), or diloco.LoopbackExchange() for one replica alone"
        raise _wrong("exchange", exchange, advice)


def check_model(model: object, exchange: Transport | Rendezvous) -> None:
    """Refuse what is no model, and wrappers that average or cut the parameters where the engine can't know.

    Raises:
        UserError: that says what to pass.
    """
    if not isinstance(model, nn.Module):
        raise _wrong("model", model, "the torch.nn.Module that is trained")
    # Whoever has wrapped a module has imported this.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for path, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise UserError(
                f"{path or 'the model'} is a FullyShardedDataParallel, whose flat shards have neither the names "
                "nor the shapes of the parameters: shard the replica with fully_shard(model, mesh=mesh['shard'])",
                "model",
            )
        if isinstance(module, DistributedDataParallel):
            _check_ddp(path or "the model", module, exchange)


def checked_tokens(tokens: object) -> int:
    """The tokens of an inner step; None is 0.

    Raises:
        UserError: if it is no whole number of 0 or more.
    """
    if tokens is None:
        return 0
    if isinstance(tokens, torch.Tensor):  # whose number may still be on its way from a GPU
        raise UserError("tokens must be a whole number of 0 or more, not a tensor: call .item()", "tokens")
    if not isinstance(tokens, SupportsIndex) or operator.index(tokens) < 0:
        raise UserError(f"tokens must be a whole number of 0 or more, not {tokens!r}", "tokens")
    return operator.index(tokens)


def check_job(num_processes: int, exchange: Transport | Rendezvous) -> None:
    """Refuse the processes of a framework's job as replicas: they average their gradients at every step.

    Refuse a rendezvous, too: a framework that starts again begins its text again, and leaves no run at its end.

    Raises:
        UserError: that says how to start the replicas.
    """
    if is_rendezvous(exchange):
        with suppress(DilocoError):  # the engine has joined
            exchange.leave(finished=False)
        raise UserError(
            "a framework's job can't be a replica that comes and goes: train with diloco's own trainer, or in a "
            "loop of your own, which reads from rendezvous.slot and rendezvous.start, or join the jobs with "
            "exchange=diloco.connect(...)",
            "exchange",
        )
    if num_processes > 1 and isinstance(exchange, ProcessGroupExchange):
        raise UserError(
            f"the {num_processes} processes of this job average their gradients, and can't be replicas: start a "
            "job with exchange=diloco.connect(...) for each replica",
            "exchange",
        )


def _check_ddp(name: str, module: DistributedDataParallel, exchange: Transport | Rendezvous) -> None:
    """Refuse DDP over several replicas, and where each of its processes would be one."""
    inside = dist.get_process_group_ranks(module.process_group)
    if is_rendezvous(exchange) and len(inside) > 1:
        raise UserError(
            f"{name} is a DistributedDataParallel over ranks {inside}, each of which would join the run as a "
            "replica: shard one replica over them with fully_shard(model, mesh=mesh['shard'])",
            "model",
        )
    if isinstance(exchange, ProcessGroupExchange) and (
        others := sorted({*inside} & {*exchange.ranks} - {dist.get_rank()})
    ):
        raise UserError(
            f"{name} is a DistributedDataParallel over ranks {inside}, and rank {others[0]} is another replica, "
            "whose gradients it would average with this one's at every step: leave it out, or give it "
            "process_group=… with the processes of this replica alone",
            "model",
        )


def _fragments(fragments: object) -> tuple[Fragment, ...]:
    advice = "what diloco.strided(model), diloco.sequential(model) or diloco.whole(model) returns"
    try:
        listed: tuple[Any, ...] = tuple(fragments)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise _wrong("fragments", fragments, advice) from None
    for fragment in listed:
        if not isinstance(fragment, Fragment):
            raise _wrong("fragments", fragments, f"{advice}, or a sequence of diloco.Fragment")
    return listed


def _outer_rule(outer: object) -> OuterRule:
    if outer is None:
        return Nesterov()
    advice = "an outer rule such as diloco.Nesterov(lr=0.4, momentum=0.9)"
    if isinstance(outer, torch.optim.Optimizer):
        raise _wrong("outer", outer, f"{advice}; the inner optimizer is passed to engine.attach")
    if not _offers(outer, _members(OuterRule)):
        raise _wrong("outer", outer, advice)
    return outer  # pyright: ignore[reportReturnType]


def _merge_rule(mixing: object) -> MergeRule:
    if _offers(mixing, _members(MergeRule)):
        return mixing  # pyright: ignore[reportReturnType]
    try:
        alpha = float(mixing)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, RuntimeError):
        raise _wrong("mixing", mixing, "a number of at least 0 and below 1, or a merge rule") from None
    if alpha == 1:
        raise UserError("mixing=1 keeps all of a replica's own parameters: no merge would change them", "mixing")
    return Mixing(alpha)


def _codec(wire: object) -> Codec:
    if isinstance(wire, str):
        with setting("wire", wire):
            return codec(wire)
    if not isinstance(wire, Codec):
        raise _wrong("wire", wire, 'the name of a codec such as "e3m0", or diloco.codec("int4:block=64")')
    return wire


def _members(protocol: type) -> Sequence[str]:
    """The names that a protocol asks for."""
    return [name for name in vars(protocol) if not name.startswith("_")]


def _offers(candidate: object, names: Sequence[str]) -> bool:
    """True for an object, not a class, that has all of the names."""
    return not isinstance(candidate, type) and all(hasattr(candidate, name) for name in names)


def _wrong(name: str, value: object, advice: str) -> UserError:
    shown = repr(value)
    shown = f"<{type(value).__name__}>" if len(shown) > 60 or "\n" in shown or " at 0x" in shown else shown
    return UserError(f"{name}={shown} is of the wrong type: pass {advice}", name)
