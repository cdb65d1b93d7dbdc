import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import DisagreementError, ExchangeError, PayloadError
from diloco.outer.averages import Gather, ReduceScatter, reduction_of
from diloco.outer.cohort import Cohort
from diloco.wire import Key, codec
from diloco.wire.floats import FP32


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("gather", Gather(codec("e3m0"))),
        ("reduce_scatter", ReduceScatter(codec("e3m0"), codec("e3m0"))),
        ("reduce_scatter:bf16", ReduceScatter(codec("e3m0"), codec("bf16"))),
        ("reduce_scatter:e3m0:block=64", ReduceScatter(codec("e3m0"), codec("e3m0:block=64"))),
    ],
)
def test_reductions_are_known_by_name(spec, expected):
    reduction = reduction_of(spec, codec("e3m0"))
    assert reduction == expected and reduction_of(reduction.spec, codec("e3m0")) == reduction


@pytest.mark.parametrize(
    ("spec", "wire", "message"),
    [
        ("all_reduce", "e3m0", "combine='all_reduce' is neither gather nor reduce_scatter"),
        ("gather:bf16", "e3m0", "combine='gather:bf16' is neither"),
        ("reduce_scatter:fp8", "e3m0", "'fp8' is not a codec"),
        ("reduce_scatter", "dare", "name another codec for them"),
    ],
)
def test_reductions_that_do_not_exist_are_refused(spec, wire, message):
    with pytest.raises(ValueError, match=message):
        reduction_of(spec, codec(wire))


def averaged(spec: str, wire: str, deltas: dict[int, torch.Tensor], cohort: Cohort) -> torch.Tensor:
    """Δ as every member would compute it, without a network."""
    reduction = reduction_of(spec, codec(wire))
    num_elements = len(next(iter(deltas.values())))
    sent = {
        m: reduction.addressed(reduction.encode(delta, Key(0, 0, 1, m), cohort), cohort)
        for m, delta in deltas.items()
    }
    averages = []
    for m in deltas:
        received = {sender: payloads[m] for sender, payloads in sent.items()}
        if reduction.num_phases == 2:
            keys = {j: Key(0, 0, 1, j) for j in deltas}
            relayed = {j: {s: payloads[j] for s, payloads in sent.items()} for j in deltas}
            received = {j: reduction.relay(relayed[j], num_elements, keys[j], cohort) for j in deltas}
        key = Key(0, 0, 1, m)
        averages.append(reduction.average(received, torch.empty(num_elements), key, cohort).divided())
    assert all(torch.equal(average, averages[0]) for average in averages)
    return averages[0]


@pytest.mark.parametrize("spec", ["gather", "reduce_scatter"])
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_elements=st.sampled_from([1, 5, 64]),
    tokens=st.dictionaries(st.integers(0, 40), st.integers(1, 10_000), min_size=1, max_size=4),
)
def test_the_average_is_weighted_by_the_cohort(spec, seed, num_elements, tokens):
    generator = torch.Generator().manual_seed(seed)
    deltas = {m: torch.randn(num_elements, generator=generator) for m in tokens}
    expected = sum(n * deltas[m].double() for m, n in tokens.items()) / sum(tokens.values())
    average = averaged(spec, "fp32", deltas, Cohort.weighted(tokens))
    torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["gather", "reduce_scatter"])
def test_a_payload_that_is_missing_never_shrinks_the_average(spec):
    reduction, cohort = reduction_of(spec, codec("fp32")), Cohort.equal(3)
    payload = reduction.encode(torch.ones(6), Key(), cohort)[0]
    with pytest.raises(ExchangeError, match="no payload of replica 1") as caught:
        reduction.average({0: payload, 2: payload}, torch.empty(6), Key(), cohort)
    assert caught.value.missing == (1,)


@pytest.mark.parametrize("spec", ["gather", "reduce_scatter"])
def test_a_damaged_payload_is_refused_with_its_sender(spec):
    reduction, cohort = reduction_of(spec, codec("e3m0")), Cohort.equal(2)
    payloads = reduction.encode(torch.ones(6), Key(), cohort)
    damaged = payloads[-1].clone()
    damaged[0] ^= 255
    with pytest.raises(PayloadError, match="replica 1: a payload of"):
        reduction.average({0: payloads[0], 1: damaged}, torch.empty(6), Key(), cohort)


@pytest.mark.parametrize("bases", [(5, 6), (5, 0), (0, 6)])
@pytest.mark.parametrize("spec", ["gather", "reduce_scatter"])
def test_outer_gradients_against_other_outer_parameters_are_refused_with_their_senders(spec, bases):
    reduction, cohort = reduction_of(spec, codec("e3m0")), Cohort.equal(4)
    sent = {
        m: reduction.encode(torch.ones(8), Key(0, 2, 7, m), cohort)
        for m, base in enumerate((*bases, bases[1], bases[0]))
    }
    for payloads, base in zip(sent.values(), (*bases, bases[1], bases[0]), strict=True):
        for payload in payloads:
            reduction.wire.seal(payload, 8 // len(payloads), base=base)
    for m, names in ((0, "replica 1 and replica 2"), (1, "replica 0 and replica 3")):
        received = {sender: reduction.addressed(payloads, cohort)[m] for sender, payloads in sent.items()}
        step, to = (reduction.relay, 8) if reduction.num_phases == 2 else (reduction.average, torch.empty(8))
        if bases == (5, 6):
            with pytest.raises(DisagreementError, match=rf"of {names} are no longer those of this replica, {m}:"):
                step(received, to, Key(0, 2, 7, m), cohort)
        else:
            step(received, to, Key(0, 2, 7, m), cohort)


def test_an_average_draws_other_numbers_than_any_member():
    """Stochastic rounding of an average and of a member's payload would else be correlated."""
    cohort, keys = Cohort((0, 2, 3), (1.0, 1.0, 1.0)), []

    class Recording(FP32):
        def encode(self, delta_N, key=Key(), *, base=0, outer_N=None):  # noqa: B008
            keys.append(key)
            return super().encode(delta_N, key, base=base)

    reduction = ReduceScatter(Recording(), Recording())
    sent = {m: reduction.encode(torch.ones(6), Key(0, 0, 1, m), cohort) for m in cohort.members}
    for part, member in enumerate(cohort.members):
        received = {sender: payloads[part] for sender, payloads in sent.items()}
        reduction.relay(received, 6, Key(0, 0, 1, member), cohort)
    assert len(keys) == 12 and len(set(keys)) == 12


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_weighted_average_has_the_bits_of_its_definition(seed):
    """Each product rounded, then added in the order of the members, then divided."""
    generator = torch.Generator().manual_seed(seed)
    wire, cohort = codec("e3m0"), Cohort.weighted({1: 300, 4: 1000, 7: 70})
    deltas = {m: torch.randn(300, generator=generator) for m in cohort.members}
    decoded = {m: wire.decode(wire.encode(delta), 300).numpy() for m, delta in deltas.items()}
    total = np.zeros(300, np.float32)
    for member, weight in zip(cohort.members, cohort.weights, strict=True):
        total = total + np.float32(weight) * decoded[member]
    expected = total / np.float32(sum(cohort.weights))
    average = averaged("gather", "e3m0", deltas, cohort)
    assert np.array_equal(average.numpy(), expected)
