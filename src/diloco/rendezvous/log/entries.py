"""The forms of the log's entries.

The SHA-256 of an entry stands in the next one as `previous`: none can be changed, taken out or put between.
"""

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from diloco.errors import FileError
from diloco.outer.cohort import Weights
from diloco.schema import NAME, Count, Name

FORMAT = 9
"""Version of the log's format."""
MOST_REPLICAS = (1 << 16) - 2
"""Numbers of replicas that codecs can tell apart."""
Replicas = Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)]
"""A number of replicas."""
Quorum: TypeAlias = Literal["majority", "all"] | Replicas
MOST_SHARES = 1024
"""Largest number of shares into which a fragment is cut."""
MOST_ENTRY_BYTES = 1 << 23
"""Length of the longest entry that is read: entry 0 names all parameters."""
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 in hexadecimal."""
DigestOrNone = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""A digest, or the empty string."""
Checksum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""`diloco.outer.digest.outer_digest` of Θ_p in hexadecimal."""
PublicKey = DigestOrNone
"""An Ed25519 public key in hexadecimal; empty in a run without keys."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
MOST_NORM = 1e33
"""Largest ‖Δ‖₂ of a payload: with it the sum of `MOST_REPLICAS` payloads is finite in FP32."""
Norm = Annotated[float, msgspec.Meta(ge=0, le=MOST_NORM)]
MOST_LOSS = 1e6
"""Largest training loss that is told; it is for people alone."""
Loss = Annotated[float, msgspec.Meta(ge=-MOST_LOSS, le=MOST_LOSS)]
BRIDGE = rf"^({NAME})?\Z"
"""The name of a bridge, or none."""
_RequiredPublicKey = Digest


class LogError(FileError):
    """An entry of the log is damaged, forged, or not valid after those before it."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which the run decides; fixed by entry 0."""

    num_fragments: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
    """P."""
    quorum: Quorum = "majority"
    """The replicas whose payloads a decision needs: all active ones always suffice, at t + τ the quorum: more than
    half of the active ones, or a number; at t + τ + patience the decider alone, or the same number, or all active
    ones where they are fewer; with `all` nothing less than all."""
    num_replicas: Replicas = 1
    """Replicas that must be present together before the first inner step."""
    weights: Weights = "tokens"
    """A contribution's weight in the average."""
    max_stale: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 3
    """Largest number of rounds between a payload's base and the Θ that its entry updates."""
    norm_bound: Annotated[float, msgspec.Meta(gt=1, le=1e30)] = 20.0
    """An outer gradient is left out if its norm is more than this many times the running median."""
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 64
    """Parts into which the training text is cut; at most so many replicas are active at once."""
    snapshot_rounds: Positive = 8
    """S: rounds of a fragment between two snapshots of it."""
    num_shares: Annotated[int, msgspec.Meta(ge=1, le=MOST_SHARES)] = 1
    """R: shares into which a fragment is cut, each averaged by one replica; 1 with gather."""
    bridge: Annotated[str, msgspec.Meta(pattern=BRIDGE)] = ""
    """The name of the bridge, whose outer gradients are shifts; empty where there is none."""

    def is_kept(self, round: int) -> bool:
        """True if Θ after a round of a fragment is kept in a snapshot.

        The author of the next round's entry uploads it: that entry names the digest of this Θ.
        """
        return round > 0 and round % self.snapshot_rounds == 0


@dataclass(frozen=True, kw_only=True)
class Create:
    """Entry 0: everything that the replicas must agree on."""

    format: Count
    rules: Rules
    facts: dict[str, Any]
    """The settings that all replicas share, by name, digest of the initial parameters included."""
    creator: PublicKey
    """The key that signed this entry, and signs changes of the allow-list."""
    allowed: tuple[_RequiredPublicKey, ...] = ()
    """The keys of replicas that may join; empty in a run without keys."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A replica takes the next number, from 0, and the lowest free slot of the text."""

    name: Name
    key: PublicKey
    step_tokens: Positive
    """The most tokens that one of its inner steps reads."""
    most_steps: Positive
    """The most inner steps between two of its sends of a fragment that are counted."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The facts that a replica states of an outer gradient: in its offer, in the header, and in the log."""

    replica: Count
    seq: Count
    """The number of the offer among its replica's, from 0."""
    base_round: Annotated[int, msgspec.Meta(ge=0, lt=2**32 - 1)]
    """The round after which Θ_p was what the outer gradient was taken against."""
    tokens: Positive
    """Tokens read since the replica's last send of the fragment that was counted."""
    steps: Positive
    """Inner steps since then."""
    position: Count
    """The replica's place in its slot of the text, in tokens."""
    loss: Loss | None
    """Mean training loss of the inner steps since the replica's last send; None if it tells none."""


@dataclass(frozen=True, kw_only=True)
class Contribution(Claim):
    """One replica's outer gradient in an outer step."""

    sha256: Digest
    """SHA-256 of its header, which holds those of its shares."""
    norm: Norm
    """‖Δ‖₂ as decoded."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """One outer step of one fragment; a *shift* if it counts the run's bridge, which it counts alone.

    A shift moves Θ_p without the outer rule, by what another run has decided: Θ_p ← Θ_p − Δ. No replica has to be
    there for it, and it counts no tokens.
    """

    fragment: Count
    round: Positive
    """Outer steps of the fragment, this one included."""
    before: Checksum
    """The digest of Θ_p before it."""
    contributions: tuple[Contribution, ...]
    """The contributions by replica, ascending, at most one each."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Θ_p and the outer rule's slots after a round lie in the store."""

    fragment: Count
    round: Count
    sha256: Digest
    """SHA-256 of its object."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A replica leaves; what it has uploaded may be counted until the run is closed."""

    finished: bool
    """True if the run's token budget is spent: the others take their last inner step, too."""


@dataclass(frozen=True, kw_only=True)
class Close:
    """The run is over: no entry follows. A replica writes it that has left since the token budget is spent."""

    outer: tuple[Checksum, ...]
    """For each fragment the digest of Θ_p after its last outer step."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A change of the allow-list, by the run's creator."""

    allowed: tuple[_RequiredPublicKey, ...] = ()
    revoked: tuple[_RequiredPublicKey, ...] = ()
    """Keys whose replicas are shut out at once, with what they have uploaded."""


Body: TypeAlias = Create | Join | Outer | Snapshot | Leave | Close | Keys


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of the log."""

    author: int
    """The replica that wrote it; −1 for the run's creator (create, keys)."""
    previous: str
    """SHA-256 of the entry before it; empty in entry 0."""
    keys: int
    """Number of the newest entry before it that changes the allow-list; 0 if none does."""
    nonce: str
    """Random: a replica that lost the answer to a request recognizes its own entry by it."""
    body: Body

    @property
    def kind(self) -> str:
        """create, join, outer, snapshot, leave, close or keys."""
        return type(self.body).__name__.lower()


def new_entry(body: Body, *, author: int, previous: str, keys: int = 0) -> Entry:
    """An entry with a nonce of its own."""
    return Entry(author=author, previous=previous, keys=keys, nonce=secrets.token_hex(16), body=body)
