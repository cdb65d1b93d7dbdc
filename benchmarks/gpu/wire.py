"""The codecs' speed on the device, beside a copy there, and what the host does with a payload."""

import time
from functools import partial
from unittest.mock import patch

import torch

from diloco.wire import CODECS, Key, codec
from diloco.wire.formats import HEADER_BYTES
from diloco.wire.kernels import gpu
from diloco.wire.payload import checksum
from gpu.place import Measurements, Place, Row

GOAL = 0.7


def measurements(place: Place) -> Measurements:
    specs = ["e3m0", *(spec for spec in CODECS if spec != "e3m0")]
    return {
        **{spec: partial(_codec, place, spec) for spec in specs},
        **{f"programs of {spec}": partial(_programs, place, spec) for spec in ("e3m0", "int8", "e2m1")},
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
        "ok": place.goal(min(encode, decode) >= GOAL * copy) if spec == "e3m0" else None,
    }


def _programs(place: Place, spec: str) -> Row:
    """Encode, and decode and add, over a copy, with other numbers of elements and warps a program."""
    row: Row = {}
    pairs = [(512, 1), (1024, 1), (1024, 2), (1024, 4), (2048, 1), (2048, 2), (2048, 4), (4096, 4), (4096, 8)]
    for elements, warps in [*pairs, (8192, 8)]:
        with patch.object(gpu, "_ELEMENTS", elements), patch.dict(gpu._OPTIONS, num_warps=warps):
            speeds = _codec(place, spec)
        row[f"{elements} elements, {warps} warps"] = speeds["encode_of_copy"], speeds["decode_add_of_copy"]
    return row


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
