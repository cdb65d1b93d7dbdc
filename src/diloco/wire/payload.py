"""What every codec has in common: the key it draws from, the header of a payload, and what is refused.

Shapes: N elements of one outer gradient.
"""

import struct
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from diloco.errors import NonFiniteError, PayloadError, UserError
from diloco.kernels.memory import empty

MAGIC = b"DLC1"
HEADER_BYTES = 16


class Key(NamedTuple):
    """Whose outer gradient it is: what a codec that draws random numbers draws them from."""

    seed: int = 0
    """The same on all replicas, below 2^64."""
    fragment: int = 0
    """Index of the fragment, below 2^16."""
    round: int = 0
    """How often the fragment has been sent, below 2^32."""
    replica: int = 0
    """Whose it is, below 2^16 − 1; masks ignore it, so that all replicas keep the same places."""
    part: int = 0
    """Which share of the fragment, below 2^16, when it is cut."""
    shard: int = 0
    """Which of the replica's processes has it, below 2^16."""


@dataclass(frozen=True)
class Codec(ABC):
    """A wire format. A payload is a header of 16 bytes and a body; docs/wire-format.md has every byte.

    A subclass is a frozen dataclass whose fields are its options. It offers a `name` and the body: `pack`,
    `unpack` and `body_bytes`.
    """

    name: ClassVar[str]

    def encode(self, delta_N: Tensor, key: Key = Key()) -> Tensor:  # noqa: B008
        """The payload of a flat FP32 vector: uint8, `payload_bytes(N)` long, on the same device.

        Raises:
            NonFiniteError: if the vector holds NaN or an infinity.
            UserError: if it is no flat FP32 vector.
        """
        _check_vector(delta_N)
        payload = empty(self.payload_bytes(delta_N.numel()), torch.uint8, delta_N.device)
        payload[:HEADER_BYTES] = torch.frombuffer(self._header(delta_N.numel()), dtype=torch.uint8)
        self.pack(delta_N.contiguous(), payload[HEADER_BYTES:], key)
        return payload

    def decode(self, payload: Tensor, num_elements: int, key: Key = Key()) -> Tensor:  # noqa: B008
        """The flat FP32 vector of N elements that a payload stands for; `key` is the one it was made with.

        Raises:
            PayloadError: if it is not a payload of this codec and of so many elements.
        """
        return self.decode_into(empty(num_elements, torch.float32, payload.device), payload, key)

    def decode_into(self, to_N: Tensor, payload: Tensor, key: Key = Key(), *, add: bool = False) -> Tensor:  # noqa: B008
        """Write what a payload stands for into a contiguous FP32 vector, or add it, and return that.

        Raises:
            PayloadError: as `decode`; if the damage shows only in its body, the vector is of no use any more.
        """
        _check_vector(to_N)
        if not to_N.is_contiguous():
            raise UserError("a payload can only be decoded into a contiguous vector")
        self.check(payload, to_N.numel())
        self.unpack(payload[HEADER_BYTES:], to_N, key, add=add)
        return to_N

    def check(self, payload: Tensor, num_elements: int) -> None:
        """Refuse what can't be a payload of N elements, from its type, length and header.

        Raises:
            PayloadError: saying what was expected, and what came.
        """
        expected = self.payload_bytes(num_elements)
        is_bytes = payload.dtype == torch.uint8 and payload.dim() == 1
        header = payload[:HEADER_BYTES].cpu().numpy().tobytes() if is_bytes else b""
        found = None
        if header[:4] == MAGIC and len(header) == HEADER_BYTES and header != self._header(num_elements):
            elements = int.from_bytes(header[8:], "little")
            by = "another codec" if header[4:8] != self._header(0)[4:8] else "this codec"
            found = f"{payload.numel()} bytes made by {by} for {elements} elements"
        elif header != self._header(num_elements) or payload.numel() != expected:
            found = f"{tuple(payload.shape)} of {payload.dtype}: it was cut short, extended, or damaged"
        if found is not None:
            raise PayloadError(
                f"a payload of {num_elements} elements in {self.format} is {expected} bytes, not {found}"
            )

    def payload_bytes(self, num_elements: int) -> int:
        """Length of the payload of `num_elements`, header included; it does not depend on their values."""
        return HEADER_BYTES + self.body_bytes(num_elements)

    @property
    def spec(self) -> str:
        """The name with every option, as `diloco.wire.codec` reads it."""
        return self._spec([field.name for field in fields(self)])

    @property
    def format(self) -> str:
        """The name with the options that a decoder must know: the header holds its CRC-32."""
        return self._spec([field.name for field in fields(self) if field.name != "stochastic"])

    def _spec(self, options: list[str]) -> str:
        values = ",".join(f"{option}={_text(getattr(self, option))}" for option in options)
        return f"{self.name}:{values}" if values else self.name

    def _header(self, num_elements: int) -> bytearray:
        """4 bytes of magic, the CRC-32 of `format` (little-endian), N in 8 bytes (little-endian)."""
        return bytearray(struct.pack("<4sIQ", MAGIC, zlib.crc32(self.format.encode()), num_elements))

    @abstractmethod
    def body_bytes(self, num_elements: int) -> int:
        """Length of the body of `num_elements`."""

    @abstractmethod
    def pack(self, delta_N: Tensor, body: Tensor, key: Key) -> None:
        """Write the body of a contiguous FP32 vector into a uint8 vector of `body_bytes(N)`.

        Raises:
            NonFiniteError: if the vector holds NaN or an infinity.
        """

    @abstractmethod
    def unpack(self, body: Tensor, to_N: Tensor, key: Key, *, add: bool) -> None:
        """Write what a body stands for into an FP32 vector, or add it.

        Raises:
            PayloadError: if the body holds what `pack` never writes, and it shows.
        """


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
    """Whether none of the values is NaN or infinite; one pass over memory."""
    return not values.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def non_finite() -> NonFiniteError:
    """What `pack` raises."""
    return NonFiniteError("the outer gradient is not finite: it holds NaN or an infinity")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
