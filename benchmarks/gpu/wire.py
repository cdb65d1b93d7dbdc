"""The codecs' speed on the device, beside a copy there, and what the host does with a payload."""

import time
from functools import partial
from unittest.mock import patch

import torch

from diloco.wire import CODECS, Key, codec
from diloco.wire.formats import HEADER_BYTES
from diloco.wire.kernels import gpu
from diloco.wire.kernels.gpu import GpuSparse
from diloco.wire.kernels.native import native
from diloco.wire.kernels.native_sparse import NativeSparse
from diloco.wire.payload import checksum
from diloco.wire.sparse import TopK
from gpu.place import Measurements, Place, Row

GOALS = {
    "e3m0": (0.7, 0.85),
    "fp32": (0.9, 0.9 * 8 / 12),
    **dict.fromkeys(("bf16", "fp16"), (0.9, 0.9 * 8 / 10)),
    "topk": (0.2, 0.2),
    **dict.fromkeys(("feddropout", "dare"), (0.5, 0.5)),
}
"""Encode, and decode and add, over a copy, which moves 8 bytes an element; adding takes 8 and the body's."""
PROGRAMS = {
    "e3m0": ("_UNPACKED", ((256, 1), (256, 2), (512, 1), (512, 2), (512, 4), (1024, 8))),
    "bf16": ("_CAST", ((512, 2), (1024, 8), (2048, 8))),
    "feddropout": ("_SIZE", ((256, 1), (256, 2), (512, 2), (512, 4), (1024, 8))),
}
"""For a codec, the constant of `kernels.gpu` that is the elements of a program; numbers and warps to try."""


def measurements(place: Place) -> Measurements:
    specs = ["e3m0", *(spec for spec in CODECS if spec != "e3m0")]
    return {
        **{spec: partial(_codec, place, spec) for spec in specs},
        **{f"programs of {spec}": partial(_programs, place, spec) for spec in PROGRAMS},
        "parts of topk": partial(_parts_of_topk, place),
        "to the host": partial(_to_host, place),
    }


def _codec(place: Place, spec: str) -> Row:
    """GB/s of FP32 input, 4 bytes an element, as `diloco bench wire` gives it; without what the host does."""
    wire, num = codec(spec), place.size(1 << 28, 1 << 14)
    generator = torch.Generator(place.device).manual_seed(0)
    delta_N = 1e-3 * torch.randn(num, generator=generator, device=place.device)
    total_N = torch.zeros_like(delta_N)
    body = wire.encode(delta_N)[HEADER_BYTES:].clone()

    def gbyte_s(milliseconds: float) -> float:
        return round(4e-6 * num / milliseconds, 2)

    copy = gbyte_s(place.milliseconds(lambda: total_N.copy_(delta_N)))
    encode = gbyte_s(place.milliseconds(lambda: wire.packed(delta_N, Key())))
    decode = gbyte_s(place.milliseconds(lambda: wire.unpack(body, total_N, Key(), add=True)))
    return {
        "copy_gbyte_s": copy,
        "encode_gbyte_s": encode,
        "decode_add_gbyte_s": decode,
        "encode_of_copy": round(encode / copy, 3),
        "decode_add_of_copy": round(decode / copy, 3),
        "ok": place.goal(encode >= GOALS[spec][0] * copy and decode >= GOALS[spec][1] * copy)
        if spec in GOALS
        else None,
    }


def _programs(place: Place, spec: str) -> Row:
    """Encode, and decode and add, over a copy, with other numbers of elements and warps a program."""
    row: Row = {}
    constant, pairs = PROGRAMS[spec]
    for elements, warps in pairs:
        options = gpu._OPTIONS | {"num_warps": warps}
        with patch.multiple(
            gpu, **{constant: elements, **dict.fromkeys(("_OPTIONS", "_UNPACK_OPTIONS", "_CAST_OPTIONS"), options)}
        ):
            speeds = _codec(place, spec)
        row[f"{elements} elements, {warps} warps"] = speeds["encode_of_copy"], speeds["decode_add_of_copy"]
    return row


def _parts_of_topk(place: Place) -> Row:
    """Milliseconds of the parts of Top-K."""
    wire, num = TopK(), place.size(1 << 28, 1 << 14)
    delta_N = torch.randn(num, generator=torch.Generator(place.device).manual_seed(0), device=place.device)
    kernels, kept = (NativeSparse(native()) if place.dry else GpuSparse()), wire.num_values(num)
    place_k, kept_k, _ = kernels.largest(delta_N, kept)
    places = torch.empty(wire.places_bytes(num), dtype=torch.uint8, device=place.device)
    wire.pack_places(place_k, num, places)
    bad = torch.zeros((), dtype=torch.int32, device=place.device)
    parts = {
        "threshold": lambda: kernels._threshold(delta_N, kept, *([] if place.dry else [bad])),
        "largest": lambda: kernels.largest(delta_N, kept),
        "pack places": lambda: wire.pack_places(place_k, num, places),
        "unpack places": lambda: wire.unpack_places(places, num),
        "spread": lambda: wire.spread(kept_k, places, delta_N, Key(), add=True),
    }
    return {name: round(place.milliseconds(part), 3) for name, part in parts.items()}


def _to_host(place: Place) -> Row:
    """GB/s of a payload's bytes to pinned memory and back, to pageable memory, and of its checksum."""
    num = place.size(1 << 28, 1 << 16)
    there = torch.zeros(num, dtype=torch.uint8, device=place.device)
    pinned = torch.zeros(num, dtype=torch.uint8, pin_memory=not place.dry)
    pageable = torch.zeros(num, dtype=torch.uint8)
    start = time.perf_counter()
    checksum(pinned)
    seconds = time.perf_counter() - start
    ways = {
        "to_pinned": lambda: pinned.copy_(there, non_blocking=True),
        "from_pinned": lambda: there.copy_(pinned, non_blocking=True),
        "to_pageable": lambda: pageable.copy_(there),
    }
    speeds = {f"{way}_gbyte_s": round(1e-6 * num / place.milliseconds(copy), 2) for way, copy in ways.items()}
    return {**speeds, "checksum_gbyte_s": round(1e-9 * num / seconds, 2)}
