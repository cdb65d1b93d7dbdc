"""StoreRendezvous: replicas that come and go meet in a directory or a bucket."""

import asyncio
import re
import secrets
import socket
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Literal, TypeVar

from torch import Tensor

from diloco.errors import ExchangeError, UserError
from diloco.rendezvous import snapshots
from diloco.rendezvous.contract import Decision, Form, Joined, Offer
from diloco.rendezvous.entries import Rules, Snapshot
from diloco.rendezvous.follower import Follower, Pace
from diloco.rendezvous.joining import Entrance, Wish, enter
from diloco.rendezvous.keys import KeyFile, Signer, signer_of_environment
from diloco.rendezvous.log import FOR_EVER
from diloco.rendezvous.machine import RunState
from diloco.rendezvous.store import Store

_T = TypeVar("_T")


class StoreRendezvous:
    """A run in a store: a directory that all replicas see, or a bucket of S3, GCS or Azure.

    Each machine builds one with the same URL; the first creates the run, and the others join it, whenever they
    like. `step()` of an engine with it never waits, but with the quorum "all".

    Args:
        url: a path, file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, with the
            ordinary environment variables for credentials and endpoint.
        name: this replica's; a later process of the same name takes the place of an earlier one. None is the
            host's name and random letters.
        quorum: "majority": a decision waits for all active replicas until t + τ, then for the majority until
            t + τ + patience; "all": each waits for all, as in a fixed group. None is the run's, or "majority".
        num_replicas: replicas that must have joined before the first inner step; None is the run's, or 1.
        patience: inner steps; None is H.
        weights: "tokens" or "tokens_squared_per_step"; None is the run's, or "tokens".
        max_stale: rounds after which a late payload is not counted any more; None is the run's, or 3.
        snapshot_rounds: rounds of a fragment between two snapshots of it; None is the run's, or 8.
        key: the file of this replica's key; None is that of the environment variable DILOCO_KEY, or no key.
        poll_seconds: time between two looks into the store; None is 0.02 for a directory, and 0.5 for others.
        timeout_seconds: how long joining, leaving, and with the quorum "all" a decision, may take.
        facts: further settings that all replicas of the run must share, JSON by name, such as the learning rate.

    Raises:
        UserError: for a wrong URL, name or setting.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        quorum: Literal["majority", "all"] | None = None,
        num_replicas: int | None = None,
        patience: int | None = None,
        weights: Literal["tokens", "tokens_squared_per_step"] | None = None,
        max_stale: int | None = None,
        snapshot_rounds: int | None = None,
        key: str | None = None,
        poll_seconds: float | None = None,
        timeout_seconds: float = 600.0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = _name(name)
        self._url, self._patience, self._timeout_seconds = str(url), patience, timeout_seconds
        self._signer: Signer = signer_of_environment() if key is None else KeyFile(key)
        self._store = Store.open(self._url)
        self._facts = facts or {}
        is_local = "://" not in self._url or self._url.startswith("file:")
        self._poll_seconds = poll_seconds or (0.02 if is_local else 0.5)
        self._asked = {
            rule: value
            for rule, value in {
                "quorum": quorum,
                "num_replicas": num_replicas,
                "weights": weights,
                "max_stale": max_stale,
                "snapshot_rounds": snapshot_rounds,
            }.items()
            if value is not None
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diloco rendezvous", daemon=True)
        self._entrance: Entrance | None = None
        self._follower: Follower | None = None
        self._running: Future[None] | None = None
        self._aborted: str | None = None

    @property
    def replica(self) -> int:
        """This replica's number in the run."""
        assert self._entrance is not None, "the engine has joined"
        return self._entrance.own

    @property
    def state(self) -> RunState:
        """What the log says, as far as this replica has read it."""
        return self._following.state

    @property
    def slot(self) -> int:
        """This replica's part of the text, of `state.rules.num_slots`."""
        return self.state.members[self.replica].slot

    @property
    def start(self) -> int:
        """Where in the slot this replica began, in tokens."""
        return self.state.members[self.replica].start

    @property
    def counted_tokens(self) -> int:
        """Tokens of all contributions to the outer steps that this replica has taken: P times those of the run."""
        state, bases = self.state, self._following.bases
        return state.tokens - sum(
            contribution.tokens
            for p, log in enumerate(state.fragments)
            if log.round > bases[p][0]
            for ref in log.since
            if ref.body.round > bases[p][0]
            for contribution in ref.body.contributions
        )

    @property
    def store(self) -> Store:
        """The store, with its counts of requests and bytes."""
        return self._store

    @property
    def failure(self) -> str | None:
        """Why this replica can't go on; None as far as is known."""
        return self._aborted or self._following.failure

    @property
    def has_news(self) -> bool:
        """Whether `decided` has something to give."""
        return bool(self._following.decisions)

    @property
    def waits(self) -> bool:
        """Whether a decision is waited for at t + τ."""
        return self.state.rules.quorum == "all"

    @property
    def max_stale(self) -> int:
        """Rounds after which a payload that was not counted never will be."""
        return self.state.rules.max_stale

    def join(self, facts: Mapping[str, Any], form: Form, *, sync_every: int) -> Joined:
        """Join the run, or create it.

        Raises:
            DisagreementError: if the run has other settings.
            UserError: if this object has joined already, or the run refuses this replica.
            ExchangeError: if too few replicas join in time.
        """
        if self._entrance is not None:
            raise UserError("this StoreRendezvous has joined already: build one for each engine", "exchange")
        rules = Rules(num_fragments=len(form.sizes), **self._asked)
        wish = Wish(
            name=self.name,
            rules=rules,
            asked=frozenset(self._asked),
            facts={**self._facts, **facts},
            timeout_seconds=self._timeout_seconds,
        )
        self._thread.start()
        try:
            self._entrance = entrance = self._wait(enter(self._store, self._signer, wish))
        except BaseException:
            self._stop()
            raise
        pace = Pace(
            poll_seconds=self._poll_seconds,
            patience=sync_every if self._patience is None else self._patience,
            drain_seconds=max(2.0, 10 * self._poll_seconds),
        )
        self._follower = Follower(self._store, entrance.log, entrance.own, form, self._signer, pace)
        self._running = asyncio.run_coroutine_threadsafe(self._follower.run(entrance.replay), self._loop)
        return Joined(replica=entrance.own, snapshots=entrance.snapshots, num_decisions=len(entrance.replay))

    def offer(self, offer: Offer) -> None:
        """Start to upload an outer gradient, and return at once."""
        self._loop.call_soon_threadsafe(self._following.offer, offer)

    def at_step(self, step: int) -> None:
        """Tell how many inner steps this replica has taken."""
        self._following.step = step
        self._following.draining_since = None

    def applied(self, fragment: int, round: int, checksum: int) -> None:
        """Tell the checksum of Θ_p after a round."""
        self._following.bases[fragment] = round, checksum

    def wanted(self) -> Sequence[int]:
        """The fragments whose open round has another replica's payload."""
        return self._following.wanted

    def decided(self, *, wait_for: int | None = None) -> Sequence[Decision]:
        """The decisions since the last call, in the log's order.

        Args:
            wait_for: a fragment, or −1 for any: wait until there is a decision of it.

        Raises:
            ExchangeError: if it did not come in time, or this replica can't go on.
        """
        follower = self._following

        def is_here() -> bool:
            fragments = {decision.fragment for decision in follower.decisions}
            return wait_for is None or bool(fragments if wait_for == -1 else wait_for in fragments)

        with follower.news:
            if not follower.news.wait_for(lambda: is_here() or self.failure is not None, self._timeout_seconds):
                raise ExchangeError(
                    f"no decision about fragment {wait_for} came within {self._timeout_seconds:g} s: see with "
                    f"diloco store status {self._url} which replica is missing"
                )
            if not is_here():
                raise ExchangeError(str(self.failure))
            decisions = tuple(follower.decisions)
            follower.decisions.clear()
        return decisions

    def drain(self) -> None:
        """Decide without waiting for steps that are not taken any more, until the next `at_step`."""
        self._following.draining_since = time.monotonic()

    def last_counted(self, replica: int, fragment: int) -> int:
        """The newest payload of a replica that a fragment's rounds have counted; −1 if there is none."""
        return self.state.fragments[fragment].last_seq.get(replica, -1)

    def snapshot(self, fragment: int, round: int, vectors: Mapping[str, Tensor]) -> None:
        """Start to upload Θ_p (`outer`) and the slots after a round."""
        asyncio.run_coroutine_threadsafe(self._upload_snapshot(fragment, round, vectors), self._loop)

    def leave(self, *, finished: bool = False) -> None:
        """Wait for own uploads, bounded in time, and leave; what was uploaded may still be counted."""
        if self._follower is None or self._aborted is not None:
            return
        try:
            if self.failure is None:
                self._wait(self._follower.leave(finished=finished))
        finally:
            self._aborted = "this replica has left the run"
            self._stop()

    def abort(self, reason: str) -> None:
        """Stop at once, after an error; the other replicas go on."""
        self._aborted = self._aborted or reason
        self._stop()

    @property
    def _following(self) -> Follower:
        assert self._follower is not None, "the engine has joined"
        return self._follower

    async def _upload_snapshot(self, fragment: int, last_round: int, vectors: Mapping[str, Tensor]) -> None:
        buffers, sha256 = await asyncio.to_thread(snapshots.sealed, vectors)
        name = snapshots.name_of(fragment, last_round, sha256)
        await self._store.create(name, buffers, patience_seconds=FOR_EVER)
        self._following.append(Snapshot(fragment=fragment, round=last_round, sha256=(sha256,)))

    def _wait(self, work: "Coroutine[Any, Any, _T]") -> _T:
        """The result of work in the loop, bounded in time."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(2 * self._timeout_seconds)
        except FutureTimeoutError:
            future.cancel()
            raise ExchangeError(f"{self._url} gave no answer within {2 * self._timeout_seconds:g} s") from None

    def _stop(self) -> None:
        """End the thread."""
        if self._running is not None:
            self._running.cancel()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._loop.call_soon_threadsafe(self._loop.call_later, 0.05, self._loop.stop)
            self._thread.join(5.0)


def _name(name: str | None) -> str:
    if name is None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip(".-")[:40] or "replica"
        return f"{host}-{secrets.token_hex(3)}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise UserError(f"name={name!r} must be up to 64 letters, digits, dots and dashes", "name")
    return name
