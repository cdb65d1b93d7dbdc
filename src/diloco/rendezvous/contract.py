"""The contract between an engine and a place where replicas come and go.

The training thread offers outer gradients and takes decisions; everything else happens behind this contract.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from diloco.outer.averages import share_size
from diloco.outer.cohort import Cohort
from diloco.rendezvous.log.entries import LogError
from diloco.wire.payload import Codec, Key

if TYPE_CHECKING:
    from typing_extensions import Buffer, TypeIs


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of the run's payloads."""

    codec: Codec
    """The codec of the outer gradients."""
    sizes: tuple[int, ...]
    """N of each fragment."""
    seed: int
    """The seed of codecs that draw random numbers."""
    second: Codec | None = None
    """The codec of the averages of shares; None with gather, where there are none."""
    num_shares: int = 1
    """R: shares into which a fragment is cut; 1 with gather."""

    def key(self, fragment: int, base_round: int, replica: int, share: int = 0) -> Key:
        """The key of a payload: its round is the one after its base, as in a fixed group."""
        return Key(self.seed, fragment, base_round + 1, replica, share)

    def cut(self, num_shares: int) -> "Form":
        """This form with the number of shares that entry 0 names.

        Raises:
            LogError: if fragments are cut and not combined by reduce_scatter, or the other way round.
        """
        if (num_shares > 1) != (self.second is not None):
            way = "gather" if self.second is None else "reduce_scatter"
            raise LogError(f"entry 0 of the log does not describe a run: it combines {num_shares} shares by {way}")
        return replace(self, num_shares=num_shares)

    def share_size(self, fragment: int) -> int:
        """S, elements of a share; with gather N."""
        num_elements = self.sizes[fragment]
        return share_size(num_elements, self.num_shares) if self.num_shares > 1 else num_elements

    def share_bytes(self, fragment: int) -> int:
        """Size of the payload of a share; with gather, of the whole payload."""
        return self.codec.payload_bytes(self.share_size(fragment))

    def average_bytes(self, fragment: int) -> int:
        """Size of the payload of a share's average; with gather 0."""
        return 0 if self.second is None else self.second.payload_bytes(self.share_size(fragment))


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An outer gradient that a replica has encoded."""

    seq: int
    """Offers of this replica before it."""
    fragment: int
    payloads: tuple[Tensor, ...]
    """One a share, flat uint8, not to be changed any more."""
    norms: tuple[float, ...]
    """For each share ‖Δ‖₂ as decoded."""
    base_round: int
    """The fragment's round of the Θ_p that it was taken against."""
    base: int
    """The digest of that Θ_p."""
    tokens: int
    """Tokens read since the last send of the fragment that was counted."""
    steps: int
    """Inner steps since then."""
    position: int
    """Tokens that this process has read, in all."""
    step: int
    """The inner step after which it is offered."""
    overlap_steps: int
    """τ of this replica."""


@dataclass(frozen=True, kw_only=True)
class StoredSnapshot:
    """A fragment's snapshot, as it lies in the store; nobody has checked it."""

    round: int
    name: str
    """The name of its object in the store, which holds the SHA-256."""
    data: "Buffer"


@dataclass(frozen=True, kw_only=True)
class Content:
    """The outer gradients of an outer step: everybody's payloads, or the averages of the shares."""

    payloads: Mapping[int, Tensor] = field(default_factory=dict)
    """The payloads by member; empty if there are averages."""
    averages: tuple[Tensor, ...] = ()
    """The payload of each share's average, in their order; empty with gather."""
    bytes_received: int
    """Payload bytes that this replica received for them."""
    bytes_sent: int = 0
    """Bytes of the averages that this replica made."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An outer step of one fragment, as the log has it, with its content."""

    number: int
    """The number of the log's entry."""
    fragment: int
    round: int
    """Outer steps of the fragment, this one included."""
    before: int
    """Digest of Θ_p before it."""
    cohort: Cohort
    content: Content | StoredSnapshot
    """The outer gradients; a snapshot after this round or a later one, if they were deleted."""
    base_rounds: Mapping[int, int]
    """The round that each member's outer gradient was taken against."""
    is_own: bool
    """Whether this replica's outstanding payload is in it."""
    with_snapshot: bool
    """Whether this replica uploads a snapshot of the fragment before it, whose digest its entry names."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The run as a replica finds it."""

    run: str
    """SHA-256 of the log's entry 0, which names the run."""
    replica: int
    """This replica's number."""
    slot: int
    """This replica's part of the text."""
    snapshots: Mapping[int, StoredSnapshot]
    """The newest snapshot of each fragment that has one."""
    form: Form
    """The form of payloads, with the run's number of shares."""
    num_decisions: int
    """Decisions to take before this replica's Θ is the run's."""


class Rendezvous(Protocol):
    """A place where replicas come and go."""

    @property
    def replica(self) -> int:
        """This replica's number, unique in the run; after `join`."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """Longest time that joining, leaving, or a decision that is waited for, may take; known before `join`."""
        ...

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `decided` has something to give."""
        ...

    def join(self, facts: Mapping[str, Any], form: Form, *, sync_every: int) -> Joined:
        """Join the run, or create it.

        Raises:
            DisagreementError: if the run has other facts, naming the first and both values.
        """
        ...

    def offer(self, offer: Offer) -> None:
        """Start to upload an outer gradient, and return at once."""
        ...

    def at_step(self, step: int) -> None:
        """Tell how many inner steps this replica has taken."""
        ...

    def applied(self, fragment: int, round: int, checksum: int) -> None:
        """Tell the digest of Θ_p after a round."""
        ...

    def wanted(self) -> Sequence[int]:
        """The fragments whose open round has another replica's payload."""
        ...

    def decided(self, *, wait_for: int | None = None) -> Sequence[Decision]:
        """The decisions since the last call, in the log's order.

        Args:
            wait_for: a fragment, or −1 for any: wait until there is a decision of it, bounded in time.

        Raises:
            ExchangeError: if it did not come in time.
        """
        ...

    @property
    def waits(self) -> bool:
        """Whether a decision is waited for at t + τ: true if the quorum is all."""
        ...

    @property
    def max_stale(self) -> int:
        """Rounds after which a payload that was not counted never will be."""
        ...

    def last_counted(self, replica: int, fragment: int) -> int:
        """The newest payload of a replica, by its number in `Offer.seq`, that a fragment's rounds have counted."""
        ...

    def newest_round(self, fragment: int) -> int:
        """The newest round of a fragment that was decided, as far as is known."""
        ...

    def last_round(self, slot: int, fragment: int) -> int:
        """The newest round of a fragment that counted a replica of a slot; 0 if there is none."""
        ...

    def drain(self) -> None:
        """Decide without waiting for steps that are not taken any more, until the next `at_step`."""
        ...

    def snapshot(self, fragment: int, round: int, vectors: Mapping[str, Tensor]) -> None:
        """Start to upload Θ_p (`outer`) and the slots after a round; the vectors are copies."""
        ...

    def leave(self, *, finished: bool) -> None:
        """Wait for own uploads, bounded in time, and leave."""
        ...

    def abort(self, reason: str) -> None:
        """Stop at once, after an error."""
        ...


def is_rendezvous(exchange: object) -> "TypeIs[Rendezvous]":
    """True for an object that offers what `Rendezvous` asks for."""
    names = (name for name in vars(Rendezvous) if not name.startswith("_"))
    return all(hasattr(type(exchange), name) for name in names)
