"""Shares and averages that were changed, or made by somebody who means harm: refused, in bounded memory.

pytest tests/hostile/test_shares.py --hostile-examples 100000    # of each kind, some minutes
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from tests import memory
from tests.hostile.mutations import mutated_bytes, mutated_json
from tests.rendezvous.shares import CutStep, N, R
from tests.rendezvous.test_entries import object_of
from tests.wire import reference as wire_reference
from torch import Tensor

from diloco.errors import PayloadError
from diloco.files import sha256
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.objects import (
    AVERAGE,
    PAYLOAD,
    AverageHeader,
    Header,
    body_tensor,
    check_header,
    check_share,
    checked_values,
    open_payload,
)

NUM_EXAMPLES = settings.get_profile("hostile").max_examples
MOST_BYTES = 4 << 20
"""Python's memory at any time while mutations are read."""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> CutStep:
    folder = tmp_path_factory.mktemp("keys")
    return CutStep(second="fp32", signers=[key_in(folder, name) for name in "ab"])


def key_in(folder: Path, name: str) -> Signer:
    write_key(folder / name)
    return Signer.of_file(folder / name)


def taken(step: CutStep, header: Header, share: int, data: bytes) -> Tensor:
    """A share after all checks of the replica that averages it."""
    check_share(header, share, data)
    payload = body_tensor(memoryview(data))
    checked_values(header, payload, step.form, share)
    return payload


def test_no_changed_share_is_taken(step: CutStep) -> None:
    rng, header = random.Random(1), step.headers[0]
    with memory.at_most(MOST_BYTES):
        for _ in range(NUM_EXAMPLES):
            share = rng.randrange(R)
            data = step.sent[0][share].numpy().tobytes()
            if (changed := mutated_bytes(data, rng)) != data:
                with pytest.raises(
                    PayloadError, match=f"payload payloads/0/00000001-{share} can't be used: its body"
                ):
                    taken(step, header, share, changed)
    assert torch.equal(taken(step, header, 0, step.sent[0][0].numpy().tobytes()), step.sent[0][0])


def test_a_share_in_the_place_of_another_is_not_taken(step: CutStep) -> None:
    """Neither of another share, nor of another replica."""
    for data in (step.sent[0][2], step.sent[1][1]):
        with pytest.raises(PayloadError, match="its body does not match the SHA-256 in its header"):
            taken(step, step.headers[0], 1, data.numpy().tobytes())


LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another codec": (lambda data: b"DLC4" + bytes(4) + data[8:], "by another codec"),
    "another length": (lambda data: data[:8] + (76).to_bytes(8, "little") + data[16:], "for 76 elements"),
    "another base": (
        lambda data: data[:16] + (18).to_bytes(8, "little") + data[24:],
        "does not match its checksum",
    ),
    "rubbish": (lambda data: bytes(range(len(data))), "made by|cut short, or damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_member_that_lies_in_a_share_is_found_by_the_one_that_averages_it(lie: str, step: CutStep) -> None:
    """The header names the digest of what lies in the store."""
    change, reason = LIES[lie]
    data = change(step.sent[0][1].numpy().tobytes())
    digests = list(step.headers[0].sha256)
    digests[1] = sha256(data)
    with pytest.raises(PayloadError, match=f"payload payloads/0/00000001-1.*({reason})"):
        taken(step, replace(step.headers[0], sha256=tuple(digests)), 1, data)


def test_a_norm_of_a_share_that_pleases_the_log_is_found_by_the_one_that_averages_it(step: CutStep) -> None:
    header = replace(step.headers[0], norms=(1e-3,) * R)
    assert header.contribution().norm < 1e-2
    with pytest.raises(
        PayloadError, match=r"payload payloads/0/00000001-3 has the norm .*, and its header says 0.001"
    ):
        taken(step, header, 3, step.sent[0][3].numpy().tobytes())


def test_a_share_that_holds_nan_is_found_by_the_one_that_averages_it() -> None:
    step = CutStep(wire="fp32")
    sound = step.sent[0][1].numpy().tobytes()
    data = wire_reference.sealed(sound[:24], sound[32:-4] + np.float32(np.nan).tobytes())
    digests = (*step.headers[0].sha256[:1], sha256(data), *step.headers[0].sha256[2:])
    with pytest.raises(PayloadError, match=r"payload payloads/0/00000001-1.*(NaN|not finite)"):
        taken(step, replace(step.headers[0], sha256=digests), 1, data)


HEADERS = {
    "fewer digests": ({"sha256": ("ab" * 32,)}, "4 norms and 1 digests"),
    "no shares": ({"norms": (), "sha256": ()}, "norms: expected array of length >= 1"),
    "many shares": ({"norms": (1.0,) * 1025, "sha256": ("ab" * 32,) * 1025}, "expected array of length <= 1024"),
    "a norm of many large ones": ({"norms": (9e32,) * R}, "the norm of all shares is 1.8e.33, more than 1e.33"),
}


@pytest.mark.parametrize("wrong", HEADERS)
def test_a_header_that_no_entry_could_count_is_refused(wrong: str, step: CutStep) -> None:
    fields, reason = HEADERS[wrong]
    text = json.dumps(asdict(step.headers[0]) | fields, separators=(",", ":")).encode()
    data = resealed(text, b"", step.signers[0], b"payload")
    with pytest.raises(PayloadError, match=f"payload payloads/0/00000001.*{reason}"):
        opened(step, data)


def opened(step: CutStep, data: bytes) -> Header:
    """A header as a replica that decides reads it."""
    public = step.signers[0].public
    header, _ = open_payload(data, name="payloads/0/00000001", run=step.state.run, public=public)
    check_header(header, step.form)
    return header


def test_a_header_of_another_cut_is_refused(step: CutStep) -> None:
    header = step.headers[0]
    assert opened(step, PAYLOAD.seal(header, step.signers[0])) == header
    for fields, reason in [
        ({"norms": (1.0,) * 5, "sha256": ("ab" * 32,) * 5}, "has num_shares 5, where 4 is expected"),
        ({"num_bytes": 1 << 40}, "has num_bytes 1099511627776, where"),
        ({"num_elements": N - 1}, "has num_elements 299, where 300 is expected"),
    ]:
        with pytest.raises(PayloadError, match=reason):
            opened(step, PAYLOAD.seal(replace(header, **fields), step.signers[0]))
    with pytest.raises(PayloadError, match="it has a body of 3 bytes"):
        opened(step, PAYLOAD.seal(header, step.signers[0]) + b"abc")


def resealed(text: bytes, body: bytes, signer: Signer, word: bytes) -> bytes:
    """An object with any text for a header, padded and signed by a member who means harm."""
    return object_of(text, signer.sign(word + b"\n" + text).encode()) + body


def mutated_averages(step: CutStep) -> Iterator[tuple[bytes, bool]]:
    """Changed averages of share 1 by replica 0, and whether it has signed the change."""
    rng, (header, payload) = random.Random(2), step.made(1)
    body, data = payload.numpy().tobytes(), step.sealed(header, payload)
    for example in range(NUM_EXAMPLES):
        if example % 2:
            changed, is_signed = mutated_bytes(data, rng), False
        else:
            text = json.dumps(mutated_json(asdict(header), rng), separators=(",", ":")).encode()
            text = mutated_bytes(text, rng) if rng.random() < 0.2 else text
            changed, is_signed = resealed(text, body, step.signers[0], b"average"), True
        if changed != data:
            yield changed, is_signed


def test_no_changed_average_is_taken_but_for_other_claims(step: CutStep) -> None:
    """A member can claim to have left somebody out, and a norm within 0.1 %: a replay finds out."""
    header, payload = step.made(1)
    num_refused = num_tried = 0
    with memory.at_most(MOST_BYTES):
        for data, is_signed in mutated_averages(step):
            num_tried += 1
            try:
                other, body = step.opened(data, 1)
            except PayloadError as error:
                num_refused += 1
                text = str(error)
                assert "average averages/0000000003/1" in text and "\n" not in text and len(text) < 1000, error
            else:
                assert is_signed and torch.equal(body.data, payload)
                claims: AverageHeader = replace(other, left_out=header.left_out, norm=header.norm)
                assert claims == header != other
    assert num_tried > 0.9 * NUM_EXAMPLES and num_refused > 0.8 * num_tried


def test_an_average_of_another_kind_signer_or_share_is_not_taken(step: CutStep) -> None:
    header, payload = step.made(1)
    body, text = payload.numpy().tobytes(), AVERAGE.line(header)
    for data, reason in [
        (resealed(text, body, step.signers[0], b"payload"), "is forged"),
        (resealed(text, body, step.signers[1], b"average"), "is forged"),
        (resealed(text, body, Signer(), b"average"), "is not signed"),
        (PAYLOAD.seal(step.headers[0], step.signers[0]), "can't be read"),
        (step.sealed(*step.made(0)), "it has share 0, where 1 is expected"),
    ]:
        with pytest.raises(PayloadError, match=f"average averages/0000000003/1 .*{reason}"):
            step.opened(data, 1)
    assert step.opened(resealed(text, body, step.signers[0], b"average"), 1)[0] == header
