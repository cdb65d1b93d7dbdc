"""Joining a run, or creating it: the comparison of settings, the replica's number, and what it has to catch up."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from diloco.errors import DisagreementError, UserError
from diloco.rendezvous.archive import newest_state
from diloco.rendezvous.check import assert_sound
from diloco.rendezvous.contract import StoredSnapshot
from diloco.rendezvous.log.entries import FORMAT, Create, Join, Leave, LogError, Rules
from diloco.rendezvous.log.keys import VARIABLE, Signer
from diloco.rendezvous.log.log import ENTRY, Log, begun, sealed_entry, source_of, stored_entry
from diloco.rendezvous.log.run import OuterRef, RunState
from diloco.rendezvous.objects import Objects
from diloco.rendezvous.store import Store

_LOG = logging.getLogger("diloco")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The run that a replica wants to join."""

    name: str
    step_tokens: int
    """The most tokens that one of its inner steps reads."""
    most_steps: int
    """The most inner steps between two of its sends of a fragment that are counted."""
    rules: Rules
    """The rules of the run that it creates if there is none."""
    asked: frozenset[str]
    """The rules that its user has set, which an existing run must have, too."""
    facts: Mapping[str, Any]
    """The settings that all replicas share."""
    timeout_seconds: float


async def join(store: Store, signer: Signer, wish: Wish) -> tuple[Log, int]:
    """Join the run of a store, or create it and join.

    Returns:
        The log up to the join, and the replica's number.

    Raises:
        DisagreementError: if the run has other settings.
        UserError: if the name is the bridge's.
        LogError: if the run refuses the replica, or its log is damaged or has a hole.
        StoreError: if the store can't be used.
    """
    patience = wish.timeout_seconds
    data = await stored_entry(store, 0, patience_seconds=patience) or await _created(store, signer, wish)
    create, first = begun(data)
    log = Log(store, await newest_state(store, first), signer, patience_seconds=patience)
    _compare(create, wish)
    if wish.name == create.rules.bridge and "bridge" not in wish.asked:
        raise UserError(f"name={wish.name} is the name of the run's bridge: take another", "name")
    await log.read_all(at_once=1)
    await log.check_no_gap()  # which a join would fill
    return log, await _number_of_joined(log, signer, wish, store.url)


async def missing(log: Log, own: int) -> str:
    """The replicas that have not joined and without which the run does not begin, in words; empty if it may begin.

    Raises:
        LogError: if the log is damaged.
        FencedError: if another process takes the replica's place.
        StoreError: if the store can't be used.
    """
    await _read_on(log, own)
    least = log.state.rules.num_replicas
    num_missing = 0 if log.state.is_complete else least - len(log.state.present)
    return f"{num_missing} of {least} replicas" if num_missing else ""


async def newest_snapshots(objects: Objects, log: Log, own: int) -> dict[int, StoredSnapshot]:
    """The newest snapshot of each fragment that has one, from which a joiner starts.

    Raises:
        LogError: if the log or a snapshot is damaged.
        FencedError: if another process takes the replica's place meanwhile.
        StoreError: if the store can't be used.
    """
    for num_tries in range(1, _MOST_TRIES + 1):
        refs = {p: of_p.snapshots[-1] for p, of_p in enumerate(log.state.fragments) if of_p.snapshots}
        try:
            snapshots = await asyncio.gather(*(objects.snapshot(p, ref) for p, ref in refs.items()))
            return dict(zip(refs, snapshots, strict=True))
        except LogError:  # newer ones may have taken their place meanwhile
            if num_tries == _MOST_TRIES:
                raise
        await _read_on(log, own)
    raise AssertionError("the last try returns or raises")


async def _read_on(log: Log, own: int) -> None:
    """Read what was written since, while this replica is still in the run."""
    async for _, entry in log.read(at_once=1):
        log.state.check_goes_on(own, entry)


async def withdraw(log: Log, own: int, *, unless_complete: bool = False) -> bool:
    """Leave again, before a first step; True if this replica has left, or another has its place.

    Args:
        log: of the run.
        own: this replica.
        unless_complete: stay where the run may begin: a companion whose join stands in the log before this
            replica's farewell counts on it.
    """
    while not (log.state.members[own].left or log.state.members[own].fenced):
        if unless_complete and log.state.is_complete:
            return False
        _, is_own = await log.append(Leave(finished=False), author=own)
        if not is_own:
            await log.read_all(at_once=1)
    return True


async def _created(store: Store, signer: Signer, wish: Wish) -> bytes:
    """Entry 0, from this replica or from another that was faster."""
    await assert_sound(store)
    allowed = (signer.public,) if signer.public else ()
    body = Create(format=FORMAT, rules=wish.rules, facts=dict(wish.facts), creator=signer.public, allowed=allowed)
    data = sealed_entry(body, signer, author=-1, previous="")
    ENTRY.open(data, source_of(0))  # refuse here what everybody would have to refuse
    other = await store.create(ENTRY.name(0), data, patience_seconds=wish.timeout_seconds)
    if other is None and not signer.public:
        _LOG.warning(
            "this run trusts everybody who can write to %s: to choose who may join, create it with a key (see "
            "diloco keys)",
            store.url,
        )
    return data if other is None else other


def _compare(body: Create, wish: Wish) -> None:
    """Refuse a run with other settings.

    Raises:
        DisagreementError: naming the first that differs, and both values.
    """
    mine = json.loads(json.dumps(dict(wish.facts)))
    for name in dict.fromkeys((*mine, *body.facts)):
        if name not in mine or name not in body.facts or mine[name] != body.facts[name]:
            raise DisagreementError(
                f"this replica differs from the run in {name}: the run has {_short(body.facts.get(name))}, and "
                f"this replica {_short(mine.get(name))}; start it with the run's settings, or in another place",
                name,
            )
    for field in fields(Rules):
        theirs, ours = getattr(body.rules, field.name), getattr(wish.rules, field.name)
        if field.name in wish.asked and theirs != ours:
            raise DisagreementError(
                f"{field.name}={ours}, and the run was created with {field.name}={theirs}: leave it out",
                field.name,
            )


async def _number_of_joined(log: Log, signer: Signer, wish: Wish, url: str) -> int:
    """The number under which this replica has joined."""
    while True:
        amounts = {"step_tokens": wish.step_tokens, "most_steps": wish.most_steps}
        body, own = Join(name=wish.name, key=signer.public, **amounts), len(log.state.members)
        if reason := log.state.refusal_of_joiner(body):
            raise LogError(_refusal(log.state, signer, url) or f"the run refuses this replica: it {reason}")
        _, is_own = await log.append(body, author=own)
        if is_own:
            return own
        await log.read_all(at_once=1)


def _refusal(state: RunState, signer: Signer, url: str) -> str:
    """The sentence for a refusal that the user can mend; empty for others."""
    if state.closed:
        return (
            f"the run refuses this replica: it joins a run that has ended: diloco export {url} writes its outer "
            "parameters; to train on, create another in another place"
        )
    if state.creator and not signer.public:
        return f"the run asks for a key: set {VARIABLE} to this replica's key file, which diloco keys new makes"
    if state.creator and signer.public not in state.allowed:
        return (
            "the key of this replica is not among those that may join the run: its creator allows it by "
            f"diloco keys allow {url} {signer.public}"
        )
    if signer.public and not state.creator:
        return f"the run was created without keys, and this replica has one: leave {VARIABLE} unset"
    return ""


_MOST_TRIES = 10


def outer_entries_to_replay(state: RunState) -> tuple[OuterRef, ...]:
    """The outer entries after each fragment's newest snapshot, in the log's order."""
    return tuple(ref for ref in state.since if not state.has_snapshot(ref.body.fragment, ref.body.round))


def _short(value: object, most: int = 200) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}…"
