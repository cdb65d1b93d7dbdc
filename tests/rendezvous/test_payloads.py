"""Payload objects: read back without a copy, and refused where anything is not as their replica sealed it."""

import gc
import hashlib
import json
import math
import warnings
from dataclasses import replace

import numpy as np
import obstore
import pytest
import torch
from tests.rendezvous.cases import RUN, header_of
from tests.rendezvous.test_entries import object_of

from diloco.errors import PayloadError
from diloco.rendezvous.contract import Form
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.objects import (
    PAYLOAD,
    Header,
    body_tensor,
    check_header,
    checked_values,
    norm_of,
    open_payload,
)
from diloco.wire import Key, codec
from diloco.wire.payload import checksum

N = 1000
KEY = Key(5, fragment=2, round=8, replica=3)
CODEC = codec("e3m0")
FORM = Form(codec=CODEC, sizes=(1, 1, N), seed=5)
NAME = "payloads/3/00000041"


def payload_of(delta_N, signer=Signer(), **fields) -> tuple[bytes, Header]:  # noqa: B008
    """A payload object of replica 3, with some fields of its header replaced."""
    payload = CODEC.encode(delta_N, KEY, base=17)
    body = payload.numpy().tobytes()
    norm = norm_of(CODEC.decode(payload, len(delta_N), KEY))
    header = header_of(CODEC, len(delta_N), [body], [norm], **({"base": f"{17:016x}"} | fields))
    return PAYLOAD.seal(header, signer) + body, header


@pytest.fixture(scope="module")
def delta_N():  # noqa: N802
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def signers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for name in "ab":
        write_key(folder / name)
    return Signer.of_file(folder / "a"), Signer.of_file(folder / "b")


def read(data, public="", name=NAME, run=RUN):
    return open_payload(data, name=name, run=run, public=public)


def taken(header, body, form=FORM):
    check_header(header, form)
    return checked_values(header, body_tensor(body), form)


def test_a_payload_reads_back_with_and_without_keys(delta_N, signers):
    for signer in (Signer(), signers[0]):
        data, header = payload_of(delta_N, signer)
        again, body = read(obstore.Bytes(data), signer.public)
        assert again == header and header.name == NAME
        assert (len(data) - len(body)) % 64 == 0
        assert json.loads(data.split(b"\n")[0])["norms"] == [header.norm]
        assert torch.equal(taken(again, body), CODEC.decode(body_tensor(body), N, KEY))


def test_the_body_is_not_copied_and_keeps_its_memory(delta_N):
    data = obstore.Bytes(payload_of(delta_N)[0])
    address = np.frombuffer(data, np.uint8).ctypes.data
    _, body = read(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = body_tensor(body)
    assert body.readonly and tensor.data_ptr() == address + len(data) - len(body)
    expected = torch.tensor(list(body), dtype=torch.uint8)
    del data, body
    gc.collect()
    assert torch.equal(tensor, expected)
    assert body_tensor(memoryview(b"")).numel() == 0


def test_the_digest_of_a_contribution_stands_for_header_and_body(delta_N):
    data, header = payload_of(delta_N)
    counted = header.contribution()
    assert counted.sha256 == hashlib.sha256(data.split(b"\n")[0]).hexdigest()
    assert (counted.replica, counted.seq, counted.tokens, counted.norm) == (3, 41, 4096, header.norm)
    others = [
        replace(header, **change) for change in ({"fragment": 1}, {"sha256": ("0" * 64,)}, {"run": "0" * 64})
    ]
    assert len({counted.sha256, *(other.contribution().sha256 for other in others)}) == 4


def forged(delta_N, ours, theirs):
    """Objects in the place of a payload with the key `ours`, how they are read, and why they are refused."""
    data, header = payload_of(delta_N, ours)
    _, mark, body = data.split(b"\n", 2)
    other_line = PAYLOAD.line(replace(header, tokens=9999))
    yield payload_of(delta_N, theirs)[0], {}, "is forged: its signature is not that of the key"
    yield payload_of(delta_N)[0], {}, "is not signed"
    yield data, {"public": ""}, "is signed, in a run without keys"
    for name in ("payloads/3/00000042", "payloads/4/00000041"):
        yield data, {"name": name}, f"it is the payload {NAME}, put in another's place"
    yield data, {"run": "cd" * 32}, "it is of another run, abababab, and this is cdcdcdcd"
    # A header that is right in all but one field, with the signature of the true one.
    yield object_of(other_line, mark.rstrip()) + body, {}, "is forged"


def damaged(delta_N):
    """Objects without keys that are not as they were sealed, and why they are refused."""
    data, _ = payload_of(delta_N)
    line, mark, body = data.split(b"\n", 2)
    yield data[:-1], "its body should have 536 bytes, and has 535"
    yield data + b"\0", "its body should have 536 bytes, and has 537"
    yield data[:-5] + bytes([data[-5] ^ 4]) + data[-4:], "its body does not match the SHA-256"
    for cut in (b"", data[:71], line, line + b"\n" + mark):
        yield cut, "cut short"
    yield line + b"\n" + mark + b" " * 64 + b"\n" + body, "not in the form"
    yield line + b"\n\n" + body, "not in the form"
    for old, new, reason in [
        (b'"tokens":4096', b'"tokens":-496', "tokens: expected int >= 1"),
        (b'"seq":41', b'"seq": 1', "not in the form"),
        (b'"seq":41', b'"sek":41', "can't be read"),
        (b'"loss":null', b'"loss":1e7', "loss: expected float <= 1000000"),
        (b'"loss":null', b'"loss":1e999', "can't be read"),
        (b'"loss":null', b'"loss":NaN', "can't be read"),
        (b'"e3m0', b'"\\n m', "wire: expected str matching"),
    ]:
        assert old in line
        yield object_of(line.replace(old, new)) + body, reason
    # The next round, 2**32, is beyond a codec's key.
    yield payload_of(delta_N, base_round=2**32 - 1)[0], "base_round"


def test_what_is_not_as_its_replica_sealed_it_is_refused(delta_N, signers):
    ours, theirs = signers
    keyed = {"public": ours.public}
    wrong = [(data, keyed | options, reason) for data, options, reason in forged(delta_N, ours, theirs)]
    wrong += [(data, {}, reason) for data, reason in damaged(delta_N)]
    for data, options, reason in wrong:
        with pytest.raises(PayloadError, match=reason) as refusal:
            read(data, **options)
        assert options.get("name", NAME) in str(refusal.value)
    data, header = payload_of(delta_N, base_round=2**32 - 2)
    assert read(data)[0] == header


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fragment": 1}, "can't be used: it has num_elements 1000, where 1 is expected"),
        ({"fragment": 3}, "can't be used: it is of fragment 3, and there are 3"),
        ({"wire": "fp32"}, "can't be used: it has wire fp32, where e3m0:block=256 is"),
        ({"num_elements": N + 1}, "can't be used: it has num_elements 1001, where 1000 is"),
        ({"base": f"{18:016x}"}, "was taken against the outer parameters 0000000000000011"),
        ({"norms": (1e6,)}, "has the norm .*, and its header says 1e"),
        ({"norms": (0.0,)}, "has the norm .*, and its header says 0"),
    ],
)
def test_a_header_that_lies_about_its_body_is_refused(delta_N, fields, reason):
    data, header = payload_of(delta_N, **fields)
    again, body = read(data, name=header.name)
    with pytest.raises(PayloadError, match=rf"payload payloads/{header.replica}/00000041 {reason}"):
        taken(again, body)


def test_values_that_are_not_finite_are_refused_though_all_checksums_are_right(delta_N):
    wire = codec("fp32")
    for value in (math.nan, math.inf):
        payload = wire.encode(delta_N, KEY).numpy()
        payload[-4:] = np.frombuffer(np.float32(value).tobytes(), np.uint8)
        payload[24:32] = np.frombuffer(
            checksum(bytes(payload[:24]), torch.from_numpy(payload[32:])).to_bytes(8, "little"), np.uint8
        )
        sha256 = (hashlib.sha256(payload).hexdigest(),)
        header = payload_of(delta_N, wire="fp32", num_bytes=len(payload), sha256=sha256)[1]
        again, body = read(PAYLOAD.seal(header, Signer()) + payload.tobytes())
        with pytest.raises(PayloadError, match=f"payload {NAME}"):
            taken(again, body, replace(FORM, codec=wire))


def test_a_body_of_rubbish_is_refused_by_the_codec(delta_N):
    rubbish = bytes(range(256)) * 3
    data = payload_of(delta_N, num_bytes=len(rubbish), sha256=(hashlib.sha256(rubbish).hexdigest(),))[1]
    again, body = read(PAYLOAD.seal(data, Signer()) + rubbish)
    with pytest.raises(PayloadError, match=f"payload {NAME}: a payload of 1000 elements in e3m0"):
        checked_values(again, body_tensor(body), FORM)
    with pytest.raises(PayloadError, match="has num_bytes 768, where 536 is expected"):
        taken(again, body)


def test_the_largest_finite_values_have_a_finite_norm():
    assert norm_of(torch.full((4,), 3e38)) == pytest.approx(6e38)
    assert norm_of(torch.zeros(0)) == 0 and math.isnan(norm_of(torch.tensor([math.nan, 1.0])))
