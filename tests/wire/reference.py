"""The wire format in NumPy, written from docs/reference/wire-format.md alone; shares nothing with diloco.wire.

Floats are quantised by trying every value of the format, in float64, where the distances near a tie are exact. A
format lists its magnitudes in ascending order, so that an index is the code without its sign.
"""

import math
import struct
import zlib
from typing import NamedTuple

import numpy as np
import xxhash

f32 = np.float32
Key = tuple[int, ...]  # Seed, fragment, round, replica, share, and shard where it is not 0.


def encode(
    spec: str, delta: np.ndarray, key: Key = (0, 0, 0, 0, 0), base: int = 0, outer: np.ndarray | None = None
) -> bytes:
    """The payload of Δ: header and body; `outer` are the outer parameters, if they are known."""
    if delta.dtype != f32 or delta.ndim != 1 or not np.isfinite(delta).all():
        raise ValueError("Δ must be a finite FP32 vector")
    name, options = _parse(spec)
    if name == "pulse" and outer is not None:
        cast = _as_bf16 if options["mask"] == "bf16" else np.copy
        with np.errstate(over="ignore"):
            delta = np.where(cast(outer - delta) != cast(outer), delta, f32(0))
    return sealed(
        _header(name, options, len(delta)) + struct.pack("<Q", base), _encode_body(name, options, delta, key)
    )


def decode(spec: str, payload: bytes, num_elements: int, key: Key = (0, 0, 0, 0, 0)) -> np.ndarray:
    """The N elements that a payload stands for."""
    name, options = _parse(spec)
    header = _header(name, options, num_elements)
    if payload[:16] != header:
        raise ValueError(f"expected the header {header.hex()}, not {payload[:16].hex()}")
    if len(payload) != 32 + _body_bytes(name, options, num_elements):
        raise ValueError(f"{len(payload)} bytes are not a payload of {num_elements} elements of {spec}")
    if payload != sealed(payload[:24], payload[32:]):
        raise ValueError(f"another checksum than {payload[24:32].hex()}")
    return _decode_body(name, options, payload[32:], num_elements, key)


def sealed(header: bytes, body: bytes) -> bytes:
    """A payload: 24 bytes of header, the checksum, the body."""
    return header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header + body)) + body


DEFAULTS = {
    "fp32": {},
    "bf16": {},
    "fp16": {},
    "e4m3": {"block": 256},
    "e5m2": {"block": 256},
    "e2m1": {"block": 32},
    "e3m0": {"block": 256},
    "int8": {"block": 256},
    "int4": {"block": 256},
    "int2": {"block": 256},
    "topk": {"density": 0.05, "values": "fp32"},
    "feddropout": {"density": 0.05, "values": "fp32"},
    "dare": {"density": 0.05, "values": "fp32"},
    "sparseloco": {"block": 4096, "k": 64},
    "pulse": {"density": 0.05, "values": "fp32", "mask": "bf16"},
}
BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e3m0": 4, "int8": 8, "int4": 4, "int2": 2}


def _parse(spec: str) -> tuple[str, dict]:
    """Name and options, in the order of the document's table, `stochastic` last."""
    name, _, text = spec.partition(":")
    options = dict(DEFAULTS[name])
    if name in BITS:
        options["stochastic"] = False
    read = {
        "block": int,
        "k": int,
        "density": float,
        "values": str,
        "mask": str,
        "stochastic": {"true": True, "false": False}.__getitem__,
    }
    for option in text.split(",") if text else []:
        key, _, value = option.partition("=")
        if key not in options:
            raise ValueError(f"{name} has no option {key}")
        options[key] = read[key](value)
    if name in BITS and (options["block"] < 2 or options["block"] * BITS[name] % 8):
        raise ValueError(f"a block of {options['block']} is not at least 2 elements and whole bytes")
    return name, options


def _header(name: str, options: dict, N: int) -> bytes:
    """Magic, the format text's CRC-32, N; the base and the checksum follow."""
    text = ",".join(f"{option}={value}" for option, value in options.items() if option != "stochastic")
    text = f"{name}:{text}" if text else name
    return b"DLC4" + struct.pack("<IQ", zlib.crc32(text.encode("ascii")), N)


def _body_bytes(name: str, options: dict, N: int) -> int:
    """The length of a body."""
    if name == "sparseloco":
        k = sum(_num_per_block(options, N))
        return sum(_places_bytes(k, N)) + 4 * math.ceil(N / options["block"]) + math.ceil(k / 4)
    if name in ("topk", "pulse", "feddropout", "dare"):
        k = _num_values(name, options["density"], N)
        places = sum(_places_bytes(k, N)) if name in ("topk", "pulse") else 0
        return places + _body_bytes(options["values"], DEFAULTS[options["values"]], k)
    if name in BITS:
        return math.ceil(N / options["block"]) * (4 if name in Q else 1) + math.ceil(N * BITS[name] / 8)
    return {"fp32": 4, "bf16": 2, "fp16": 2}[name] * N


def _encode_body(name: str, options: dict, x: np.ndarray, key: Key) -> bytes:
    """A body, given the elements."""
    if name == "fp32":
        return x.astype("<f4").tobytes()
    if name in ("bf16", "fp16"):
        return _nearest_codes(x, 1.0, FORMATS[name]).astype("<u2").tobytes()
    if name in BITS:
        return _encode_blocks(name, options, x, key)

    if name == "sparseloco":
        return _encode_largest_of_blocks(options, x)
    N, k = len(x), _num_values(name, options["density"], len(x))
    has_places = name in ("topk", "pulse")
    by_magnitude = np.argsort(-np.abs(x), kind="stable")
    places = np.sort(by_magnitude[:k]) if has_places else _mask(options["density"], N, key)[:k]
    values = np.zeros(k, f32)
    values[: len(places)] = x[places]
    if name == "dare":
        with np.errstate(over="ignore"):
            values = np.clip(values * f32(1 / options["density"]), -LARGEST, LARGEST)
    body = _encode_body(options["values"], _parse(options["values"])[1], values, key)
    return _elias_fano(places, N) + body if has_places else body


def _decode_body(name: str, options: dict, body: bytes, N: int, key: Key) -> np.ndarray:
    """The elements, given a body of the right length."""
    if name == "fp32":
        x = np.frombuffer(body, "<f4").astype(f32)
        if not np.isfinite(x).all():
            raise ValueError("a value that is not written")
        return x
    if name in ("bf16", "fp16"):
        return _values(np.frombuffer(body, "<u2").astype(int), 1.0, FORMATS[name])
    if name in BITS:
        return _decode_blocks(name, options, body, N)

    if name == "sparseloco":
        return _decode_largest_of_blocks(options, body, N)
    k = _num_values(name, options["density"], N)
    if name in ("topk", "pulse"):
        length = sum(_places_bytes(k, N))
        places, body = _elias_fano_places(body[:length], k, N), body[length:]
    else:
        places = _mask(options["density"], N, key)[:k]
    x = np.zeros(N, f32)
    x[places] = _decode_body(options["values"], _parse(options["values"])[1], body, k, key)[: len(places)]
    return x


class Format(NamedTuple):
    """A floating-point format's magnitudes, and where its sign, minimum exponent and mantissa are."""

    magnitudes: np.ndarray
    sign: int
    e_min: int
    mantissa_bits: int
    E: int  # ⌊log2 of the largest magnitude⌋.


def _ieee(exponent_bits: int, bias: int, mantissa_bits: int, largest_code: int) -> Format:
    """Sign, exponent e, mantissa m, from the highest bit down; e = 0 are zero and the subnormals."""
    e, m = np.divmod(np.arange(largest_code + 1), 2**mantissa_bits)
    fraction = m / 2.0**mantissa_bits
    magnitudes = np.where(e == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (e - bias))
    E = _floor_log2(magnitudes[-1])
    return Format(magnitudes, 2 ** (exponent_bits + mantissa_bits), 1 - bias, mantissa_bits, E)


def _floor_log2(x: float) -> int:
    """⌊log2 x⌋, exactly."""
    return math.frexp(x)[1] - 1


FORMATS = {
    "bf16": _ieee(8, 127, 7, 0x7F7F),
    "fp16": _ieee(5, 15, 10, 0x7BFF),
    "e4m3": _ieee(4, 7, 3, 0x7E),
    "e5m2": _ieee(5, 15, 2, 0x7B),
    "e2m1": _ieee(2, 1, 1, 0x7),
    "e3m0": Format(np.array([0.0] + [2.0 ** (k - 7) for k in range(1, 8)]), 8, -6, 0, 0),
}
SCALES = [2.0 ** (b - 127) for b in range(255)]
Q = {"int8": 127, "int4": 7, "int2": 1}
LARGEST = np.finfo(f32).max
MOST_SCALE = {"int8": f32(float.fromhex("0x1.020406p+121")), "int4": LARGEST / f32(7), "int2": LARGEST}


def _nearest(x: np.ndarray, ascending: np.ndarray, ties: str) -> np.ndarray:
    """Indices of the nearest of the ascending values; of two equally near, the "even" or the "larger" index."""
    x = np.minimum(x, ascending[-1])
    above = np.searchsorted(ascending, x)
    below = np.maximum(above - 1, 0)
    to_below, to_above = x - ascending[below], ascending[above] - x
    wins_ties = above % 2 == 0 if ties == "even" else True
    return np.where((to_above < to_below) | ((to_above == to_below) & wins_ties), above, below)


def _nearest_codes(x: np.ndarray, X: float, form: Format) -> np.ndarray:
    """Codes of x/X, to nearest; ties to the larger in e3m0, else to even."""
    ties = "larger" if form is FORMATS["e3m0"] else "even"
    return _signed(_nearest(np.abs(x.astype(np.float64)) / X, form.magnitudes, ties), x, form)


def _stochastic_codes(x: np.ndarray, X: float, form: Format, u: np.ndarray) -> np.ndarray:
    """Codes of x/X: one of the two neighbours, the upper where the fraction and u carry; at most the largest."""
    k = []
    for magnitude, u_i in zip(np.abs(x.astype(np.float64)) / X, u, strict=True):
        exponent = max(_floor_log2(magnitude), form.e_min) if magnitude else form.e_min
        step = 2.0 ** (exponent - form.mantissa_bits)
        rounded = math.floor(f32(magnitude / step) + u_i) * step
        (code,) = np.flatnonzero(form.magnitudes == min(rounded, form.magnitudes[-1]))
        k.append(code)
    return _signed(np.array(k, int), x, form)


def _signed(k: np.ndarray, x: np.ndarray, form: Format) -> np.ndarray:
    """The codes k with the signs of x; only e3m0's zero has none."""
    signed = np.signbit(x) & (k > 0) if form is FORMATS["e3m0"] else np.signbit(x)
    return k + form.sign * signed


def _values(codes: np.ndarray, X: float, form: Format) -> np.ndarray:
    """The values of codes; e3m0's code 8 is zero."""
    k = codes % form.sign
    if (k >= len(form.magnitudes)).any():
        raise ValueError("a code that is not written")
    values = np.where(codes >= form.sign, -1.0, 1.0) * form.magnitudes[k] * X
    if form is FORMATS["e3m0"]:
        values[k == 0] = 0.0
    return values.astype(f32)


def _scale_byte(name: str, A: float, stochastic: bool) -> int:
    """The scale of a block with the largest magnitude A."""
    form = FORMATS[name]
    if stochastic:
        if name == "e3m0" and 0 < A < 2.0**-126:
            return 1
        enough = [b for b in range(255) if form.magnitudes[-1] * SCALES[b] >= A]
        return min(enough[0] if enough else 254, 254 - form.E)
    if A == 0:
        return 0
    if name == "e3m0":
        return int(_nearest(np.array(A), np.array(SCALES), "larger"))
    return max(_floor_log2(A) - form.E + 127, 0)


def _encode_blocks(name: str, options: dict, x: np.ndarray, key: Key) -> bytes:
    """Every block's scale, then all codes."""
    K, stochastic = options["block"], options["stochastic"]
    u = (_random(len(x), key, key[3] + 1) >> np.uint64(8)).astype(f32) * f32(2.0**-24)
    scales, codes = b"", [np.zeros(0, int)]
    for start in range(0, len(x), K):
        x_block, u_block = x[start : start + K], u[start : start + K]
        A = np.abs(x_block).max()
        if name in Q:
            s = min(f32(A / f32(Q[name])), MOST_SCALE[name])
            scales += struct.pack("<f", s)
            codes.append(_integers(x_block, s, Q[name], u_block if stochastic else None) % 2 ** BITS[name])
        else:
            b = _scale_byte(name, float(A), stochastic)
            scales += bytes([b])
            if stochastic:
                codes.append(_stochastic_codes(x_block, SCALES[b], FORMATS[name], u_block))
            else:
                codes.append(_nearest_codes(x_block, SCALES[b], FORMATS[name]))
    return scales + _pack(np.concatenate(codes), BITS[name])


def _integers(x: np.ndarray, s: np.float32, limit: int, u: np.ndarray | None) -> np.ndarray:
    """q = x/s as an integer, to nearest, or by u."""
    if s == 0:
        return np.zeros(len(x), int)
    quotient = x / s
    assert quotient.dtype == f32
    q = np.rint(quotient) if u is None else np.floor(quotient + u)
    return q.clip(-limit, limit).astype(int)


def _decode_blocks(name: str, options: dict, body: bytes, N: int) -> np.ndarray:
    K, bits = options["block"], BITS[name]
    num_blocks = math.ceil(N / K)
    scales = np.frombuffer(body, "<f4" if name in Q else "u1", num_blocks)
    codes = _unpack(body[scales.nbytes :], bits, N)
    x = np.zeros(N, f32)
    for i, scale in enumerate(scales):
        block = slice(i * K, (i + 1) * K)
        if name in Q:
            if not 0 <= scale <= MOST_SCALE[name]:
                raise ValueError(f"a scale of {scale}")
            if (codes[block] == 2 ** (bits - 1)).any():
                raise ValueError("a code that is not written")
            q = np.where(codes[block] < 2 ** (bits - 1), codes[block], codes[block] - 2**bits)
            x[block] = q.astype(f32) * scale
        else:
            if scale > 254 - FORMATS[name].E:
                raise ValueError(f"a scale byte of {scale}")
            x[block] = _values(codes[block], SCALES[scale], FORMATS[name])
    return x


def _pack(codes: np.ndarray, bits: int) -> bytes:
    """Codes of 8, 4 or 2 bits, the first in a byte's lowest bits."""
    each = np.arange(bits)
    return np.packbits(codes[:, None] >> each & 1, bitorder="little").tobytes()


def _unpack(packed: bytes, bits: int, N: int) -> np.ndarray:
    each = np.unpackbits(np.frombuffer(packed, np.uint8), count=N * bits, bitorder="little")
    return (each.reshape(N, bits).astype(int) << np.arange(bits)).sum(1)


def _as_bf16(x: np.ndarray) -> np.ndarray:
    """The nearest BF16 value of each element, infinity beyond the largest."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(f32)


def _num_per_block(options: dict, N: int) -> list[int]:
    """The number of elements that each block keeps."""
    K, k = options["block"], options["k"]
    return [k] * (N // K) + [math.ceil(N % K * k / K)] * (N % K > 0)


def _encode_largest_of_blocks(options: dict, x: np.ndarray) -> bytes:
    """The places, each block's bounds, and two bits for each element."""
    places, bounds, codes = [], b"", []
    for i, k in enumerate(_num_per_block(options, len(x))):
        block = x[i * options["block"] : (i + 1) * options["block"]]
        columns = np.sort(np.argsort(-np.abs(block), kind="stable")[:k])
        places.append(columns + i * options["block"])
        sizes = np.abs(block[columns])
        bound = _nearest_codes(np.array([sizes.min(), sizes.max()]), 1.0, FORMATS["bf16"])
        bounds += bound.astype("<u2").tobytes()
        a, c = _values(bound, 1.0, FORMATS["bf16"])
        middle = f32(a + f32(f32(c - a) * f32(0.5)))
        codes.append(2 * np.signbit(block[columns]) + (sizes >= middle))
    if not places:
        return b""
    return _elias_fano(np.concatenate(places), len(x)) + bounds + _pack(np.concatenate(codes), 2)


def _decode_largest_of_blocks(options: dict, body: bytes, N: int) -> np.ndarray:
    x, kept = np.zeros(N, f32), _num_per_block(options, N)
    start, k = sum(_places_bytes(sum(kept), N)), sum(kept)
    places = _elias_fano_places(body[:start], k, N)
    bounds = _values(np.frombuffer(body, "<u2", 2 * len(kept), start).astype(int), 1.0, FORMATS["bf16"])
    codes = _unpack(body[start + 4 * len(kept) :], 2, k)
    for i, ((a, c), end) in enumerate(zip(bounds.reshape(-1, 2), np.cumsum(kept), strict=True)):
        mine = slice(end - kept[i], end)
        if (places[mine] // options["block"] != i).any() or not 0 <= a <= c:
            raise ValueError("places or bounds that are not written")
        quarter = f32(f32(c - a) * f32(0.25))
        levels = np.array([f32(a + quarter), f32(c - quarter)], f32)
        x[places[mine]] = np.where(codes[mine] >= 2, -1, 1).astype(f32) * levels[codes[mine] % 2]
    return x


def _num_values(name: str, density: float, N: int) -> int:
    mean = density * N
    return min(math.ceil(mean) if name in ("topk", "pulse") else math.ceil(mean + 6 * math.sqrt(mean)) + 16, N)


def _mask(density: float, N: int, key: Key) -> np.ndarray:
    """The places of the random subset of feddropout and dare: the same for all replicas."""
    seed, fragment, round_, _, share, shard = (*key, 0)[:6]
    counter = [np.array([word], np.uint64) for word in (0, fragment + 65536 * share, round_, 65536 * shard)]
    a, b, _, _ = (word.astype(np.uint32) for word in _philox(counter, seed % 2**32, seed >> 32))
    h = np.arange(N, dtype=np.uint32) ^ a  # products of uint32 are taken modulo 2^32
    h = (h ^ h >> 16) * np.uint32(0x7FEB352D)
    h = h ^ b
    h = (h ^ h >> 15) * np.uint32(0x846CA68B)
    return np.flatnonzero(h < density * 2**32)


def _low_bits(k: int, N: int) -> int:
    return _floor_log2(N // k)


def _places_bytes(k: int, N: int) -> tuple[int, int]:
    """The bytes of the low bits, and of the rest of the places."""
    if N == 0:
        return 0, 0
    l = _low_bits(k, N)  # noqa: E741
    return math.ceil(k * l / 8), math.ceil((k + (N - 1) // 2**l) / 8)


def _elias_fano(places: np.ndarray, N: int) -> bytes:
    if N == 0:
        return b""
    k = len(places)
    l = _low_bits(k, N)  # noqa: E741
    low, high = np.zeros(k * l, int), np.zeros(k + (N - 1) // 2**l, int)
    for j, p in enumerate(places):
        low[j * l : (j + 1) * l] = [p >> bit & 1 for bit in range(l)]
        high[j + p // 2**l] = 1
    return np.packbits(low, bitorder="little").tobytes() + np.packbits(high, bitorder="little").tobytes()


def _elias_fano_places(packed: bytes, k: int, N: int) -> np.ndarray:
    if N == 0:
        return np.zeros(0, int)
    l = _low_bits(k, N)  # noqa: E741
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").astype(int)
    start = 8 * _places_bytes(k, N)[0]
    high = np.flatnonzero(bits[start : start + k + (N - 1) // 2**l])
    if len(high) != k:
        raise ValueError(f"{len(high)} places, not {k}")
    low = (bits[: k * l].reshape(k, l) << np.arange(l)).sum(1)
    places = (high - np.arange(k)) * 2**l + low
    if (np.diff(places) <= 0).any() or (places >= N).any():
        raise ValueError("places that are not ascending ones below N")
    return places


def _random(N: int, key: Key, who: int) -> np.ndarray:
    """32 random bits for each of N elements."""
    seed, fragment, round_, _, share, shard = (*key, 0)[:6]
    each = np.ones(math.ceil(N / 4), np.uint64)
    i = np.arange(math.ceil(N / 4), dtype=np.uint64)
    counter = [i, (fragment + 65536 * share) * each, round_ * each, (who + 65536 * shard) * each]
    return np.stack(_philox(counter, seed % 2**32, seed >> 32), axis=1).reshape(-1)[:N]


def _philox(counter: list[np.ndarray], key_0: int, key_1: int) -> list[np.ndarray]:
    """Philox4x32-10: four words of 32 bits, in uint64, for each counter of four words."""
    c0, c1, c2, c3 = counter
    low_word, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        product_0, product_1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = product_1 >> shift ^ c1 ^ np.uint64(key_0), product_0 >> shift ^ c3 ^ np.uint64(key_1)
        c1, c3 = product_1 & low_word, product_0 & low_word
        key_0, key_1 = (key_0 + 0x9E3779B9) % 2**32, (key_1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]
