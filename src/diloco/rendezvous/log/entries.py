"""The entries of the log: what they say, their bytes, and the chain that they form.

An entry is two lines: compact JSON, and the Ed25519 signature of that line in hexadecimal, empty without keys. The
SHA-256 of both lines stands in the next entry as `previous`: none can be changed, taken out or put between.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from diloco.errors import FileError
from diloco.schema import Count, converted, decoded

FORMAT = 2
"""Version of the log's format."""


MOST_REPLICAS = (1 << 16) - 2
"""Numbers of replicas that codecs can tell apart."""


MOST_SHARES = 1024
"""Largest number of shares into which a fragment is cut."""


MOST_ENTRY_BYTES = 1 << 23
"""Length of the longest entry that is read: entry 0 names all parameters."""


Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 in hexadecimal."""


Checksum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""`diloco.outer.digest.outer_digest` of Θ_p in hexadecimal."""


Key = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""An Ed25519 public key in hexadecimal; empty in a run without keys."""


Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""A replica's name: letters, digits, dots, dashes, at most 64."""


Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


MOST_NORM = 1e33
"""Largest ‖Δ‖₂ of a payload: with it the sum of `MOST_REPLICAS` payloads is finite in FP32."""


Norm = Annotated[float, msgspec.Meta(ge=0, le=MOST_NORM)]


_PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


SIGNATURE = re.compile(r"([0-9a-f]{128})?")
"""An Ed25519 signature in hexadecimal; empty in a run without keys."""


class LogError(FileError):
    """An entry of the log is damaged, forged, or not valid after those before it."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which the run decides; fixed by entry 0."""

    num_fragments: Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]
    """P."""
    quorum: Literal["majority", "all"] = "majority"
    """The replicas whose payloads a decision needs: all active ones always suffice, at t + τ the majority, at
    t + τ + patience the decider alone; with `all` nothing less than all."""
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)] = 1
    """Replicas that must have joined before the first inner step."""
    weights: Literal["tokens", "tokens_squared_per_step"] = "tokens"
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

    def is_kept(self, round: int) -> bool:
        """Whether Θ after a round of a fragment is kept in a snapshot.

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
    creator: Key
    """The key that signed this entry, and signs changes of the allow-list."""
    allowed: tuple[_PublicKey, ...] = ()
    """The keys of replicas that may join; empty in a run without keys."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A replica takes the next number, from 0, and the lowest free slot of the text."""

    name: Name
    key: Key


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One payload in an outer step."""

    replica: Count
    seq: Count
    """The number of the payload among its replica's, from 0; its header says of which fragment it is."""
    sha256: Digest
    """SHA-256 of its header, which holds those of its shares."""
    base_round: Count
    """The round after which Θ_p was what the outer gradient was taken against."""
    tokens: Positive
    """Tokens read since the replica's last send of the fragment that was counted."""
    steps: Positive
    """Inner steps since then."""
    position: Count
    """The replica's place in its slot of the text, in tokens."""
    norm: Norm
    """‖Δ‖₂ as decoded."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """One outer step of one fragment."""

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
    sha256: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=1 << 12)]
    """SHA-256 of each shard's file."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A replica leaves; what it has uploaded may still be counted."""

    finished: bool
    """True if the run's token budget is spent: the run is over then."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A change of the allow-list, by the run's creator."""

    allowed: tuple[_PublicKey, ...] = ()
    revoked: tuple[_PublicKey, ...] = ()
    """Keys whose replicas are shut out at once, with what they have uploaded."""


Body: TypeAlias = Create | Join | Outer | Snapshot | Leave | Keys


_KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Body)}


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
    """Random, so that whoever lost the answer to a request knows its own entry again."""
    body: Body

    @property
    def kind(self) -> str:
        """create, join, outer, snapshot, leave or keys."""
        return type(self.body).__name__.lower()

    def line(self) -> bytes:
        """The JSON line, which is what is signed."""
        fields = {
            "kind": self.kind,
            "author": self.author,
            "previous": self.previous,
            "keys": self.keys,
            "nonce": self.nonce,
            "body": msgspec.to_builtins(self.body),
        }
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class _Form:
    """An entry as it lies in the store."""

    kind: str
    author: Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
    previous: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
    keys: Annotated[int, msgspec.Meta(ge=0)]
    nonce: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    body: dict[str, Any]


def entry_name(number: int) -> str:
    """The name of entry k in the store."""
    return f"log/{number:010d}"


def new_entry(body: Body, *, author: int, previous: str, keys: int = 0) -> Entry:
    """An entry with a nonce of its own."""
    return Entry(author=author, previous=previous, keys=keys, nonce=secrets.token_hex(16), body=body)


def seal_entry(entry: Entry, signature: str) -> bytes:
    """The bytes of an entry, from the signature of its line."""
    return entry.line() + signature.encode() + b"\n"


def open_entry(data: bytes, *, number: int) -> tuple[Entry, str]:
    """An entry and its signature, from bytes that nobody has checked.

    Raises:
        LogError: naming the entry, if they are not what `sealed` writes, to the last byte.
    """
    source = f"entry {number} of the log"
    line, _, rest = data.partition(b"\n")
    try:
        if len(data) > MOST_ENTRY_BYTES:
            raise LogError(f"{source} can't be read: it has more than {MOST_ENTRY_BYTES:,} bytes")
        form = decoded(line, _Form, source=source)
        if form.kind not in _KINDS:
            raise LogError(f"{source} is of an unknown kind, {form.kind!r:.50}: install the newest diloco")
        body = converted(form.body, _KINDS[form.kind], source=source)
        entry = Entry(author=form.author, previous=form.previous, keys=form.keys, nonce=form.nonce, body=body)
        signature = rest.removesuffix(b"\n").decode("ascii")
        if seal_entry(entry, signature) != data or not SIGNATURE.fullmatch(signature):
            raise LogError(f"{source} can't be read: its bytes are not in the form in which diloco writes them")
    except LogError:
        raise
    except (FileError, ValueError, RecursionError) as error:
        raise LogError(
            str(error) if isinstance(error, FileError) else f"{source} can't be read: {error}"
        ) from None
    return entry, signature
