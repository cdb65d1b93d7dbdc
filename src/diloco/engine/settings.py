"""The engine's settings, and the arguments that it refuses."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from diloco.auto import AUTO, NO_AUTO_IN_A_STORE, chosen
from diloco.engine.outer_state import SENT_THETA
from diloco.engine.parameters import is_sharded, local
from diloco.errors import UserError, nearest, setting
from diloco.exchange.leader import LeaderExchange
from diloco.exchange.process_group import ProcessGroupExchange
from diloco.exchange.transport import Transport
from diloco.fragments import Fragment, check_partition, sequential, strided, whole
from diloco.outer.averages import Reduction, reduction_of
from diloco.outer.cohort import Weights
from diloco.outer.merge import MergeRule, Mixing, Translation
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import RULE, OuterRule
from diloco.outer.rules import merge_rule, outer_rule
from diloco.outer.torch_optimizer import TorchOptimizer, rule_of_optimizer
from diloco.rendezvous.contract import Rendezvous
from diloco.schedule import Schedule
from diloco.wire import codec
from diloco.wire.formats import VERSION, VERY_LONG
from diloco.wire.payload import Codec

COUNTERS = ("num_steps", "tokens", "bytes_sent", "bytes_received", "blocked_seconds")
"""The plain numbers of the engine's state that every replica has."""


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
    buffers: Literal["own", "average"]
    """The values that the buffers have after `finish()`: each replica's own, or the mean."""
    weights: Weights | Literal["equal"] = "equal"
    """The replicas' weights in a fixed group; where they come and go, the run's rules name them."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the vectors that are kept beside Θ, but for the error."""
        return (*self.outer.slots, *((SENT_THETA,) if self.mixing.needs_sent else ()))

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
        if self.outer.needs_deltas and self.reduction.num_phases > 1:
            raise UserError(
                f"outer={type(self.outer).__name__} reads the outer gradient of each replica, and with "
                f"combine={self.combine} no replica has them whole: set combine=gather",
                *("outer", "combine"),
            )
        if self.outer.merges_at_send and not isinstance(self.mixing, Translation):
            raise UserError(
                f"outer={type(self.outer).__name__} merges at the send, and mixing={self.mixing} would undo the "
                "inner steps after it: set mixing=translate, which keeps them",
                *("mixing", "outer"),
            )
        if isinstance(self.mixing, Translation) and not self.outer.merges_at_send:
            raise UserError(
                f"mixing=translate keeps all of Θ − θ, and outer={type(self.outer).__name__} has counted what was "
                "sent of it, which would be sent and counted again: set mixing=taylor:strength=0, which keeps the "
                "inner steps in flight alone",
                *("mixing", "outer"),
            )
        self._check_slots()
        self._check_error_feedback()
        if not (isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise UserError(f"seed must be a whole number, at least 0 and below 2^64, not {self.seed}", "seed")
        _check_parameters(model)

    def check_transport(self, transport: Transport, model: nn.Module) -> None:
        """Refuse a transport that can't do what the settings need.

        Raises:
            UserError: naming both.
        """
        has_shards = any(map(is_sharded, model.parameters()))
        has_several = isinstance(transport, LeaderExchange) or has_shards
        if self.buffers == "average" and has_several:
            raise UserError(
                "buffers=average needs replicas of one process, since each process has buffers of its own: leave "
                "it out, and estimate the buffers anew for Θ (torch.optim.swa_utils.update_bn)",
                "buffers",
            )
        if has_shards and isinstance(self.outer, TorchOptimizer) and not self.outer.is_elementwise:
            raise UserError(
                f"outer={self.outer.facts()['class']} computes with norms over a fragment, of which each process "
                "of a sharded replica has a part: take a rule of each element alone, such as torch.AdamW, or rda, "
                "which adds up norms over the shards",
                "outer",
            )
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
        if self.buffers == "average":
            raise UserError(
                "buffers=average needs an exchange: where replicas come and go the log holds parameters alone; "
                "leave it out, and estimate the buffers anew for Θ (torch.optim.swa_utils.update_bn)",
                "buffers",
            )
        if self.weights != "equal":
            raise UserError(
                f"weights={self.weights} is for a fixed group, and where replicas come and go the run has its "
                f"own: pass StoreRendezvous(url, weights={self.weights!r})",
                "weights",
            )
        if not self.outer.shared:
            raise UserError(
                f"outer={type(self.outer).__name__} keeps other outer parameters on each replica, and where "
                "replicas come and go they are made from the log, the same for all: take diloco.Nesterov",
                "outer",
            )

    def shared_facts(self) -> dict[str, object]:
        """The settings that replicas which come and go must share: not their number, nor τ."""
        return self.schedule.facts() | self._facts()

    def facts(self, num_replicas: int) -> dict[str, object]:
        """The settings that all replicas must share, in the order in which a difference explains the most."""
        schedule = self.schedule.facts(num_replicas)
        own = {"weights": self.weights, "buffers": self.buffers}
        return {"num_replicas": num_replicas, **schedule, **self._facts(), **own}

    def _facts(self) -> dict[str, object]:
        return {
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
        schedule = self.schedule.facts(num_replicas)
        return {
            "wire": self.wire.spec,
            "combine": self.reduction.spec,
            "num_replicas": num_replicas,
            "error_feedback": self.error_feedback,
            "weights": self.weights,
            "seed": self.seed,
            "schedule": ", ".join(f"{name}={value}" for name, value in schedule.items()),
            "replica": replica,
            "outer_rule": str(self.outer.facts().get("class", type(self.outer).__name__)),
        }

    def _check_schedule(self, num_replicas: int | None) -> None:
        if self.schedule.num_fragments != len(self.fragments):
            raise UserError(
                f"schedule.num_fragments={self.schedule.num_fragments}, but there are {len(self.fragments)} "
                "fragments: count all of them, the one outside the blocks included",
                "schedule.num_fragments",
            )
        self.schedule.check_replicas(num_replicas)

    def _check_slots(self) -> None:
        """Refuse slots of equal names, or of names that the engine's state has already."""
        slots = self.outer.slots
        taken = {
            "outer",
            "error",
            "sent",
            SENT_THETA,
            "in_flight",
            "fragments",
            "last_sent",
            "weighed",
            "drained_step",
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
        if beta is None and self.wire.needs_outer:
            raise UserError(
                f"wire={self.wire.spec} without error_feedback loses for ever what one outer gradient alone does "
                "not change in the model: set error_feedback=1",
                "error_feedback",
                "wire",
            )
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
    _check_memory({name: local(parameter) for name, parameter in trained.items()})


def _check_memory(shards: Mapping[str, torch.Tensor]) -> None:
    """Refuse two parameters in one memory, which a merge would change twice."""
    firsts: dict[int, str] = {}
    for name, shard in shards.items():
        address = shard.data_ptr()  # 0 where torch knows no memory: of empty, meta, and wrapped tensors
        if address and (first := firsts.setdefault(address, name)) != name:
            raise UserError(
                f"parameters {first} and {name} share memory, and a merge would change it twice: make them one "
                "parameter, by an assignment to the attribute itself and not to its .data",
                "model",
            )


def settings_of(
    model: nn.Module,
    *,
    fragments: str | Sequence[Fragment],
    schedule_for: Callable[[int], Schedule],
    outer: str | OuterRule | Optimizer | type[Optimizer] | None,
    mixing: str | float | MergeRule,
    wire: str | Codec,
    combine: str,
    error_feedback: float | None,
    seed: int,
    buffers: Literal["own", "average"],
    weights: Weights | Literal["equal"],
    num_steps: int | None = None,
    num_replicas: int | None = None,
) -> Settings:
    """The settings that the engine's arguments stand for.

    Args:
        schedule_for: makes the schedule for a number of fragments.
        num_replicas: M; None where replicas come and go. The others are as in `StreamingDiLoCo`.

    Raises:
        UserError: if one is of a wrong type, or two contradict each other; the message says what to pass.
    """
    partition = _fragments(fragments, model)
    with setting("wire", wire):
        of_payloads = codec(wire) if isinstance(wire, str) else wire
    check_type("wire", of_payloads, Codec, 'the name of a codec such as "e3m0", or a codec of your own')
    check_type("combine", combine, str, '"gather" or "reduce_scatter"')
    check_type("error_feedback", error_feedback, Real | None, "a number above 0 and at most 1, or None")
    if buffers not in ("own", "average"):
        raise UserError(f"buffers={buffers!r} is neither own nor average", "buffers")
    if weights not in (names := ("equal", *get_args(Weights))):
        raise UserError(f"weights={weights!r} is none of {', '.join(names)}", "weights")
    with setting("combine", combine):
        reduction_of(combine, of_payloads)
    schedule, merge = schedule_for(len(partition)), _merge_rule(mixing)
    if isinstance(outer, str) and outer == AUTO:
        outer = _auto(num_steps, num_replicas, schedule.sync_every, merge)
    elif num_steps is not None:
        raise UserError(f"num_steps={num_steps} is for outer='auto' alone: leave it out", "num_steps")
    return Settings(
        fragments=partition,
        schedule=schedule,
        outer=_outer_rule(outer, model),
        mixing=merge,
        wire=of_payloads,
        combine=combine,
        error_feedback=None if error_feedback is None else float(error_feedback),
        seed=seed,
        buffers=buffers,
        weights=weights,
    )


def check_type(name: str, value: object, kind: Any, advice: str) -> None:
    """Refuse an argument of another type.

    Raises:
        UserError: with its name, its value, and what to pass.
    """
    if not isinstance(value, kind):
        raise _wrong(name, value, advice)


def _fragments(fragments: str | Sequence[Fragment], model: nn.Module) -> tuple[Fragment, ...]:
    ways = {"strided": strided, "sequential": sequential, "whole": whole}
    if isinstance(fragments, str) and fragments in ways:
        return ways[fragments](model)
    if isinstance(fragments, str):
        raise UserError(
            f"fragments={fragments!r} is none of {', '.join(ways)}{nearest(fragments, ways)}", "fragments"
        )
    listed: tuple[Any, ...] = tuple(fragments) if isinstance(fragments, Iterable) else ()
    if not listed or not all(isinstance(fragment, Fragment) for fragment in listed):
        raise _wrong("fragments", fragments, f"{', '.join(ways)}, or a sequence of diloco.Fragment")
    return listed


def _outer_rule(outer: str | OuterRule | Optimizer | type[Optimizer] | None, model: nn.Module) -> OuterRule:
    """The outer rule of a name, a rule, or a torch optimizer, of which class and settings are taken."""
    if outer is None:
        return Nesterov()
    if isinstance(outer, str):
        with setting("outer", outer):
            return outer_rule(outer)
    if isinstance(outer, Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) in own for group in outer.param_groups for parameter in group["params"]):
            raise UserError(
                f"outer={type(outer).__name__} holds the model's parameters, as the inner optimizer does, which "
                "is passed to engine.attach: build the outer one on another tensor, such as [torch.zeros(1)]: "
                "its class and settings alone are taken",
                "outer",
            )
    if isinstance(outer, Optimizer) or (isinstance(outer, type) and issubclass(outer, Optimizer)):
        return rule_of_optimizer(outer)
    if not isinstance(outer, OuterRule):
        raise _wrong("outer", outer, "a rule such as diloco.Nesterov(lr=0.4, momentum=0.9), or a torch optimizer")
    return outer


def _auto(num_steps: int | None, num_replicas: int | None, sync_every: int, merge: MergeRule) -> Nesterov:
    """Nesterov's rule for a run of so many inner steps.

    Raises:
        UserError: if its length or the number of replicas is not known.
    """
    if num_replicas is None:
        raise UserError(NO_AUTO_IN_A_STORE.format("outer"), "outer")
    if not isinstance(num_steps, int) or num_steps < 1:
        raise UserError(
            f"outer='auto' chooses by the length of the run: pass num_steps=, its inner steps, not {num_steps}",
            *("outer", "num_steps"),
        )
    alpha = merge.alpha if isinstance(merge, Mixing) else 0.0
    lr, momentum = chosen(num_steps // sync_every, num_replicas, sync_every, alpha)
    return Nesterov(lr=lr, momentum=momentum)


def _merge_rule(mixing: str | float | MergeRule) -> MergeRule:
    if isinstance(mixing, MergeRule):
        return mixing
    if isinstance(mixing, str):
        with setting("mixing", mixing):
            return merge_rule(mixing)
    try:
        alpha = float(mixing)
    except (TypeError, ValueError, RuntimeError):
        raise _wrong("mixing", mixing, "a number of at least 0 and below 1, or a merge rule") from None
    if alpha == 1:
        raise UserError("mixing=1 keeps all of a replica's own parameters: no merge would change them", "mixing")
    return Mixing(alpha)


def check_exchange(exchange: Transport | None, rendezvous: Rendezvous | None) -> None:
    """Refuse what is no way to other replicas, and two of them.

    Raises:
        UserError: that says what to pass.
    """
    transports = "diloco.ProcessGroupExchange(group), what diloco.connect(address) returns, or "
    transports += "diloco.LoopbackExchange() for one replica alone"
    if (exchange is None) == (rendezvous is None):
        raise UserError(
            f"exchange={exchange} and rendezvous={rendezvous}: pass one of them, exchange={transports}, or "
            "rendezvous=diloco.StoreRendezvous(url) for replicas that come and go",
            "exchange",
            "rendezvous",
        )
    if rendezvous is not None and not _offers(rendezvous, Rendezvous):
        raise _wrong("rendezvous", rendezvous, "diloco.StoreRendezvous(url)")
    if _offers(exchange, Rendezvous):
        raise UserError(f"exchange=<{type(exchange).__name__}> is a rendezvous: pass rendezvous=", "exchange")
    if exchange is not None and not _offers(exchange, Transport):
        raise _wrong("exchange", exchange, transports)


def check_model(model: nn.Module, exchange: Transport | None) -> None:
    """Refuse what is no model, and wrappers that average or cut the parameters where the engine can't know.

    Args:
        model: the replica's.
        exchange: the way to the other replicas; None where they come and go.

    Raises:
        UserError: that says what to pass.
    """
    check_type("model", model, nn.Module, "the torch.nn.Module that is trained")
    # Absent where no module is wrapped: it takes a second to import.
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
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{name} has no shape yet, since its lazy module has seen no input: call the model once on a "
                "batch, then build the optimizer and the engine",
                "model",
            )
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trained and all(parameter.device.type == "meta" for _, parameter in trained):
        raise UserError(
            f"parameter {trained[0][0]} is on the meta device, as all others are, where it has no values: call "
            "model.to_empty(device=…) and initialise or load the model, then build the optimizer and the engine",
            "model",
        )


def _check_ddp(name: str, module: DistributedDataParallel, exchange: Transport | None) -> None:
    """Refuse DDP over several replicas, and where each of its processes would be one."""
    inside = dist.get_process_group_ranks(module.process_group)
    if exchange is None and len(inside) > 1:
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


def _offers(candidate: object, protocol: type) -> bool:
    """True for an object, not a class, that has all members of a protocol."""
    names = (name for name in vars(protocol) if not name.startswith("_"))
    return not isinstance(candidate, type) and all(hasattr(candidate, name) for name in names)


def _wrong(name: str, value: object, advice: str) -> UserError:
    shown = repr(value)
    shown = f"<{type(value).__name__}>" if len(shown) > 60 or "\n" in shown or " at 0x" in shown else shown
    return UserError(f"{name}={shown} is of the wrong type: pass {advice}", name)
