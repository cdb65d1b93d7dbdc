"""Digests of the outer parameters: one that every send compares between replicas, and the hash of a run.

Shapes: N elements of one fragment; K blocks of R rows and C columns.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from diloco.wire.kernels.native import native

_ROWS, _COLUMNS = 255, 256
_BLOCK = _ROWS * _COLUMNS
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def outer_digest(outer_N: Tensor) -> int:
    """64 bits that tell Θ from another one: the same on every device, whatever the order of its sums.

    Θ's FP32 bits, as integers, fill K blocks of R = 255 rows and C = 256 columns, with zeros at the end:

        S_{k,j} = Σ_r bits_{k,r,j} mod 2^32, as int32
        digest = Σ_{k,j} mix(S_{k,j} + (k·C + j + 1) a) mod 2^64
        mix(x) = (y ^ (y >> 32)) c,  y = b x mod 2^64

    with the constants of SplitMix64 as a, b and c. `mix` is one to one, so whatever changes one sum alone, such as
    a flipped bit, always changes the digest. R is odd, so whatever adds the same to a whole column changes its
    sum. Missed are changes that keep every sum, such as two values exchanged in one column of a block, and of all
    others about one in 2^64. It is not cryptographic: it finds accidents, and nobody who chooses Θ to deceive it.

    Args:
        outer_N: flat FP32.

    >>> f"{outer_digest(torch.arange(3.0)):016x}", outer_digest(torch.empty(0))
    ('6c597b25decc919c', 0)
    """
    compiled = native() if outer_N.device.type == "cpu" else None
    if compiled is not None and compiled.has("outer_digest"):
        return compiled.outer_digest(outer_N.detach().contiguous(), _BLOCK)
    return int(outer_digest_on_device(outer_N).item()) % (1 << 64)


def outer_digest_on_device(outer_N: Tensor) -> Tensor:
    """`outer_digest` on the device of Θ: its 64 bits as int64 (1). The host reads nothing."""
    bits_N = outer_N.detach().contiguous().view(torch.int32)
    whole = bits_N.numel() // _BLOCK * _BLOCK
    blocks = [bits_N[:whole]]
    if whole < bits_N.numel():
        blocks.append(torch.nn.functional.pad(bits_N[whole:], (0, whole + _BLOCK - bits_N.numel())))
    # In int32 torch makes no copy of Θ: in int64 it would make one of twice its size.
    sums = [block.view(-1, _ROWS, _COLUMNS).sum(1, dtype=torch.int32) for block in blocks if block.numel()]
    sums_KC = torch.cat(sums).view(-1) if sums else bits_N
    place_KC = torch.arange(1, sums_KC.numel() + 1, dtype=torch.int64, device=bits_N.device)
    mixed_KC = (place_KC * _signed(_STEP) + sums_KC) * _signed(_FIRST)
    mixed_KC ^= (mixed_KC >> 32) & 0xFFFFFFFF
    return (mixed_KC * _signed(_SECOND)).sum(0, keepdim=True)


def _signed(bits: int) -> int:
    """64 bits as the int64 that torch multiplies by; its products wrap."""
    return bits - (1 << 64) if bits >> 63 else bits


def parameters_hash(parameters: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor] = Tensor.detach) -> str:
    """SHA-256 over the FP32 bits of parameters, in the order of their names.

    Args:
        parameters: by name; floats of any dtype and device.
        gather: makes the whole of a parameter that is sharded.
    """
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(gather(parameters[name]).detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()
