"""The base of all codecs: the key of random numbers, a payload's header and checks, the look-up by name.

Shapes: N elements of one outer gradient.
"""

import functools
import struct
import zlib
from abc import abstractmethod
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.errors import NonFiniteError, PayloadError, UserError
from diloco.kernels.memory import empty
from diloco.wire.formats import FORMATS, HEADER_BYTES, Format, parse

MAGIC = b"DLC1"


class Key(NamedTuple):
    """The outer gradient that a payload is made from: a codec draws its random numbers from this key."""

    seed: int = 0
    """The same on all replicas, below 2^64."""
    fragment: int = 0
    """Index of the fragment, below 2^16."""
    round: int = 0
    """How often the fragment has been sent, below 2^32."""
    replica: int = 0
    """The replica that encodes, below 2^16 − 1; masks ignore it, so that all replicas keep the same places."""
    part: int = 0
    """Index of the share of the fragment, below 2^16, where it is cut into shares."""
    shard: int = 0
    """Index of the replica's process that holds the shard, below 2^16."""


@dataclass(frozen=True)
class Codec(Format):
    """A wire format with its maths. A payload is a header of 16 bytes and a body.

    A subclass is a frozen dataclass whose fields are its options. It offers a `name` and the body: `pack`,
    `unpack` and `body_bytes`.
    """

    def encode(self, delta_N: Tensor, key: Key = Key()) -> Tensor:  # noqa: B008
        """The payload of a flat FP32 vector: uint8, `payload_bytes(N)` long, on the same device.

        Raises:
            NonFiniteError: if the vector holds NaN or an infinity.
            UserError: if it is not a flat FP32 vector.
        """
        _check_vector(delta_N)
        payload = empty(self.payload_bytes(delta_N.numel()), torch.uint8, delta_N.device)
        payload[:HEADER_BYTES] = torch.frombuffer(self._header(delta_N.numel()), dtype=torch.uint8)
        self.pack(delta_N.contiguous(), payload[HEADER_BYTES:], key)
        return payload

    def decode(self, payload: Tensor, num_elements: int, key: Key = Key()) -> Tensor:  # noqa: B008
        """The flat FP32 vector of N elements that a payload stands for; `key` is the encoder's.

        Raises:
            PayloadError: if it is not a payload of this codec and of N elements.
        """
        return self.decode_into(empty(num_elements, torch.float32, payload.device), payload, key)

    def decode_into(self, to_N: Tensor, payload: Tensor, key: Key = Key(), *, add: bool = False) -> Tensor:  # noqa: B008
        """Write a payload's values into a contiguous FP32 vector, or add them to it; return the vector.

        Raises:
            PayloadError: as `decode`; if only the body shows the damage, the vector's content is undefined.
            UserError: if the vector is not a contiguous flat FP32 vector.
        """
        _check_vector(to_N)
        if not to_N.is_contiguous():
            raise UserError("a payload can only be decoded into a contiguous vector")
        self.check(payload, to_N.numel())
        self.unpack(payload[HEADER_BYTES:], to_N, key, add=add)
        return to_N

    def check(self, payload: Tensor, num_elements: int) -> None:
        """Refuse by type, length and header what can't be a payload of N elements.

        Raises:
            PayloadError: with the expected and the actual payload.
        """
        expected = self.payload_bytes(num_elements)
        is_bytes = payload.dtype == torch.uint8 and payload.dim() == 1
        header = payload[:HEADER_BYTES].cpu().numpy().tobytes() if is_bytes else b""
        if header == self._header(num_elements) and payload.numel() == expected:
            return
        if header[:4] == MAGIC and len(header) == HEADER_BYTES and header != self._header(num_elements):
            elements = int.from_bytes(header[8:], "little")
            by = "another codec" if header[4:8] != self._header(0)[4:8] else "this codec"
            actual = f"{payload.numel()} bytes made by {by} for {elements} elements"
        else:
            actual = f"{tuple(payload.shape)} of {payload.dtype}: it was cut short, extended, or damaged"
        raise PayloadError(
            f"a payload of {num_elements} elements in {self.format} is {expected} bytes, not {actual}"
        )

    def _header(self, num_elements: int) -> bytearray:
        """4 bytes of magic, the CRC-32 of `format` (little-endian), N in 8 bytes (little-endian)."""
        return bytearray(struct.pack("<4sIQ", MAGIC, zlib.crc32(self.format.encode()), num_elements))

    @abstractmethod
    def pack(self, delta_N: Tensor, body: Tensor, key: Key) -> None:
        """Write the body of a contiguous FP32 vector into a uint8 vector of `body_bytes(N)`.

        Raises:
            NonFiniteError: if the vector holds NaN or an infinity.
        """

    @abstractmethod
    def unpack(self, body: Tensor, to_N: Tensor, key: Key, *, add: bool) -> None:
        """Write a body's values into an FP32 vector, or add them to it.

        Raises:
            PayloadError: if the body holds a value that `pack` never writes, as far as that can be seen.
        """


def codec(spec: str) -> Codec:
    """The codec of a name with options, such as `e3m0` or `topk:density=0.01,values=e3m0`.

    Raises:
        UserError: naming the codecs, or the options of the codec, that exist.

    >>> codec("e3m0:block=128")
    E3M0(block=128, stochastic=False)
    """
    chosen = parse(spec)
    return codec_class(chosen.name)(**asdict(chosen))


@functools.cache
def codec_class(name: str) -> type[Codec]:
    """The class that encodes and decodes a registered format."""
    module, _, kind = FORMATS[name].codec.partition(".")
    return getattr(import_module(f"diloco.wire.{module}"), kind)


def _check_vector(vector_N: Tensor) -> None:
    if vector_N.dtype != torch.float32 or vector_N.dim() != 1:
        raise UserError(
            f"an outer gradient is a flat float32 vector, not {tuple(vector_N.shape)} of {vector_N.dtype}"
        )


def refuse_non_finite(values: Tensor) -> None:
    """Raise if any of the values is NaN or infinite.

    Raises:
        NonFiniteError: if so.
    """
    if not is_finite(values):
        raise non_finite()


def is_finite(values: Tensor) -> bool:
    """True if no value is NaN or infinite; one pass over memory."""
    return not values.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def non_finite() -> NonFiniteError:
    """The error that `pack` raises."""
    return NonFiniteError("the outer gradient is not finite: it holds NaN or an infinity")
