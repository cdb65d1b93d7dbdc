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

from diloco.errors import PayloadError
from diloco.rendezvous.contract import Form
from diloco.rendezvous.log.keys import KeyFile, NoKeys, write_key
from diloco.rendezvous.objects import (
    MOST_HEAD_BYTES,
    Header,
    body_tensor,
    check_header,
    contribution,
    norm_of,
    open_payload,
    payload_name,
    seal_payload,
    verified,
)
from diloco.wire import Key, codec
from diloco.wire.payload import checksum

RUN, N = "ab" * 32, 1000
KEY = Key(5, fragment=2, round=8, replica=3)
CODEC = codec("e3m0")
FORM = Form(codec=CODEC, sizes=(1, 1, N), seed=5)


def payload_of(delta_N, signer=NoKeys(), **fields) -> tuple[bytes, Header]:  # noqa: B008
    """A payload object of replica 3, with some fields of its header replaced."""
    payload = CODEC.encode(delta_N, KEY, base=17)
    body = payload.numpy().tobytes()
    header = Header(
        run=RUN,
        replica=3,
        seq=41,
        fragment=2,
        base_round=7,
        base=f"{17:016x}",
        tokens=4096,
        steps=30,
        position=123_456,
        wire=CODEC.format,
        num_elements=len(delta_N),
        num_bytes=len(body),
        norms=(norm_of(CODEC.decode(payload, len(delta_N), KEY)),),
        sha256=(hashlib.sha256(body).hexdigest(),),
    )
    header = replace(header, **fields)
    return seal_payload(header, signer) + body, header


@pytest.fixture(scope="module")
def delta_N():  # noqa: N802
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def signers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for name in "ab":
        write_key(folder / name)
    return KeyFile(folder / "a"), KeyFile(folder / "b")


def read(data, public="", name=payload_name(3, 41), run=RUN):  # noqa: B008
    return open_payload(data, name=name, run=run, public=public)


def taken(header, body, form=FORM):
    check_header(header, form=form, fragment=2, replica=3)
    return verified(header, body_tensor(body), form=form)


def test_a_payload_reads_back_with_and_without_keys(delta_N, signers):
    for signer in (NoKeys(), signers[0]):
        data, header = payload_of(delta_N, signer)
        again, body = read(obstore.Bytes(data), signer.public)
        assert again == header and header.name == "payloads/3/00000041"
        start = len(data) - len(body)
        assert start % 64 == 0 and start <= MOST_HEAD_BYTES
        assert data[:4] == b"DLP1" and int.from_bytes(data[4:8], "little") == start - 72
        assert json.loads(data[72:start])["norms"] == [header.norm]
        norm = taken(again, body)
        assert norm == header.norm == pytest.approx(float(CODEC.decode(body_tensor(body), N, KEY).norm()))


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
    counted = contribution(header)
    length = int.from_bytes(data[4:8], "little")
    assert counted.sha256 == hashlib.sha256(data[72 : 72 + length]).hexdigest()
    assert (counted.replica, counted.seq, counted.tokens, counted.norm) == (3, 41, 4096, header.norm)
    others = [
        replace(header, **change) for change in ({"fragment": 1}, {"sha256": ("0" * 64,)}, {"run": "0" * 64})
    ]
    assert len({counted.sha256, *(contribution(other).sha256 for other in others)}) == 4


def test_a_payload_of_another_key_replica_or_run_is_refused(delta_N, signers):
    ours, theirs = signers
    data, header = payload_of(delta_N, ours)
    for content, options, reason in [
        (payload_of(delta_N, theirs)[0], {}, "is forged: its signature is not that of the key"),
        (payload_of(delta_N)[0], {}, "is not signed"),
        (data, {"public": ""}, "is signed, in a run without keys"),
        (data, {"name": payload_name(3, 42)}, "it is the payload payloads/3/00000041, put in another's place"),
        (data, {"name": payload_name(4, 41)}, "it is the payload payloads/3/00000041, put in another's place"),
        (data, {"run": "cd" * 32}, "it is of another run, abababab, and this is cdcdcdcd"),
        # A header that is right in all but one field, with the signature of the true one.
        (
            data[:72] + seal_payload(replace(header, tokens=9999), ours)[72:] + data[-header.num_bytes :],
            {},
            "is forged",
        ),
    ]:
        with pytest.raises(PayloadError, match=reason) as refusal:
            read(content, **{"public": ours.public} | options)
        assert options.get("name", payload_name(3, 41)) in str(refusal.value)


def test_a_payload_that_was_cut_extended_or_changed_is_refused(delta_N):
    data, header = payload_of(delta_N)
    start = len(data) - header.num_bytes
    damaged = bytearray(data)
    damaged[-5] ^= 4
    for content, reason in [
        (data[:-1], "its body should have 536 bytes, and has 535"),
        (data + b"\0", "its body should have 536 bytes, and has 537"),
        (damaged, "its body does not match the SHA-256"),
        (b"", "it does not begin as one"),
        (data[:71], "it does not begin as one"),
        (b"DLP2" + data[4:], "it does not begin as one"),
        (data[:100], "cut short, or too long"),
        (data[:4] + b"\xff" * 4 + data[8:], "its header of 4,294,967,295 bytes"),
        (data[:4] + (start - 73).to_bytes(4, "little") + data[8:], "not in the form"),
        (
            data[:4] + (start - 8).to_bytes(4, "little") + data[8:start] + b" " * 64 + data[start:],
            "not in the form",
        ),
        (data.replace(b'"tokens":4096', b'"tokens":-496'), "tokens: expected int >= 1"),
        (data.replace(b'"seq":41', b'"seq": 1'), "not in the form"),
        (data.replace(b'"seq":41', b'"sek":41'), "can't be read"),
        (data.replace(b'"e3m0', b'"\\n m'), "wire: expected str matching"),
    ]:
        assert content != data
        with pytest.raises(PayloadError, match=reason) as refusal:
            read(content)
        assert payload_name(3, 41) in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fragment": 1}, "has fragment 1, where 2 is expected"),
        ({"replica": 4}, "has replica 4, where 3 is expected"),
        ({"wire": "fp32"}, "has wire fp32, where e3m0:block=256 is expected"),
        ({"num_elements": N + 1}, "has num_elements 1001, where 1000 is expected"),
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
        again, body = read(seal_payload(header, NoKeys()) + payload.tobytes())
        with pytest.raises(PayloadError, match="payload payloads/3/00000041"):
            taken(again, body, replace(FORM, codec=wire))


def test_a_body_of_rubbish_is_refused_by_the_codec(delta_N):
    rubbish = bytes(range(256)) * 3
    data = payload_of(delta_N, num_bytes=len(rubbish), sha256=(hashlib.sha256(rubbish).hexdigest(),))[1]
    again, body = read(seal_payload(data, NoKeys()) + rubbish)
    with pytest.raises(PayloadError, match="payload payloads/3/00000041: a payload of 1000 elements in e3m0"):
        verified(again, body_tensor(body), form=FORM)
    with pytest.raises(PayloadError, match="has num_bytes 768, where 536 is expected"):
        taken(again, body)


def test_a_scratch_vector_is_used_and_holds_the_values(delta_N):
    again, body = read(payload_of(delta_N)[0])
    scratch_N = torch.full((N,), math.nan)
    verified(again, body_tensor(body), form=FORM, scratch_N=scratch_N)
    assert torch.equal(scratch_N, CODEC.decode(body_tensor(body), N, KEY))


def test_the_largest_finite_values_have_a_finite_norm():
    assert norm_of(torch.full((4,), 3e38)) == pytest.approx(6e38)
    assert norm_of(torch.zeros(0)) == 0 and math.isnan(norm_of(torch.tensor([math.nan, 1.0])))


def test_a_round_that_no_codec_can_draw_numbers_for_is_refused(delta_N):
    """The next round, 2**32, is beyond a codec's key."""
    data, _ = payload_of(delta_N, base_round=2**32 - 1)
    with pytest.raises(PayloadError, match="base_round"):
        read(data)
    data, header = payload_of(delta_N, base_round=2**32 - 2)
    assert read(data)[0] == header
