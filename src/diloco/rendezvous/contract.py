"""The contract between an engine and a place where replicas come and go.

The training thread offers outer gradients and takes decisions; everything else happens behind this contract.

Shapes: N elements of one fragment.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from diloco.errors import ExchangeError
from diloco.outer.averages import share_size
from diloco.outer.cohort import Cohort
from diloco.rendezvous.log.entries import Claim, LogError, Rules
from diloco.rendezvous.log.run import OuterRef, RunState
from diloco.wire.payload import Codec, Key


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
    keep_values: bool = True
    """True if this replica averages on a CPU, and keeps the decoded values of payloads until then: a GPU decodes a
    payload in less time than its values take to get there."""

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
class Offer(Claim):
    """The facts of an offer, an outer gradient that a replica offers to the others, until it is decided."""

    fragment: int
    base: int
    """The digest of the Θ_p that it was taken against."""
    norms: tuple[float, ...]
    """For each share ‖Δ‖₂ as decoded."""
    step: int
    """The inner step after which it is offered."""
    overlap: int
    """τ of this replica."""


@dataclass(frozen=True, kw_only=True)
class StoredSnapshot:
    """A fragment's snapshot, after all checks but that of the vectors' names."""

    round: int
    name: str
    """The name of its object in the store."""
    vectors: Mapping[str, Tensor]
    """Θ_p as `outer`, and the outer rule's slots; flat FP32 (N), read-only."""


@dataclass(eq=False)
class Payload:
    """A payload after all checks."""

    data: Tensor
    """Flat uint8, read-only."""
    values: Tensor | None = None
    """The values that it stands for, flat FP32, read-only; None where memory is too short to keep them."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """The outer gradients of an outer step: everybody's payloads, or the averages of the shares."""

    payloads: Mapping[int, Payload] = field(default_factory=dict)
    """The payloads by member; empty if there are averages."""
    averages: tuple[Payload, ...] = ()
    """The average of each share, in their order; empty with gather."""
    bytes_received: int
    """Payload bytes that this replica received for them."""
    bytes_sent: int = 0
    """Bytes of the averages that this replica made."""


MOST_DECISIONS_PER_FRAGMENT = 2
"""Decisions with content that wait for the training thread, which may be evaluating, or stopped."""


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
    is_shift: bool = False
    """True if Θ_p moves without the outer rule, by the bridge's outer gradient: Θ_p ← Θ_p − Δ_p."""
    num_shifts: int = 0
    """Shifts among the rounds: the outer rule counts the others alone."""
    oldest_base: int = 0
    """The least base round that a later entry of the fragment may count."""
    own_seq: int = -1
    """The newest of this replica's offers that the content counts, by `Offer.seq`; −1 if it counts none."""
    with_snapshot: bool = False
    """True if this replica uploads a snapshot of the fragment before it, whose digest its entry names."""

    @classmethod
    def of(cls, ref: OuterRef, state: RunState, content: Content | StoredSnapshot) -> "Decision":
        """The outer step of an entry, with the weights of the run's rules; fields with a default keep that."""
        body = ref.body
        return cls(
            number=ref.number,
            fragment=body.fragment,
            round=body.round,
            before=int(body.before, 16),
            cohort=replace(state.cohort(body.contributions), is_new=ref.is_new),
            content=content,
            base_rounds={c.replica: c.base_round for c in body.contributions},
            is_shift=state.is_shift(body),
        )

    @property
    def round_of_rule(self) -> int:
        """The round as the outer rule counts it."""
        return self.round - self.num_shifts

    def keys(self, form: Form) -> list[Key]:
        """The keys with which the members' outer gradients were encoded, in the members' order."""
        return [form.key(self.fragment, self.base_rounds[member], member) for member in self.cohort.members]


@dataclass(frozen=True, kw_only=True)
class News:
    """The run since the last call of `Seat.step`."""

    decisions: Sequence[Decision] = ()
    """The decisions since then, in the log's order."""
    wanted: Collection[int] = ()
    """The fragments whose open round has another replica's payload."""
    rounds: Sequence[int]
    """For each fragment its newest round that was decided, as far as is known."""
    is_finished: bool = False
    """True once a replica says that the run's token budget is spent."""
    closed: Sequence[str] = ()
    """`RunState.closed`, once all decisions of the run were taken; empty before."""


class NoDecisionError(ExchangeError):
    """A decision, or the end of the run, did not come in time."""


class Seat(Protocol):
    """The place of one replica in a run that it has joined."""

    @property
    def failure(self) -> str | None:
        """The reason why this replica can't go on; None as far as is known."""
        ...

    def offer(self, offer: Offer, payloads: tuple[Tensor, ...], values_N: Tensor | None) -> None:
        """Start to upload an outer gradient, and return at once.

        Args:
            offer: the facts about it.
            payloads: one per share; flat uint8, in the host's memory; read-only.
            values_N: the values that they stand for, flat FP32 (N), in the host's memory; read-only; None if this
                replica averages elsewhere.
        """
        ...

    def step(
        self,
        num_steps: int,
        taken_rounds: Sequence[tuple[int, int]],
        *,
        room: int,
        wait_for: int | None = None,
        is_last: bool = False,
    ) -> News:
        """Report this replica's progress, and take what the run has decided since.

        Args:
            num_steps: inner steps that it has taken.
            taken_rounds: for each fragment the newest round that it has taken, and the digest of Θ_p after it.
            room: decisions that it can hold: with none left, none are taken.
            wait_for: a fragment, or −1 for any: wait until there is a decision of it, or the run is closed,
                bounded in time.
            is_last: no more inner steps follow: decide without waiting for them.

        Raises:
            NoDecisionError: if what is waited for did not come in time.
            ExchangeError: if this replica can't go on.
        """
        ...

    def refusal(self, offer: Offer) -> str:
        """The reason why no outer step counts an own offer any more, for people."""
        ...

    def snapshot(self, fragment: int, round: int, vectors: Mapping[str, Tensor]) -> None:
        """Start to upload Θ_p (`outer`) and the slots after a round; the vectors are copies."""
        ...

    def close(self, *, are_offers_counted: bool = True, if_last: bool = False) -> None:
        """Start to end the run, whose token budget is spent: nothing more is offered here.

        Args:
            are_offers_counted: False before own offers were counted, where others may be needed to count them.
            if_last: leave, and end the run only if all other replicas have left.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The run as a replica finds it."""

    seat: Seat
    """The place that its engine works from."""
    run: str
    """SHA-256 of the log's entry 0, which names the run."""
    rules: Rules
    """The run's rules."""
    replica: int
    """This replica's number, unique in the run."""
    slot: int
    """This replica's part of the text."""
    start: int
    """The first token of this replica in the slot."""
    step_tokens: int
    """The most tokens that an inner step may read, as this replica has declared."""
    most_steps: int
    """The most inner steps of an outer gradient, as this replica has declared."""
    slot_rounds: Sequence[int]
    """For each fragment its newest round that counted a replica of this slot; 0 if there is none."""
    snapshots: Mapping[int, StoredSnapshot]
    """The newest snapshot of each fragment that has one."""
    form: Form
    """The form of payloads, with the run's number of shares."""
    num_decisions: int
    """Decisions to take before this replica's Θ is the run's."""


class Rendezvous(Protocol):
    """A place where replicas come and go."""

    @property
    def timeout_seconds(self) -> float:
        """Longest time that joining, leaving, or a decision that is waited for, may take."""
        ...

    def join(self, facts: Mapping[str, Any], form: Form, *, sync_every: int) -> Joined:
        """Join the run, or create it.

        Raises:
            DisagreementError: if the run has other facts, naming the first and both values.
        """
        ...

    def leave(self) -> None:
        """Wait for own uploads, bounded in time, and leave."""
        ...

    def abort(self, reason: str) -> None:
        """Stop at once, after an error, whether this replica has joined or not; the others go on."""
        ...
