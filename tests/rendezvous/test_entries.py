"""The bytes of entries: one form, read back exactly."""

import json

import pytest
from tests.rendezvous.cases import Log

from diloco.files import sha256
from diloco.rendezvous.log.entries import (
    MOST_ENTRY_BYTES,
    Create,
    Join,
    Keys,
    Leave,
    LogError,
    Outer,
    Rules,
    Snapshot,
    new_entry,
    open_entry,
    seal_entry,
)

A = "a" * 64
LOG = Log(num_fragments=2).join("a", "b")
BODIES = [
    Create(format=2, rules=Rules(num_fragments=3), facts={"H": [1, None, "é"]}, creator=A, allowed=(A,)),
    Join(name="gpu-0.home", key=A),
    Outer(fragment=1, round=1, before="0" * 16, contributions=(LOG.contribution(1, 1, norm=1e-7),)),
    Snapshot(fragment=0, round=3, sha256=(A, "b" * 64)),
    Leave(finished=True),
    Keys(allowed=(A,), revoked=()),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_an_entry_comes_back_as_it_was(body):
    entry = new_entry(body, author=-1, previous=A)
    for signature in ("", "01" * 64):
        assert open_entry(seal_entry(entry, signature), number=3) == (entry, signature)
    assert entry.nonce != new_entry(body, author=-1, previous=A).nonce


def line_of(**changes) -> bytes:
    value = json.loads(new_entry(Join(name="a", key=""), author=0, previous=A).line())
    return json.dumps(value | changes, separators=(",", ":")).encode() + b"\n"


REAL = line_of()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        REAL,
        REAL + b"\n\n",
        REAL + b"AB" * 64 + b"\n",
        REAL + b"ab\n",
        REAL.replace(b":", b": ") + b"\n",
        line_of(kind="merge") + b"\n",
        line_of(more=1) + b"\n",
        line_of(nonce="0" * 31) + b"\n",
        line_of(author=True) + b"\n",
        line_of(body={"name": "a\n", "key": ""}) + b"\n",
        line_of(body={"name": "../a", "key": ""}) + b"\n",
        line_of(body={"name": "a", "key": A + "\n"}) + b"\n",
        line_of(body={"name": "a", "key": "", "slot": 1}) + b"\n",
        line_of(kind="keys", body={"allowed": [""], "revoked": []}) + b"\n",
        line_of(kind="snapshot", body={"fragment": 0, "round": 1, "sha256": []}) + b"\n",
        REAL.rstrip(b"\n") + b" " * MOST_ENTRY_BYTES + b"\n\n",
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(LogError, match="entry 3 of the log"):
        open_entry(data, number=3)


def test_the_digest_is_of_both_lines():
    entry = new_entry(Leave(finished=False), author=0, previous=A)
    assert sha256(seal_entry(entry, "")) != sha256(seal_entry(entry, "01" * 64))
