"""Payload objects and snapshots that were changed, or made by somebody who means harm.

pytest tests/hostile/test_payload_objects.py --hostile-examples 100000    # of each kind, some minutes
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import settings
from tests import memory
from tests.hostile.mutations import generator, mutated_bytes, mutated_json
from tests.rendezvous.cases import RUN, header_of
from tests.rendezvous.test_entries import object_of

from diloco.errors import PayloadError
from diloco.rendezvous.contract import Form
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.objects import (
    PAYLOAD,
    Header,
    SnapshotError,
    body_tensor,
    check_header,
    checked_values,
    norm_of,
    open_payload,
    open_snapshot,
    seal_snapshot,
    snapshot_name,
)
from diloco.wire import Key, codec

NUM_EXAMPLES = settings.get_profile("hostile").max_examples
N = 300
KEY = Key(5, fragment=2, round=8, replica=3)
CODEC = codec("e3m0")
FORM = Form(codec=CODEC, sizes=(N, N, N), seed=5)
MOST_BYTES = 4 << 20
"""Python's memory at any time while mutations are read."""


def payload_of() -> tuple[Header, bytes]:
    """A header of replica 3, and its body."""
    delta_N = torch.randn(N, generator=torch.Generator().manual_seed(0))
    payload = CODEC.encode(delta_N, KEY)
    body = payload.numpy().tobytes()
    return header_of(CODEC, N, [body], [float(CODEC.decode(payload, N, KEY).norm())]), body


@pytest.fixture(scope="module")
def signers(tmp_path_factory) -> list[Signer]:
    folder = tmp_path_factory.mktemp("keys")
    for name in "ab":
        write_key(folder / name)
    return [Signer.of_file(folder / "a"), Signer.of_file(folder / "b")]


def taken(data: bytes, public: str = "") -> Header:
    """The header of a payload that passes all checks of a receiver."""
    header, body = open_payload(data, name="payloads/3/00000041", run=RUN, public=public)
    check_header(header, FORM)
    values_N = checked_values(header, body_tensor(body), FORM)
    assert norm_of(values_N) == pytest.approx(header.norm, rel=1e-3)
    return header


def resealed(text: bytes, body: bytes, signer: Signer) -> bytes:
    """A payload with any text for a header, padded and signed by a member who means harm."""
    return object_of(text, signer.sign(b"payload\n" + text).encode()) + body


def mutated_payloads(signer: Signer) -> Iterator[tuple[bytes, bool]]:
    """Changed payloads, and whether each was signed after the change."""
    rng = generator(1)
    header, body = payload_of()
    data, fields = PAYLOAD.seal(header, signer) + body, asdict(header)
    for example in range(NUM_EXAMPLES):
        if example % 2:
            changed, is_signed = mutated_bytes(data, rng), not signer.public
        else:
            if example % 4:
                wrong = mutated_json(fields, rng)
            else:
                value = rng.choice((rng.getrandbits(62), "ab" * 32, "", 0.5, 10**80))
                wrong = fields | {rng.choice(list(fields)): value}
            text = json.dumps(wrong, separators=(",", ":")).encode()
            text = mutated_bytes(text, rng) if rng.random() < 0.2 else text
            changed, is_signed = resealed(text, body, signer), True
        if changed != data:
            yield changed, is_signed


CLAIMS = {
    "loss": None,
    "fragment": 2,
    "tokens": 1,
    "steps": 1,
    "position": 0,
    "base_round": 0,
    "base": "0" * 16,
    "norms": (0.0,),
}
"""The fields that a member can fill as it likes, the norm within 0.1 %: the entry of the log shows them."""


@pytest.mark.parametrize("signed", [False, True])
def test_no_changed_payload_is_taken(signers, signed):
    signer = signers[0] if signed else Signer()
    header, body = payload_of()
    num_refused = num_tried = 0
    with memory.at_most(MOST_BYTES):
        for data, is_signed in mutated_payloads(signer):
            num_tried += 1
            try:
                other = taken(data, signer.public)
            except PayloadError as error:
                num_refused += 1
                assert "payloads/3/" in str(error) and "\n" not in str(error) and len(str(error)) < 1000, error
            else:
                assert is_signed and data.endswith(body), data[:600]
                assert replace(other, **CLAIMS) == replace(header, **CLAIMS) and other != header, other
    assert num_tried > 0.9 * NUM_EXAMPLES and num_refused > 0.8 * num_tried
    assert taken(PAYLOAD.seal(header, signer) + body, signer.public) == header


def test_no_payload_of_others_is_taken(signers):
    """Nothing that was changed by somebody without the replica's key."""
    ours, theirs = signers
    rng = generator(2)
    header, body = payload_of()
    for _ in range(min(NUM_EXAMPLES, 2000)):
        wrong = asdict(header) | {"tokens": rng.getrandbits(40)}
        text = json.dumps(wrong, separators=(",", ":")).encode()
        for signer in (theirs, Signer()):
            with pytest.raises(PayloadError, match=r"is forged|is not signed"):
                taken(resealed(text, body, signer), ours.public)


def mutated_snapshots(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Changed snapshots, and the bytes whose digest stands in the name: the true ones, or the changed."""
    rng = generator(3)
    length = int.from_bytes(content[:8], "little")
    fields = json.loads(content[8 : 8 + length])
    for example in range(NUM_EXAMPLES):
        if example % 2:
            changed = mutated_bytes(content, rng)
        else:
            text = json.dumps(mutated_json(fields, rng), separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            changed = len(text).to_bytes(8, "little") + text + content[8 + length :]
        if changed != content:
            yield changed, content if rng.random() < 0.1 else changed


def test_no_changed_snapshot_is_taken_but_for_other_finite_values():
    vectors = {name: torch.randn(N, generator=torch.Generator().manual_seed(4)) for name in ("outer", "velocity")}
    content = b"".join(seal_snapshot(vectors)[0])
    head = len(content) - 8 * N
    num_refused = num_tried = 0
    with memory.at_most(MOST_BYTES):
        for data, named in mutated_snapshots(content):
            num_tried += 1
            name = snapshot_name(2, 8, hashlib.sha256(named).hexdigest())
            try:
                ours = open_snapshot(data, name=name, num_elements=N)
            except SnapshotError as error:
                num_refused += 1
                assert "snapshots/2/8-" in str(error) and "\n" not in str(error) and len(str(error)) < 1000, error
            else:
                # The author of the log's entry can name any values, and an engine checks the vectors' names.
                if ours.keys() != vectors.keys():
                    num_refused += 1
                    continue
                assert data[:head] == content[:head] and len(data) == len(content) and named is data
                assert all(vector.isfinite().all() for vector in ours.values())
    assert num_tried > 0.9 * NUM_EXAMPLES and num_refused > 0.7 * num_tried
