"""The engine's arguments: refusals of what is of a wrong type, or wrapped in a way that would train wrongly."""

import operator
import sys
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diloco.engine.settings import Settings
from diloco.errors import DilocoError, UserError, setting
from diloco.exchange.process_group import ProcessGroupExchange
from diloco.exchange.transport import Transport
from diloco.fragments import Fragment
from diloco.outer.mixing import MergeRule, Mixing
from diloco.outer.nesterov import Nesterov
from diloco.outer.rule import OuterRule
from diloco.reduction import reduction_of
from diloco.rendezvous.contract import Rendezvous, is_rendezvous
from diloco.schedule import Schedule
from diloco.wire import codec
from diloco.wire.payload import Codec


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
