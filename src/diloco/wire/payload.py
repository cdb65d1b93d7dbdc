"""The base of all codecs: a payload's header and checks, and random numbers that depend on a key alone.

Shapes: N elements of one outer gradient.
"""

import math
import struct
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import xxhash
from torch import Tensor

from diloco.errors import NonFiniteError, PayloadError, UserError
from diloco.wire.formats import BASE_BYTES, HEADER_BYTES, VERSION, Format
from diloco.wire.kernels.memory import empty, has_streams, recycled_bytes


def checksum(*parts: bytes | Tensor) -> int:
    """XXH3-64 (seed 0) of bytes and of tensors' memory, one after the other; other threads run meanwhile.

    Memory of a GPU is copied to the host: a payload goes there anyway.

    >>> import torch
    >>> hex(checksum(b"dilo", torch.tensor([99, 111], dtype=torch.uint8))), hex(checksum(b"diloco"))
    ('0x1d2dfbbef25a4240', '0x1d2dfbbef25a4240')
    """
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.detach().cpu().contiguous().numpy().data)
    return digest.intdigest()


MAGIC = b"DLC%d" % VERSION


class Key(NamedTuple):
    """The outer gradient that a payload is made from: a codec draws its random numbers from this key."""

    seed: int = 0
    """The same on all replicas, below 2^64."""
    fragment: int = 0
    """Index of the fragment, below 2^16."""
    round: int = 0
    """Number of times that the fragment has been sent, below 2^32."""
    replica: int = 0
    """The replica that encodes, below 2^16 − 1; masks ignore it, so that all replicas keep the same places."""
    part: int = 0
    """Index of the share of the fragment, below 2^16, where it is cut into shares."""
    shard: int = 0
    """Index of the replica's process that holds the shard, below 2^16."""


_LOW = 0xFFFFFFFF


def random_bits(key: Key, num_elements: int, device: torch.device) -> Tensor:
    """32 random bits for each of N elements, as int64: the same on every machine, device and version of PyTorch.

    The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Element i takes word i mod 4 of the counter (i div 4, fragment + part·2^16, round, replica + 1 + shard·2^16),
    under the key (seed mod 2^32, seed div 2^32).

    Args:
        key: the outer gradient's key.
        num_elements: N, at most 2^34.
        device: the device of the result.
    """
    assert num_elements <= 1 << 34, "a counter's first word has 32 bits"
    index = torch.arange(-(-num_elements // 4), dtype=torch.int64, device=device)
    *counter, key0, key1 = words(key, common=False)
    counter = [index, *(torch.full_like(index, word) for word in counter)]
    return torch.stack(philox(counter, (key0, key1)), dim=1).view(-1)[:num_elements]


def words(key: Key, *, common: bool) -> tuple[int, int, int, int, int]:
    """The counter's last three words, without the replica if they are common to all, and the two of the key."""
    half = 1 << 16
    limits = Key(seed=1 << 64, fragment=half, round=1 << 32, replica=half - 1, part=half, shard=half)
    assert all(0 <= value < limit for value, limit in zip(key, limits, strict=True)), f"{key} is beyond {limits}"
    whose = (0 if common else key.replica + 1) + (key.shard << 16)
    return key.fragment + (key.part << 16), key.round, whose, key.seed & _LOW, key.seed >> 32


def philox(counter: Sequence[Any], key: tuple[int, int]) -> list[Any]:
    """Ten rounds on four 32-bit words, as integers, or in int64, where products wrap at 64 bits as they may."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32) & _LOW ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> 32) & _LOW ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return [c0, c1, c2, c3]


class Mask(NamedTuple):
    """A random subset of positions: each is in it with a probability, by a hash of the position under two words.

    The hash is Wellons' lowbias32 with a second word between its multiplications, and without its last shift,
    which leaves the high bits, those that decide, as they are. It is cheap enough for one pass over memory.
    """

    word0: int
    """Below 2^32."""
    word1: int
    """Below 2^32."""
    most: int
    """The largest hash of a position in the subset, from 0 to 2^32 − 1."""

    @classmethod
    def of(cls, key: Key, density: float) -> "Mask":
        """The subset of an outer gradient, the same for all replicas: the words are Philox's first two."""
        *counter, key0, key1 = words(key, common=True)
        word0, word1, _, _ = philox([0, *counter], (key0, key1))
        return cls(word0, word1, math.ceil(density * 2**32) - 1)

    def flags(self, num_elements: int, device: torch.device) -> Tensor:
        """A bool for each of N positions."""
        x = torch.arange(num_elements, dtype=torch.int64, device=device) ^ self.word0
        x = (x ^ x >> 16) * 0x7FEB352D & _LOW ^ self.word1
        return ((x ^ x >> 15) * 0x846CA68B & _LOW) <= self.most


@dataclass(frozen=True)
class Codec(Format):
    """A wire format with its maths. A payload is a header of 32 bytes and a body.

    A subclass is a frozen dataclass whose fields are its options. It offers a `name` and the body: `pack`,
    `unpack` and `body_bytes`.
    """

    never_written: ClassVar[str] = "values that are never written"
    """The words for a body that is not sound."""
    needs_outer: ClassVar[bool] = False
    """True if what is sent depends on the outer parameters: `gated` is called where they are given."""

    def encode(
        self,
        delta_N: Tensor,
        key: Key = Key(),  # noqa: B008
        *,
        base: int = 0,
        outer_N: Tensor | None = None,
    ) -> Tensor:
        """The payload of a flat FP32 vector: uint8, `payload_bytes(N)` long, on the same device.

        Args:
            delta_N: the outer gradient, or a share of it; any layout.
            key: whose outer gradient it is.
            base: the digest of the outer parameters against which it was taken; 0 where it is not known.
            outer_N: these outer parameters, where they are known; most codecs ignore them.

        Raises:
            NonFiniteError: if the vector holds NaN or an infinity.
            UserError: if it is not a flat FP32 vector.
        """
        payload, is_finite = self.packed(delta_N, key, outer_N)
        if not is_finite:
            raise non_finite()
        return self.seal(payload, delta_N.numel(), base=base)

    def packed(self, delta_N: Tensor, key: Key, outer_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A payload of which only the body is written, and a bool on its device: True if the vector is finite.

        Nothing is read on the host: a GPU need not be waited for.

        Raises:
            UserError: if it is not a flat FP32 vector.
        """
        _check_vector(delta_N)
        payload = recycled_bytes(self.payload_bytes(delta_N.numel()), delta_N.device)
        vector_N = plain(delta_N.detach(), delta_N.device)
        if self.needs_outer and outer_N is not None:
            vector_N = self.gated(vector_N, plain(outer_N.detach(), delta_N.device))
        return payload, self.pack(vector_N, payload[HEADER_BYTES:], key)

    def gated(self, delta_N: Tensor, outer_N: Tensor) -> Tensor:
        """The vector that is packed, if the codec needs Θ; both are contiguous FP32 vectors."""
        return delta_N

    def seal(self, payload: Tensor, num_elements: int, *, base: int) -> Tensor:
        """Write the header of a payload of N elements whose body is written; return the payload."""
        header = self._header(num_elements) + base.to_bytes(8, "little")
        header += checksum(header, payload[HEADER_BYTES:]).to_bytes(8, "little")
        payload[:HEADER_BYTES] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return payload

    def decode(self, payload: Tensor, num_elements: int, key: Key = Key()) -> Tensor:  # noqa: B008
        """The flat FP32 vector of N elements that a payload stands for; `key` is the encoder's.

        Raises:
            PayloadError: if it is not a payload of this codec and of N elements, or is damaged.
        """
        return self.decode_into(empty(num_elements, torch.float32, payload.device), payload, key)

    def decode_into(self, to_N: Tensor, payload: Tensor, key: Key = Key(), *, add: bool = False) -> Tensor:  # noqa: B008
        """Write a payload's values into a contiguous FP32 vector, or add them to it; return the vector.

        The payload may lie on another device, and have any layout. All values are finite. A payload in the host's
        memory is judged there, so that a GPU which it is decoded on need not be waited for.

        Raises:
            PayloadError: as `decode`; if the checksum is right and the body stands for no finite values, the
                vector's content is undefined.
            UserError: if the vector is not a contiguous flat FP32 vector.
        """
        _check_vector(to_N)
        if plain(to_N, to_N.device) is not to_N:
            raise UserError("a payload can only be decoded into a contiguous, aligned vector")
        self.check(payload, to_N.numel())
        body = payload[HEADER_BYTES:]
        is_judged_here = body.device.type == "cpu" and to_N.device.type != "cpu"
        if is_judged_here and not self.is_sound(plain(body, body.device), to_N.numel(), key):
            raise self._damaged()
        is_sound = self.unpack(plain(body, to_N.device), to_N, key, add=add)
        if not is_judged_here and not is_sound:
            raise self._damaged()
        return to_N

    def is_sound(self, body: Tensor, num_elements: int, key: Key) -> Tensor:
        """The bool that `unpack` returns, of a body in the host's memory; a codec may know it without decoding."""
        return self.unpack(body, empty(num_elements, torch.float32, body.device), key, add=False)

    def _damaged(self) -> PayloadError:
        return PayloadError(f"a payload in {self.format} holds {self.never_written}: it was damaged")

    def check(self, payload: Tensor, num_elements: int) -> None:
        """Refuse by type, length, header and checksum what isn't a payload of N elements.

        Raises:
            PayloadError: saying how it differs.
        """
        is_bytes = payload.dtype == torch.uint8 and payload.dim() == 1 and _has_memory(payload)
        header = payload[:HEADER_BYTES].cpu().numpy().tobytes() if is_bytes else b""
        has_length = payload.numel() == self.payload_bytes(num_elements)
        is_ours = header[:16] == self._header(num_elements)
        is_whole = len(header) == HEADER_BYTES and header[24:] == checksum(
            header[:24], payload[HEADER_BYTES:]
        ).to_bytes(8, "little")
        if has_length and is_ours and is_whole:
            return
        if has_length and is_ours:
            raise PayloadError(
                f"a payload of {num_elements} elements in {self.format} does not match its checksum: it was "
                "damaged on the way, or in memory"
            )
        actual = f"{payload.numel()} bytes"
        if not is_bytes:
            actual = f"{tuple(payload.shape)} of {payload.dtype} on {payload.device}"
        elif header[:3] == MAGIC[:3] and header[3:4].isdigit() and header[:4] != MAGIC:
            version = f"of version {header[3:4].decode()} of the wire format, and this is version {VERSION}"
            actual += f" {version}: run the same version of diloco on all replicas"
        elif len(header) < HEADER_BYTES or header[:4] != MAGIC:
            actual += ": it was cut short, or damaged"
        elif not is_ours:
            by = "this codec" if header[4:8] == self._header(0)[4:8] else "another codec"
            actual += f" made by {by} for {int.from_bytes(header[8:16], 'little')} elements"
            actual += "" if is_whole else ", or damaged"
        else:
            is_short = payload.numel() < self.payload_bytes(num_elements)
            actual += f": it was {'cut short' if is_short else 'extended'}"
        raise PayloadError(
            f"a payload of {num_elements} elements in {self.format} is {self.payload_bytes(num_elements)} bytes, "
            f"not {actual}"
        )

    def check_body(self, body: Tensor, num_elements: int) -> None:
        """Refuse a body of another length than that of N elements, before it is cut into its parts.

        Raises:
            PayloadError: with both lengths.
        """
        expected = self.body_bytes(num_elements)
        if body.dtype != torch.uint8 or body.shape != (expected,):
            raise PayloadError(
                f"the body of {num_elements} elements in {self.format} is {expected} bytes, not "
                f"{tuple(body.shape)} of {body.dtype}"
            )

    def _header(self, num_elements: int) -> bytes:
        """The first 16 bytes: magic and version, the CRC-32 of `format`, N (little-endian)."""
        return struct.pack("<4sIQ", MAGIC, zlib.crc32(self.format.encode()), num_elements)

    @abstractmethod
    def pack(self, delta_N: Tensor, body: Tensor, key: Key) -> Tensor:
        """Write the body of a contiguous FP32 vector into a contiguous uint8 vector of `body_bytes(N)`.

        Returns:
            A bool on the vector's device: False if the vector holds NaN or an infinity, and the body is undefined.
        """

    @abstractmethod
    def unpack(self, body: Tensor, to_N: Tensor, key: Key, *, add: bool) -> Tensor:
        """Write a body's values into an FP32 vector, or add them to it.

        `decode_into` has compared the body's length and checksum with those that were sent; both vectors are
        contiguous and aligned.

        Returns:
            A bool on the vector's device: False if the body holds a value that `pack` never writes, as far as that
            can be seen, or one that is not finite. The vector's content is undefined then.
        """


def base_of(payload: Tensor) -> int:
    """The `base` that a payload was encoded with; 0 where it is not known."""
    return int.from_bytes(payload[BASE_BYTES].cpu().numpy().tobytes(), "little")


def plain(vector: Tensor, device: torch.device) -> Tensor:
    """A vector on a device, contiguous and aligned for elements of 4 bytes: itself where it is so, or a copy."""
    # To a GPU without a wait, if the vector lies in pinned memory.
    vector = vector.to(device, non_blocking=has_streams(device)).contiguous()
    misaligned = vector.data_ptr() % 4 or vector.storage_offset() * vector.itemsize % 4
    return vector.clone() if misaligned else vector


def _check_vector(vector_N: Tensor) -> None:
    if vector_N.dtype != torch.float32 or vector_N.dim() != 1 or not _has_memory(vector_N):
        raise UserError(
            f"an outer gradient is a flat float32 vector, not {tuple(vector_N.shape)} of {vector_N.dtype} on "
            f"{vector_N.device}"
        )


def _has_memory(tensor: Tensor) -> bool:
    """False for a sparse tensor, and on the device `meta`."""
    return tensor.layout == torch.strided and not tensor.is_meta


def is_finite(values: Tensor) -> Tensor:
    """A bool on the values' device: True if no value is NaN or infinite; one pass over memory."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    return torch.isfinite(torch.stack(torch.aminmax(values))).all()


def non_finite() -> NonFiniteError:
    """The error for an outer gradient that can't be encoded."""
    return NonFiniteError("the outer gradient is not finite: it holds NaN or an infinity")


@dataclass(frozen=True)
class Unsealed(Codec):
    """A codec whose payloads are sealed later, those of one outer gradient."""

    wire: Codec
    sizes: list[int] = field(default_factory=list)
    """Elements of each payload that was encoded, in order."""
    are_finite: list[Tensor] = field(default_factory=list)
    """For each payload a bool on its device: True if its vector was finite."""

    name = "unsealed"

    def body_bytes(self, num_elements: int) -> int:
        """Length of the codec's body."""
        return self.wire.body_bytes(num_elements)

    def encode(
        self,
        delta_N: Tensor,
        key: Key = Key(),  # noqa: B008
        *,
        base: int = 0,
        outer_N: Tensor | None = None,
    ) -> Tensor:
        """A payload of which only the body is written; `seal_all` writes `base`."""
        payload, is_finite = self.wire.packed(delta_N, key, outer_N)
        self.sizes.append(delta_N.numel())
        self.are_finite.append(is_finite)
        return payload

    def decode_into(self, to_N: Tensor, payload: Tensor, key: Key = Key(), *, add: bool = False) -> Tensor:  # noqa: B008
        """Decode a payload of this process's own, which is sound."""
        self.unpack(plain(payload[HEADER_BYTES:], to_N.device), to_N, key, add=add)
        return to_N

    def seal_all(self, payloads: Sequence[Tensor], *, base: int) -> None:
        """Write the headers of all payloads, which were encoded in this order and have come to the host."""
        for payload, num_elements in zip(payloads, self.sizes, strict=True):
            self.wire.seal(payload, num_elements, base=base)

    def pack(self, delta_N: Tensor, body: Tensor, key: Key) -> Tensor:
        """Call the codec's own method."""
        return self.wire.pack(delta_N, body, key)

    def unpack(self, body: Tensor, to_N: Tensor, key: Key, *, add: bool) -> Tensor:
        """Call the codec's own method."""
        return self.wire.unpack(body, to_N, key, add=add)
