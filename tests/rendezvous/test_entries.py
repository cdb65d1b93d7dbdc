"""The bytes of entries: one form, read back exactly."""

import json

import pytest
from tests.rendezvous.cases import AMOUNTS, Log
from tests.rendezvous.referee import FakeSigner

from diloco.files import sha256
from diloco.rendezvous.log.entries import (
    FORMAT,
    MOST_ENTRY_BYTES,
    Close,
    Create,
    Join,
    Keys,
    Leave,
    LogError,
    Outer,
    Rules,
    Snapshot,
    new_entry,
)
from diloco.rendezvous.log.log import ENTRY, source_of

A = "a" * 64
LOG = Log(num_fragments=2).join("a", "b")
BODIES = [
    Create(format=FORMAT, rules=Rules(num_fragments=3), facts={"H": [1, None, "é"]}, creator=A, allowed=(A,)),
    Join(name="gpu-0.home", key=A, **AMOUNTS),
    Outer(fragment=1, round=1, before="0" * 16, contributions=(LOG.contribution(1, 1, norm=1e-7),)),
    Snapshot(fragment=0, round=3, sha256="b" * 64),
    Leave(finished=True),
    Close(outer=("0" * 16, "f" * 16)),
    Keys(allowed=(A,), revoked=()),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_an_entry_comes_back_as_it_was_and_its_digest_is_of_all_of_it(body):
    entry = new_entry(body, author=-1, previous=A)
    digests = set()
    for signer in (FakeSigner(""), FakeSigner("somebody")):
        data = ENTRY.seal(entry, signer)
        opened = ENTRY.open(data, source_of(3))
        assert opened.header == entry and not opened.body and len(data) % 64 == 0
        assert opened.message == b"entry\n" + data.split(b"\n")[0]
        assert opened.signature == signer.sign(opened.message)
        digests.add(sha256(data))
    assert len(digests) == 2
    assert entry.nonce != new_entry(body, author=-1, previous=A).nonce


def line_of(**changes) -> bytes:
    value = json.loads(ENTRY.line(new_entry(Join(name="a", key="", **AMOUNTS), author=0, previous=A)))
    return json.dumps(value | changes, separators=(",", ":")).encode()


def object_of(line: bytes, signature: bytes = b"") -> bytes:
    """The bytes of any line, padded as they should be."""
    head = line + b"\n" + signature
    return head + b" " * (-(len(head) + 1) % 64) + b"\n"


REAL = line_of()
JOIN = {"name": "a", "key": "", **AMOUNTS}
REFUSED = {
    "nothing": b"",
    "one line": REAL,
    "no end": object_of(REAL)[:-1],
    "no spaces": REAL + b"\n\n",
    "more spaces": REAL + b"\n" + b" " * 1000 + b"\n",
    "a tail": object_of(REAL) + b"\n",
    "capitals": object_of(REAL, b"AB" * 64),
    "a short signature": object_of(REAL, b"ab"),
    "a loose line": object_of(REAL.replace(b":", b": ")),
    "another order": object_of(REAL.replace(b'"kind":"join","author":0', b'"author":0,"kind":"join"')),
    "another kind": object_of(line_of(kind="merge")),
    "another field": object_of(line_of(more=1)),
    "a short nonce": object_of(line_of(nonce="0" * 31)),
    "a bool": object_of(line_of(author=True)),
    "a name with a line": object_of(line_of(body=JOIN | {"name": "a\n"})),
    "a name with a path": object_of(line_of(body=JOIN | {"name": "../a"})),
    "a key with a line": object_of(line_of(body=JOIN | {"key": A + "\n"})),
    "a field in the body": object_of(line_of(body=JOIN | {"slot": 1})),
    "an empty key": object_of(line_of(kind="keys", body={"allowed": [""], "revoked": []})),
    "no step": object_of(line_of(body=JOIN | {"most_steps": 0})),
    "no tokens": object_of(line_of(body={"name": "a", "key": ""})),
    "a short end": object_of(line_of(kind="close", body={"outer": ["0" * 15]})),
    "no digests": object_of(line_of(kind="snapshot", body={"fragment": 0, "round": 1, "sha256": []})),
    "a long line": object_of(REAL + b" " * MOST_ENTRY_BYTES),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_other_bytes_are_refused(wrong):
    assert ENTRY.open(object_of(REAL), source_of(3)).header.body == Join(name="a", key="", **AMOUNTS)
    with pytest.raises(LogError, match="entry 3 of the log"):
        ENTRY.open(REFUSED[wrong], source_of(3))
