"""The part of a StoreRendezvous that is read: the run's state, and this replica's place in it."""

from diloco.errors import UserError
from diloco.rendezvous.follower import Follower
from diloco.rendezvous.machine import RunState
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
