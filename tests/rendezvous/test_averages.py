"""The average of a share: its value, and what is refused in its place."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.rendezvous.shares import SEED, CutStep, N, R
from tests.wire import reference as wire_reference

from diloco.errors import PayloadError
from diloco.outer.averages import add_up
from diloco.outer.cohort import Cohort
from diloco.rendezvous.contract import Content, Decision, Form, Payload
from diloco.rendezvous.log.entries import MOST_NORM, MOST_REPLICAS
from diloco.rendezvous.log.keys import Signer, write_key
from diloco.rendezvous.objects import AVERAGE, PAYLOAD, average_of, decided_average
from diloco.wire import Key, codec
from diloco.wire.payload import checksum

f32 = np.float32
S = N // R


@pytest.fixture(scope="module")
def step() -> CutStep:
    return CutStep()


@pytest.mark.parametrize("members", [(0, 1), (1,), ()])
@pytest.mark.parametrize("second", ["bf16", "int4:stochastic=true"])
def test_an_average_is_its_definition_over_the_members_that_are_sound(members, second) -> None:
    step = CutStep(second=second)
    for share in range(R):
        header, payload = step.made(share, members=members)
        total, weight = np.zeros(S, f32), sum(100 / 150 if m == 0 and 1 in members else 1.0 for m in members)
        for m in members:
            part = wire_reference.decode("e3m0", step.sent[m][share].numpy().tobytes(), S, (SEED, 1, 1, m, share))
            total = total + f32(100 / 150 if m == 0 and 1 in members else 1) * part
        expected = total / f32(weight) if members else total
        key = (SEED, 1, 1, 2, share)
        assert payload.numpy().tobytes() == wire_reference.encode(second, expected, key)
        assert header.left_out == tuple(m for m in (0, 1) if m not in members)
        again, opened = step.opened(step.sealed(header, payload), share)
        assert again == header and torch.equal(opened.data, payload)
        assert torch.equal(opened.values, step.form.second.decode(payload, S, Key(*key)))


@pytest.mark.parametrize("unsound", [(0,), (1,), (0, 1)])
def test_a_share_that_is_not_sound_is_left_out_with_its_weight(step, unsound) -> None:
    shares = {m: (step.headers[m], step.sent[m][2]) for m in (0, 1)}
    lies = {m: (replace(step.headers[m], norms=(9.0,) * R), step.sent[m][2]) for m in unsound}
    made = average_of(step.state, step.form, step.body, 2, shares | lies)
    assert torch.equal(made.payload, step.made(2, members=sorted({0, 1} - set(unsound)))[1])
    assert made.unsound.keys() == set(unsound) and all("its header says 9" in x for x in made.unsound.values())


@pytest.mark.parametrize("second", ["e3m0", "bf16"])
def test_the_largest_norms_that_an_entry_may_count_have_a_finite_average(second) -> None:
    """Several members have all of their norm in the same element, and everybody takes the average."""
    assert torch.finfo(torch.float32).max > 1.001 * MOST_NORM * MOST_REPLICAS
    step = CutStep("fp32", second)
    parts = tuple(
        replace(step.body.contributions[0], replica=member, seq=member, norm=MOST_NORM) for member in range(5)
    )
    step.body = replace(step.body, contributions=parts)
    step.ref = replace(step.ref, body=step.body)
    share_S = torch.zeros(S)
    share_S[3] = MOST_NORM
    step.sent = [(step.form.codec.encode(share_S),)] * 5
    step.headers = [
        replace(step.headers[0], replica=member, seq=member, base="0" * 16, norms=(MOST_NORM, 0.0, 0.0, 0.0))
        for member in range(5)
    ]
    header, payload = step.made(0, members=range(5))
    header = replace(header, left_out=())
    assert (header.norm > 1.2 * MOST_NORM) == (second == "e3m0"), "the second codec rounds it up"
    assert step.opened(step.sealed(header, payload), 0)[0] == header


@pytest.mark.parametrize(
    "wire", ["fp32", "fp16", "e3m0", "int4:stochastic=true", "topk:density=0.1", "sparseloco", "dare:density=0.5"]
)
def test_a_sum_has_the_same_bits_whether_values_are_known_or_decoded(wire) -> None:
    form = Form(codec=codec(wire), sizes=(3000,), seed=SEED)
    generator, keys = torch.Generator().manual_seed(1), [form.key(0, 2, m) for m in range(3)]
    sent = {m: form.codec.encode(torch.randn(3000, generator=generator), keys[m]) for m in range(3)}
    values = {m: form.codec.decode(payload, 3000, keys[m]) for m, payload in sent.items()}
    for cohort in (Cohort.equal(3), Cohort.weighted({0: 100, 1: 70, 2: 30})):
        decoded_N = add_up(form.codec, sent, torch.empty(3000), keys, cohort)[0]
        for known in (values, {1: values[1]}):
            assert torch.equal(add_up(form.codec, sent, torch.empty(3000), keys, cohort, known)[0], decoded_N)
            assert torch.equal(values[1], form.codec.decode(sent[1], 3000, keys[1])), "values are read alone"


def test_averages_join_to_the_average_of_the_fragment(step) -> None:
    payloads = [Payload(step.made(share)[1]) for share in range(R)]
    values = [codec("bf16").decode(payload.data, S) for payload in payloads]
    for known in (None, values[1]):
        payloads[1].values = known
        content = Content(averages=tuple(payloads), bytes_received=0)
        decision = Decision.of(step.ref, step.state, content)
        total_N, weight, _ = decided_average(step.form, decision, content, torch.empty(N))
        assert weight == 1 and torch.equal(total_N, torch.cat(values))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"run": "cd" * 32}, "it has run cdcdcdcd"),
        ({"entry": 4}, "it has entry 4, where 3 is expected"),
        ({"share": 2}, "it has share 2, where 1 is expected"),
        ({"replica": 2}, "it is by replica 2, which is not in the outer step"),
        ({"replica": 99}, "it is by replica 99, which is not in the outer step"),
        ({"left_out": (1, 0)}, r"it has left_out \(1, 0\), where \(0, 1\) is expected"),
        ({"left_out": (0, 7)}, r"it has left_out \(0, 7\), where \(0,\) is expected"),
        ({"wire": "fp16"}, "it has wire fp16, where bf16 is expected"),
        ({"num_elements": S + 1}, f"it has num_elements {S + 1}, where {S} is expected"),
        ({"num_bytes": 1}, "it has num_bytes 1, where 182 is expected"),
        ({"sha256": "0" * 64}, "its body does not match its header"),
        ({"norm": 1.0}, "has the norm .*, and its header says 1"),
    ],
)
def test_an_average_of_another_place_is_refused(step, fields, reason) -> None:
    header, payload = step.made(1)
    wrong = replace(header, **fields)
    data = AVERAGE.seal(wrong, step.signers[0]) + payload.numpy().tobytes()
    with pytest.raises(PayloadError, match=f"average averages/0000000003/1 .*{reason}"):
        step.opened(data, 1)


def test_an_average_that_was_cut_extended_or_changed_is_refused(step) -> None:
    data = step.sealed(*step.made(1))
    payload_object = PAYLOAD.seal(step.headers[0], Signer())
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    for wrong in (data[:-1], data + b"\0", flipped, data[:60], b"", payload_object):
        with pytest.raises(PayloadError, match="average averages/0000000003/1 can't be"):
            step.opened(wrong, 1)


def resealed(step: CutStep, values: torch.Tensor) -> bytes:
    """An average of any values whose digests, checksums and norm are right."""
    header, payload = step.made(1)
    body = payload.clone()
    body[32:] = values.bfloat16().view(torch.uint8)
    body[24:32] = torch.frombuffer(
        bytearray(checksum(body[:24].numpy().tobytes(), body[32:]).to_bytes(8, "little")), dtype=torch.uint8
    )
    norm = values.bfloat16().double().norm().item()
    header = replace(
        header,
        sha256=hashlib.sha256(body.numpy().data).hexdigest(),
        norm=norm if math.isfinite(norm) else header.norm,
    )
    return step.sealed(header, body)


def test_values_that_the_members_can_not_have_made_are_refused(step) -> None:
    step.opened(resealed(step, torch.ones(S)), 1)  # a lie that only a replay finds
    with pytest.raises(PayloadError, match=r"its norm is 8.6\d*e\+06, more than"):
        step.opened(resealed(step, torch.full((S,), 1e6)), 1)
    for value in (math.nan, math.inf):
        with pytest.raises(PayloadError, match="average averages/0000000003/1"):
            step.opened(resealed(step, torch.full((S,), value)), 1)


def test_an_average_is_signed_by_the_member_who_made_it(tmp_path) -> None:
    for name in "abc":
        write_key(tmp_path / name)
    keys = {name: Signer.of_file(tmp_path / name) for name in "abc"}
    step = CutStep(signers=[keys["a"], keys["b"]])
    for author in (0, 1):
        header, payload = step.made(2, by=author)
        assert step.opened(step.sealed(header, payload), 2)[0].replica == author
        for forger in (keys["c"], keys["ba"[author]]):
            data = AVERAGE.seal(header, forger) + payload.numpy().tobytes()
            with pytest.raises(PayloadError, match="average averages/0000000003/2 is forged"):
                step.opened(data, 2)
