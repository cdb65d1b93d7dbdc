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

GOALS = {
    "e3m0": (0.7, 0.85),
    **dict.fromkeys(("fp32", "bf16", "fp16"), (0.9, 0.9)),
    "topk": (0.2, 0.2),
    **dict.fromkeys(("feddropout", "dare"), (0.5, 0.5)),
}
"""Encode, and decode and add, over a copy."""
PROGRAMS = {
    "e3m0": ("_UNPACKED", ((512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8))),
    "int8": ("_UNPACKED", ((1024, 2), (1024, 4), (2048, 4), (4096, 8))),
    **dict.fromkeys(("bf16", "feddropout"), ("_SIZE", ((512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 8)))),
    "topk": ("_SIZE", ((512, 4), (2048, 4), (4096, 8))),
}
"""For a codec, the constant of `kernels.gpu` that is the elements of a program; numbers and warps to try."""


def measurements(place: Place) -> Measurements:
    specs = ["e3m0", *(spec for spec in CODECS if spec != "e3m0")]
    return {
        **{spec: partial(_codec, place, spec) for spec in specs},
        **{f"programs of {spec}": partial(_programs, place, spec) for spec in PROGRAMS},
        "histograms of topk": partial(_histograms, place),
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
        with patch.multiple(gpu, **{constant: elements, "_OPTIONS": options, "_UNPACK_OPTIONS": options}):
            speeds = _codec(place, spec)
        row[f"{elements} elements, {warps} warps"] = speeds["encode_of_copy"], speeds["decode_add_of_copy"]
    return row


def _histograms(place: Place) -> Row:
    """Top-K over a copy with other numbers of histograms."""
    row: Row = {}
    for number in (1, 8, 256):
        with patch.object(gpu, "_HISTOGRAMS", number):
            row[str(number)] = _codec(place, "topk")["encode_of_copy"]
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
