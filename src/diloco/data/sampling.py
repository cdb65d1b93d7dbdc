"""The windows that a replica reads: a pure function of (seed, step, replica, rank), or of (seed, slot, position).

With W windows and a global batch of B, step t (counted from 1) covers the positions (t−1)B … tB−1.
Position k is window permutation_{seed,e}(k mod W) of epoch e = ⌊k / W⌋. Of M replicas, replica m takes
the positions [mB/M, (m+1)B/M) of each step, and of R ranks in a replica each takes its share likewise.

So each window is read once an epoch, no two replicas read the same window in an epoch, and M replicas together
read what one replica with the same global batch reads. A resume needs nothing saved.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from diloco.data.shards import TokenShards
from diloco.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The order of the windows of one split.

    Raises:
        UserError: if a field is out of its range.

    >>> sampler = Sampler(num_windows=10, global_batch=4, seed=0)
    >>> one = sampler.windows(3)
    >>> two = [sampler.windows(3, replica=m, num_replicas=2) for m in range(2)]
    >>> np.concatenate(two).tolist() == one.tolist()
    True
    """

    num_windows: int
    """W: windows in the split, at least 1."""
    global_batch: int
    """B: sequences that all replicas together read in a step."""
    seed: int = 0
    """Key of the permutations, in [0, 2^64)."""

    def __post_init__(self) -> None:
        for name in ("num_windows", "global_batch"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1", name)
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed={self.seed} must be at least 0 and below 2^64", "seed")

    def windows(
        self, step: int, replica: int = 0, num_replicas: int = 1, rank: int = 0, num_ranks: int = 1
    ) -> np.ndarray:
        """The windows that `rank` of `replica` reads at `step`: int64, shape (B / (M·R),).

        Raises:
            UserError: if B is not divisible by M·R.
        """
        assert step >= 1, "steps are counted from 1"
        assert 0 <= replica < num_replicas and 0 <= rank < num_ranks, "both are counted from 0"
        share, rest = divmod(self.global_batch, num_replicas * num_ranks)
        if rest:
            raise UserError(
                f"global_batch={self.global_batch} must be a multiple of num_replicas={num_replicas} times the "
                f"{num_ranks} processes of each",
                "global_batch",
                "num_replicas",
            )
        first = (step - 1) * self.global_batch + (replica * num_ranks + rank) * share
        position_K = np.arange(first, first + share)
        epoch_K, index_K = np.divmod(position_K, self.num_windows)
        window_K = permute(index_K, size=self.num_windows, seed=self.seed, epoch_K=epoch_K)
        return window_K.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class SlotSampler:
    """The order of the windows of one split in each slot, where replicas come and go.

    Slot s goes round the W permuted windows in a circle, epoch by epoch, from an offset of its own:
    its window i is permutation_{seed,e}((o_s + i) mod W) of epoch e = ⌊i / W⌋, with o_s = ⌊W · φ(s)⌋ and φ the
    radical inverse in base 2: 0, 1/2, 1/4, 3/4, 1/8, … (van der Corput, 1935).

    So a slot reads each window once an epoch, slots 0 … 2^k − 1 at equal positions read different windows, and
    together each window once while each of them reads W / 2^k. Other numbers of slots overlap before that.

    >>> sampler = SlotSampler(num_windows=8)
    >>> halves = [sampler.windows(slot, 0, 4) for slot in (0, 1)]
    >>> np.concatenate(halves).tolist() == sampler.windows(0, 0, 8).tolist()
    True
    >>> thirds = [SlotSampler(num_windows=1200).windows(slot, 0, 400) for slot in range(3)]
    >>> len(np.unique(thirds))
    1000
    """

    num_windows: int
    """W: windows in the split, at least 1."""
    seed: int = 0
    """Key of the permutations, in [0, 2^64)."""

    def __post_init__(self) -> None:
        if self.num_windows < 1:
            raise UserError(f"num_windows={self.num_windows} must be at least 1", "num_windows")

    def windows(self, slot: int, first: int, count: int) -> np.ndarray:
        """The windows `first` … `first + count − 1` of a slot: int64, shape (count,).

        Raises:
            UserError: if a number is below 0.
        """
        if min(slot, first, count) < 0:
            raise UserError(f"slot={slot}, first={first} and count={count} must be 0 or more")
        num_bits = slot.bit_length()
        reversed_bits = int(f"{slot:b}"[::-1], 2)
        offset = self.num_windows * reversed_bits >> num_bits
        epoch_K, index_K = np.divmod(np.arange(first, first + count), self.num_windows)
        index_K = (index_K + offset) % self.num_windows
        return permute(index_K, size=self.num_windows, seed=self.seed, epoch_K=epoch_K).astype(np.int64)

    def of_step(
        self,
        step: int,
        *,
        slot: int,
        first: int,
        size: int,
        after_step: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> np.ndarray:
        """The windows that `rank` of a replica reads at `step`: int64, shape (size / R,).

        Args:
            step: counted from 1, above `after_step`.
            slot: s.
            first: the window of the slot at which the replica took it over.
            size: sequences of a batch of the replica, a multiple of `num_ranks`.
            after_step: steps that the replica had taken before.
            rank: the process within the replica, in [0, num_ranks).
            num_ranks: R: processes in a replica.
        """
        share = size // num_ranks
        return self.windows(slot, first + (step - after_step - 1) * size + rank * share, share)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of one process.

    Example:
        sampler = Sampler(num_windows=shards.num_windows(length), global_batch=8)
        windows = partial(sampler.windows, replica=0, num_replicas=2)
        Batches(shards=shards, sequence_length=length, windows=windows)
    """

    shards: TokenShards
    """The split to read."""
    sequence_length: int
    """Tokens in a sequence; a window holds one more, the last token's target."""
    windows: Callable[[int], np.ndarray]
    """The windows that this process reads at a step, counted from 1: int64, shape (K,)."""

    def batch(self, step: int) -> np.ndarray:
        """The tokens to read at `step`: int64, shape (K, sequence_length + 1)."""
        return np.stack([self.shards.window(int(i), self.sequence_length) for i in self.windows(step)])


_NUM_ROUNDS = 8


def permute(position_K: np.ndarray, *, size: int, seed: int, epoch_K: np.ndarray) -> np.ndarray:
    """The image of each position of [0, size) under its epoch's permutation: uint64, shape (K,).

    It is computed, not stored. A balanced Feistel network is a bijection of [0, 2^2h) for every round function.
    Walking its cycles, that is applying it again while the result is outside of [0, size), gives a bijection of
    [0, size) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). As 2^2h ≤ 4 size, a position
    takes four turns at most on average.

    Positions and epochs are integers of shape (K,); 1 ≤ size ≤ 2^62; 0 ≤ seed < 2^64.

    >>> permute(np.arange(5), size=5, seed=0, epoch_K=np.zeros(5)).tolist()
    [4, 3, 2, 0, 1]
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    key_K = _mix(_mix(np.array([seed], dtype=np.uint64)) + epoch_K.astype(np.uint64))
    value_K = _feistel(position_K.astype(np.uint64), key_K, half_bits)
    while (outside_K := value_K >= size).any():
        value_K[outside_K] = _feistel(value_K[outside_K], key_K[outside_K], half_bits)
    return value_K


def _feistel(value_K: np.ndarray, key_K: np.ndarray, half_bits: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left_K, right_K = value_K >> shift, value_K & mask
    for number in range(_NUM_ROUNDS):
        round_key_K = _mix(key_K + np.uint64(number))
        left_K, right_K = right_K, left_K ^ (_mix(right_K ^ round_key_K) & mask)
    return (left_K << shift) | right_K


def _mix(value_K: np.ndarray) -> np.ndarray:
    """One output of the generator splitmix64 (Steele, Lea and Flood, 2014) in the state `value_K`."""
    value_K = value_K + np.uint64(0x9E3779B97F4A7C15)
    value_K = (value_K ^ (value_K >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value_K = (value_K ^ (value_K >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value_K ^ (value_K >> np.uint64(31))
