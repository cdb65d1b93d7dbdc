from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.sampling import Batches, Sampler, SlotSampler, permute
from diloco.data.shards import TokenShards

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


def sampler_of(num_windows, num_replicas, num_ranks, share, seed=0):
    return Sampler(num_windows=num_windows, global_batch=num_replicas * num_ranks * share, seed=seed)


@given(st.integers(1, 300), SHAPES, st.integers(1, 10**9), st.integers(0, 2**64 - 1))
def test_replicas_and_ranks_together_read_what_one_replica_would(num_windows, shape, step, seed):
    num_replicas, num_ranks, _ = shape
    sampler = sampler_of(num_windows, *shape, seed)
    parts = [
        sampler.windows(step, replica, num_replicas, rank, num_ranks)
        for replica in range(num_replicas)
        for rank in range(num_ranks)
    ]
    assert all(part.dtype == np.int64 and len(part) == shape[2] for part in parts)
    assert np.array_equal(np.concatenate(parts), sampler.windows(step))


@given(st.integers(1, 40), SHAPES, st.integers(0, 3))
def test_every_window_once_an_epoch_though_steps_straddle_epochs(num_windows, shape, seed):
    sampler = sampler_of(num_windows, *shape, seed)
    num_steps = -(-3 * num_windows // sampler.global_batch)
    order = np.concatenate([sampler.windows(step) for step in range(1, num_steps + 1)])
    epochs = order[: 3 * num_windows].reshape(3, num_windows)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(num_windows), (3, 1)))


def test_the_order_is_the_same_everywhere_and_forever():
    # A run resumed elsewhere, or by a later release, has to go on with the same windows.
    order = Sampler(num_windows=1000, global_batch=8, seed=42).windows(200).tolist()
    assert order == [916, 989, 827, 900, 856, 532, 466, 472]


def tokens_of(length):
    return TokenShards(shards=(np.arange(length),), num_bytes=length, vocab_size=length, bos_id=0, digest="")


def test_a_batch_is_the_windows_of_the_sampler():
    sampler = Sampler(num_windows=10, global_batch=4)
    windows = partial(sampler.windows, replica=1, num_replicas=2)
    batch = Batches(shards=tokens_of(101), sequence_length=10, windows=windows).batch(3)
    assert batch.dtype == np.int64
    assert batch.shape == (2, 11)
    assert batch[:, 0].tolist() == (sampler.windows(3)[2:] * 10).tolist()
    assert (np.diff(batch) == 1).all()


def test_the_ranks_of_a_replica_together_read_its_slot_from_where_it_was_taken_over():
    sampler = SlotSampler(num_windows=20, seed=3)
    for step in (3, 4):
        of_step = partial(sampler.of_step, step, slot=1, first=5, size=6, after_step=2)
        parts = [of_step(rank=rank, num_ranks=3) for rank in range(3)]
        assert np.array_equal(np.concatenate(parts), sampler.windows(1, 5 + 6 * (step - 3), 6))
        assert np.array_equal(of_step(), sampler.of_step(step, slot=1, first=11, size=6, after_step=3))


@given(st.integers(1, 300), st.integers(0, 63), st.integers(0, 2**64 - 1), st.data())
def test_a_slot_reads_each_window_once_an_epoch_wherever_it_is_taken_up(num_windows, slot, seed, data):
    sampler = SlotSampler(num_windows=num_windows, seed=seed)
    cut = data.draw(st.integers(0, 2 * num_windows))
    parts = sampler.windows(slot, 0, cut), sampler.windows(slot, cut, 2 * num_windows - cut)
    epochs = np.concatenate(parts).reshape(2, num_windows)
    assert epochs.dtype == np.int64
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(num_windows), (2, 1)))
    assert np.array_equal(epochs.reshape(-1), sampler.windows(slot, 0, 2 * num_windows))


@given(st.integers(0, 6), st.integers(1, 10), st.integers(0, 63), st.integers(0, 2**64 - 1))
def test_as_many_slots_as_a_power_of_two_share_the_text_without_overlap(power, share, rest, seed):
    num_windows = (share << power) + min(rest, (1 << power) - 1)
    sampler = SlotSampler(num_windows=num_windows, seed=seed)
    read = np.concatenate([sampler.windows(slot, 0, share) for slot in range(1 << power)])
    assert len(np.unique(read)) == len(read) == share << power


def test_the_order_of_a_slot_is_the_same_everywhere_and_forever():
    order = SlotSampler(num_windows=1000, seed=42).windows(5, 990, 8).tolist()
    assert order == [586, 15, 551, 793, 884, 359, 628, 706]


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
