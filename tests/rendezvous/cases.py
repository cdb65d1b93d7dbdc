"""A log that a test writes entry by entry, and the header of a payload."""

from collections.abc import Sequence

from diloco.files import sha256
from diloco.rendezvous.log.entries import FORMAT, Body, Contribution, Create, Entry, Join, Outer, Rules
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.objects import Header
from diloco.wire.payload import Codec

AMOUNTS = {"step_tokens": 1000, "most_steps": 10**6}
"""The amounts that a replica declares at its join."""


class Log:
    """A log and its state; entries are not sealed, and digests are made up."""

    def __init__(self, *, creator: str = "", allowed: tuple[str, ...] = (), **rules) -> None:
        body = Create(format=FORMAT, rules=Rules(**rules), facts={}, creator=creator, allowed=allowed)
        self.state = RunState.begin(self.entry(body, -1, ""), sha256(b"0"))

    @staticmethod
    def entry(body: Body, author: int, previous: str, keys: int = 0) -> Entry:
        return Entry(author=author, previous=previous, keys=keys, nonce="0" * 32, body=body)

    def add(self, body: Body, author: int) -> RunState:
        entry = self.entry(body, author, self.state.previous, self.state.keys)
        self.state = self.state.after(entry, sha256(str(self.state.number).encode()))
        return self.state

    def join(self, *names: str, key: str = "") -> "Log":
        for name in names:
            self.add(Join(name=name, key=key, **AMOUNTS), len(self.state.members))
        return self

    def contribution(self, replica: int, fragment: int = 0, **changes) -> Contribution:
        """The next payload of a replica, against the newest round."""
        log = self.state.fragments[fragment]
        start = self.state.members[replica].start if replica < len(self.state.members) else 0
        fields = {
            "replica": replica,
            "seq": 1 + max(other.last_seq.get(replica, -1) for other in self.state.fragments),
            "sha256": sha256(b""),
            "base_round": log.round,
            "tokens": 10,
            "steps": 1,
            "position": start + 10,
            "norm": 1.0,
            "loss": None,
        }
        return Contribution(**(fields | changes))

    def outer(self, *contributions: Contribution, fragment: int = 0, author: int | None = None) -> RunState:
        body = Outer(
            fragment=fragment,
            round=self.state.fragments[fragment].round + 1,
            before="0" * 16,
            contributions=contributions,
        )
        return self.add(body, contributions[0].replica if author is None else author)

    def rounds(self, num: int, *replicas: int, fragment: int = 0) -> "Log":
        for _ in range(num):
            self.outer(*(self.contribution(replica, fragment) for replica in replicas), fragment=fragment)
        return self


RUN = "ab" * 32


def header_of(
    wire: Codec, num_elements: int, bodies: Sequence[bytes | memoryview], norms: Sequence[float], /, **fields
) -> Header:
    """The header of a payload of one or several shares, with the fields that a test does not name."""
    claim = {
        "replica": 3,
        "seq": 41,
        "base_round": 7,
        "tokens": 4096,
        "steps": 30,
        "position": 123_456,
        "loss": None,
    }
    offer = {
        "run": RUN,
        "fragment": 2,
        "base": "0" * 16,
        "wire": wire.format,
        "num_elements": num_elements,
        "num_bytes": memoryview(bodies[0]).nbytes,
        "norms": tuple(norms),
        "sha256": tuple(map(sha256, bodies)),
    }
    return Header(**(claim | offer | fields))
