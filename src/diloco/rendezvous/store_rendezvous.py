"""StoreRendezvous: replicas that come and go meet in a directory or a bucket."""

import json
import re
import secrets
import socket
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from torch import Tensor

from diloco.errors import DilocoError, ExchangeError, UserError
from diloco.exchange.transport import wait_for_all
from diloco.rendezvous.contract import Decision, Form, Joined, Offer
from diloco.rendezvous.follower import Background, Follower, Pace
from diloco.rendezvous.joining import Wish, enter, join, missing, withdraw
from diloco.rendezvous.log.entries import MOST_SHARES, Rules
from diloco.rendezvous.log.keys import KeyFile, Signer, signer_of_environment
from diloco.rendezvous.log.log import Log
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.store import Store


class StoreView:
    """The run of a store, as one replica sees it after it has joined."""

    _store: Store
    _own: int | None
    _follower: Follower | None

    @property
    def replica(self) -> int:
        """This replica's number in the run."""
        if self._own is None:
            raise _not_joined()
        return self._own

    @property
    def state(self) -> RunState:
        """The state that the log makes, as far as this replica has read it."""
        return self._following.state

    @property
    def slot(self) -> int:
        """The number of this replica's place in the text, for `diloco.SlotSampler`: no shard of it."""
        return self.state.members[self.replica].slot

    @property
    def start(self) -> int:
        """The tokens after its slot's beginning at which this replica starts: earlier holders have read those."""
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

    def last_counted(self, replica: int, fragment: int) -> int:
        """The newest payload of a replica that a fragment's rounds have counted; −1 if there is none."""
        return self.state.fragments[fragment].last_seq.get(replica, -1)

    def newest_round(self, fragment: int) -> int:
        """The newest round of a fragment that was decided, as far as this replica has read the log."""
        return self.state.fragments[fragment].round

    def last_round(self, slot: int, fragment: int) -> int:
        """The newest round of a fragment that counted a replica of a slot; 0 if there is none."""
        return self.state.fragments[fragment].last_round.get(slot, 0)

    @property
    def _following(self) -> Follower:
        if self._follower is None:
            raise _not_joined()
        return self._follower


def _not_joined() -> UserError:
    return UserError(
        "this process has not joined the run: build the engine first; of a sharded replica the first process "
        "alone joins: let it tell the others what they need to know",
        "exchange",
    )


_T = TypeVar("_T")


_NUM_SHARES = 16


_SECONDS_TO_WITHDRAW = 5.0


class StoreRendezvous(StoreView):
    """A run in a store: a directory that all replicas see, or a bucket of S3, GCS or Azure.

    Each machine builds one with the same URL; the first creates the run, and the others join it, whenever they
    like. `step()` of an engine with it never waits, but with the quorum "all". Of a sharded replica every process
    builds one, and the first alone joins with it.

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
        num_shares: shares into which `combine="reduce_scatter"` cuts a fragment, each averaged by one replica:
            about as many as there are replicas; None is the run's, or 16.
        num_slots: parts of the text, and so the most replicas that are active at once; None is the run's, or 64.
        max_local_steps: inner steps without the store, after which this replica stops; None is 50 H.
        key: the file of this replica's key; None is that of the environment variable DILOCO_KEY, or no key.
        memory_bytes: size of the others' payloads that are kept in memory until they are counted. Up to 16 times
            as much lies in files of the temporary directory; what exceeds that is downloaded again.
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
        num_shares: int | None = None,
        num_slots: int | None = None,
        max_local_steps: int | None = None,
        key: str | None = None,
        memory_bytes: int = 1 << 30,
        poll_seconds: float | None = None,
        timeout_seconds: float = 600.0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        if num_shares is not None and not 2 <= num_shares <= MOST_SHARES:
            raise UserError(f"num_shares={num_shares} must be from 2 to {MOST_SHARES}", "num_shares")
        self.name = _name(name)
        self._asked_local_steps = max_local_steps
        self._url, self._patience, self._timeout_seconds = str(url), patience, timeout_seconds
        self._signer: Signer = signer_of_environment() if key is None else KeyFile(key)
        self._store = Store.open(self._url)
        self._facts, self._memory_bytes = _json(facts or {}), memory_bytes
        self._poll_seconds = poll_seconds or (0.02 if self._store.is_directory else 0.5)
        asked = {"quorum": quorum, "num_replicas": num_replicas, "weights": weights, "max_stale": max_stale}
        asked |= {"snapshot_rounds": snapshot_rounds, "num_shares": num_shares, "num_slots": num_slots}
        self._asked = {rule: value for rule, value in asked.items() if value is not None}
        self._background = Background("diloco rendezvous")
        self._has_joined = False
        self._own: int | None = None
        self._follower: Follower | None = None
        self._aborted: str | None = None
        self._step_of_contact = 0

    @property
    def timeout_seconds(self) -> float:
        """Longest time that joining, leaving, or a decision that is waited for, may take."""
        return self._timeout_seconds

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        return self._aborted or self._following.failure

    def join(self, facts: Mapping[str, Any], form: Form, *, sync_every: int) -> Joined:
        """Join the run, or create it.

        Raises:
            DisagreementError: if the run has other settings.
            UserError: if this object has joined already, the run refuses this replica, or shares are asked for and
                the fragments are not cut.
            ExchangeError: if too few replicas join in time.
        """
        if self._has_joined:
            raise UserError("this StoreRendezvous has joined already: build one for each engine", "exchange")
        self._has_joined = True
        wish = Wish(
            name=self.name,
            rules=_rules(self._asked, form),
            asked=frozenset(self._asked),
            facts={**self._facts, **facts},
            sizes=form.sizes,
            timeout_seconds=self._timeout_seconds,
        )
        self._background.start()
        try:
            log, own = self._wait(join(self._store, self._signer, wish))
            with _withdrawing(self._background, log, own):
                wait_for_all(
                    lambda: self._wait(missing(log, wish, own)),
                    begin=time.monotonic(),
                    seconds=self._timeout_seconds,
                    where=f" at {self._url}",
                    remedy="start the others, each with a name of its own",
                )
                entrance = self._wait(enter(self._store, log, own, wish))
                form = form.cut(log.state.rules.num_shares)
        except BaseException:
            self._background.stop()
            raise
        self._max_local_steps = self._asked_local_steps or 50 * sync_every
        pace = Pace(
            poll_seconds=self._poll_seconds,
            memory_bytes=self._memory_bytes,
            patience=sync_every if self._patience is None else self._patience,
            drain_seconds=max(2.0, 10 * self._poll_seconds),
        )
        self._own = own
        self._follower = Follower(self._store, log, own, form, self._signer, pace)
        self._background.run(self._follower.run(entrance.replay))
        return Joined(
            run=self.state.run,
            replica=own,
            slot=self.slot,
            snapshots=entrance.snapshots,
            form=form,
            num_decisions=len(entrance.replay),
        )

    def offer(self, offer: Offer) -> None:
        """Start to upload an outer gradient, and return at once."""
        self._background.call(self._following.outbox.put, offer)

    def at_step(self, step: int) -> None:
        """Tell how many inner steps this replica has taken."""
        self._following.step = step
        self._following.draining_since = None
        if (outage_seconds := self._store.outage_seconds) == 0:
            self._step_of_contact = step
        elif step - self._step_of_contact > self._max_local_steps:
            self._aborted = (
                f"{self._url} could not be reached or written to for {outage_seconds:.0f} s and "
                f"{step - self._step_of_contact} inner steps, more than max_local_steps={self._max_local_steps}: "
                "check the network, and start this replica again from its checkpoint"
            )

    def applied(self, fragment: int, round: int, checksum: int) -> None:
        """Tell the digest of Θ_p after a round."""
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
        follower, decisions = self._following, list[Decision]()

        def is_here() -> bool:
            """Take what has come, since no more than a few decisions may wait."""
            decisions.extend(follower.decisions)
            follower.decisions.clear()
            fragments = {decision.fragment for decision in decisions}
            return wait_for is None or bool(fragments if wait_for == -1 else wait_for in fragments)

        with follower.news:
            if not follower.news.wait_for(lambda: is_here() or self.failure is not None, self._timeout_seconds):
                about = "" if wait_for == -1 else f" about fragment {wait_for}"
                raise ExchangeError(
                    f"no decision{about} came within {self._timeout_seconds:g} s: see with diloco store status "
                    f"{self._url} which replica is missing"
                )
            if not is_here():
                raise ExchangeError(str(self.failure))
        return decisions

    def drain(self) -> None:
        """Decide without waiting for steps that are not taken any more, until the next `at_step`."""
        self._following.draining_since = time.monotonic()

    def snapshot(self, fragment: int, round: int, vectors: Mapping[str, Tensor]) -> None:
        """Start to upload Θ_p (`outer`) and the slots after a round."""
        self._background.call(self._following.keep, fragment, round, vectors)

    def leave(self, *, finished: bool = False, seconds: float | None = None) -> None:
        """Wait for own uploads and leave; what was uploaded may still be counted.

        Args:
            finished: whether the run's token budget is spent.
            seconds: how long this may take; None is twice `timeout_seconds`.

        Raises:
            ExchangeError: if it takes longer, or an own payload can't be uploaded.
        """
        if self._follower is None or self._aborted is not None:
            return
        try:
            if self.failure is None:
                self._wait(self._follower.leave(finished=finished), seconds)
        finally:
            self._aborted = "this replica has left the run"
            self._background.stop()

    def abort(self, reason: str) -> None:
        """Stop at once, after an error; the other replicas go on."""
        self._aborted = self._aborted or reason
        self._background.stop()

    def _wait(self, work: "Coroutine[Any, Any, _T]", seconds: float | None = None) -> _T:
        """The result of work in the loop, bounded in time."""
        return self._background.wait(work, 2 * self._timeout_seconds if seconds is None else seconds, self._url)


@contextmanager
def _withdrawing(background: Background, log: Log, own: int) -> Iterator[None]:
    """Leave the run after an error, so that nobody counts on a replica that never trained."""
    try:
        yield
    except BaseException:
        with suppress(DilocoError):
            background.wait(withdraw(log, own), _SECONDS_TO_WITHDRAW, "the store")
        raise


def _rules(asked: Mapping[str, Any], form: Form) -> Rules:
    """The rules of a run that this replica creates."""
    if form.second is None and "num_shares" in asked:
        raise UserError(
            f"num_shares={asked['num_shares']} means nothing with combine=gather: leave it out, or take "
            "combine=reduce_scatter",
            *("num_shares", "combine"),
        )
    default: dict[str, Any] = {} if form.second is None else {"num_shares": _NUM_SHARES}
    return Rules(num_fragments=len(form.sizes), **(default | dict(asked)))


def _json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as the log holds them."""
    try:
        return json.loads(json.dumps(dict(facts), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"facts={facts!r} must hold finite numbers and strings: {error}", "facts") from None


def _name(name: str | None) -> str:
    if name is None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip(".-")[:40] or "replica"
        return f"{host}-{secrets.token_hex(3)}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise UserError(f"name={name!r} must be up to 64 letters, digits, dots and dashes", "name")
    return name
