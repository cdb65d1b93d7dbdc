"""Shares of a vector: cut, encoded, joined; what is averaged share by share is what is averaged whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import PayloadError
from diloco.outer.averages import add_up, cut, encode_shares, join_shares, key_of_average, share_size
from diloco.outer.cohort import Cohort
from diloco.wire import Key, codec


@given(num_elements=st.integers(0, 40), num_shares=st.integers(1, 12))
def test_shares_are_a_partition_filled_up_with_zeros(num_elements, num_shares):
    vector_N = torch.arange(1.0, 1 + num_elements)
    shares = cut(vector_N, num_shares)
    assert [len(share_S) for share_S in shares] == [share_size(num_elements, num_shares)] * num_shares
    joined = torch.cat(shares)
    assert torch.equal(joined[:num_elements], vector_N) and not joined[num_elements:].any()


@settings(max_examples=40)
@given(num_elements=st.integers(1, 40), num_shares=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_the_average_of_shares_is_the_average_of_the_whole(num_elements, num_shares, seed):
    """In fp32, any number of shares, and any members."""
    generator, wire = torch.Generator().manual_seed(seed), codec("fp32")
    cohort = Cohort.weighted({3: 70, 9: 300, 11: 1000})
    keys = [Key(0, 0, 1, member) for member in cohort.members]
    deltas = [torch.randn(num_elements, generator=generator) for _ in keys]
    whole = {key.replica: wire.encode(delta, key) for key, delta in zip(keys, deltas, strict=True)}
    expected = add_up(wire, whole, torch.empty(num_elements), keys, cohort).divided()
    sent = {key.replica: encode_shares(wire, x, num_shares, key) for key, x in zip(keys, deltas, strict=True)}
    size, averages = share_size(num_elements, num_shares), []
    for part in range(num_shares):
        several = {member: payloads[part] for member, payloads in sent.items()}
        parts = [key._replace(part=part) for key in keys]
        average = add_up(wire, several, torch.empty(size), parts, cohort)
        averages.append(wire.encode(average.divided(), key_of_average(parts[0], cohort)))
    assert torch.equal(join_shares(wire, averages, torch.empty(num_elements), Key()), expected)


def test_each_share_draws_other_numbers_and_a_damaged_one_is_named():
    wire, key = codec("int4:stochastic=true"), Key(1, 2, 3, 4)
    delta_N = torch.randn(70).repeat(3)
    payloads = encode_shares(wire, delta_N, 3, key)
    assert len({tuple(payload[32:].tolist()) for payload in payloads}) == 3
    joined = join_shares(wire, payloads, torch.empty(210), key)
    expected = [wire.decode(payload, 70, key._replace(part=part)) for part, payload in enumerate(payloads)]
    assert torch.equal(joined, torch.cat(expected))
    with pytest.raises(PayloadError, match="replica 8: a payload of"):
        join_shares(wire, [payloads[0], payloads[1][:-1], payloads[2]], torch.empty(210), key, senders=(7, 8, 9))
