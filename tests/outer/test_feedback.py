import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.outer.averages import Gather, reduction_of
from diloco.outer.cohort import Cohort
from diloco.wire import Key, codec

WAYS = [("gather", "bf16"), ("gather", "e3m0:stochastic=true"), ("gather", "int2"), ("gather", "sparseloco")]
WAYS += [("gather", "topk:density=0.1,values=int2"), ("reduce_scatter", "e3m0")]
WAYS += [("reduce_scatter", "feddropout:density=0.3")]


@pytest.mark.slow
@pytest.mark.parametrize(("combine", "wire"), WAYS)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1), num_elements=st.sampled_from([1, 2, 37, 700]), num_replicas=st.integers(1, 4)
)
def test_error_feedback_sends_everything_in_the_end(combine, wire, seed, num_elements, num_replicas):
    """β = 1: Σ sent + e = Σ Δ, but for FP32's rounding of the sums."""
    rng = np.random.default_rng(seed)
    deltas = torch.from_numpy(rng.standard_normal((8, num_elements)).astype(np.float32))
    reduction, error = reduction_of(combine, codec(wire)), torch.zeros(num_elements)
    cohort = Cohort.equal(num_replicas)
    sent = torch.zeros(num_elements, dtype=torch.float64)
    for r, delta in enumerate(deltas, start=1):
        key = Key(seed, 0, r, 0)
        payloads, error = reduction.encode_with_feedback(delta, error, 1.0, key, cohort)
        sent += reduction.decode(payloads, num_elements, key).double()
    scale = deltas.abs().sum(dim=0).max().item()
    np.testing.assert_allclose(
        (sent + error).numpy(), deltas.double().sum(dim=0).numpy(), atol=1e-5 * scale, rtol=0
    )


def test_error_feedback_is_the_equation():
    reduction, key = Gather(codec("topk:density=0.25")), Key()
    payloads, error = reduction.encode_with_feedback(
        torch.tensor([1.0, 3, 5, 2]), torch.tensor([4.0, 2, 0, 0]), 0.5, key, Cohort.equal(2)
    )
    assert torch.equal(reduction.decode(payloads, 4, key), torch.tensor([0.0, 0, 5, 0]))
    assert torch.equal(error, torch.tensor([3.0, 4, 0, 2]))
