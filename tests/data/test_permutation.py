import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.permutation import permute

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**40)


def whole(size, seed=0, epoch=0):
    return permute(np.arange(size), size=size, seed=seed, epoch_K=np.full(size, epoch)).astype(np.int64)


@given(st.integers(1, 5000), SEEDS, EPOCHS)
def test_a_permutation_is_a_bijection(size, seed, epoch):
    assert np.array_equal(np.sort(whole(size, seed, epoch)), np.arange(size))


def test_a_permutation_is_a_bijection_at_the_edges_of_powers_of_two():
    for size in [*range(1, 70), 255, 256, 257, 65535, 65536, 65537]:
        assert np.array_equal(np.sort(whole(size)), np.arange(size)), size


@given(st.integers(2**40, 2**62), SEEDS)
def test_a_permutation_of_a_huge_domain_stays_in_range_without_collisions(size, seed):
    positions = np.random.default_rng(seed).integers(0, size, 500)
    permuted = permute(positions, size=size, seed=seed, epoch_K=np.zeros(500, dtype=np.int64))
    assert permuted.max() < size
    assert len(np.unique(permuted)) == len(np.unique(positions))


def test_a_position_is_computed_alone():
    positions, epochs = np.array([3, 99, 3, 0]), np.array([0, 5, 1, 5])
    together = permute(positions, size=100, seed=7, epoch_K=epochs)
    alone = [whole(100, 7, epoch)[position] for position, epoch in zip(positions, epochs, strict=True)]
    assert together.tolist() == alone


@pytest.mark.parametrize("size", [1000, 4096, 100_003])
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_a_permutation_shuffles(size, seed):
    shuffled = whole(size, seed)
    tolerance = 5 / np.sqrt(size)
    assert abs(np.abs(shuffled - np.arange(size)).mean() / size - 1 / 3) < tolerance
    assert abs(correlation(shuffled, np.arange(size))) < tolerance
    assert abs(correlation(shuffled[1:], shuffled[:-1])) < tolerance
    steps = np.diff(shuffled)
    assert np.unique(steps, return_counts=True)[1].max() < 20
    assert (shuffled == np.arange(size)).sum() < 12


@pytest.mark.parametrize(("left", "right"), [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((1, 0), (0, 1))])
def test_seeds_and_epochs_give_unrelated_orders(left, right):
    a, b = whole(10_000, *left), whole(10_000, *right)
    assert abs(correlation(a, b)) < 0.05
    assert (a == b).sum() < 12


def test_a_window_falls_evenly_over_the_epochs():
    size, epochs = 10, 20_000
    places = permute(np.zeros(epochs), size=size, seed=3, epoch_K=np.arange(epochs))
    counts = np.bincount(places.astype(np.int64), minlength=size)
    chi_squared = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    assert chi_squared < 27.9  # p = 0.001 at nine degrees of freedom


def correlation(a, b):
    return np.corrcoef(a, b)[0, 1]
