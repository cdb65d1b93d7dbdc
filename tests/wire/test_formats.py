import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wire.cases import NAMES, SPECS

from diloco.wire import CODECS, codec
from diloco.wire.formats import FORMATS, Blocks, Placed, Share, parse


def test_names_options_and_lengths_need_no_torch():
    code = (
        "import sys; from diloco.wire import formats; formats.parse('topk').spec; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_format_has_a_codec_and_its_tests():
    assert list(FORMATS) == list(CODECS) == NAMES
    assert all(issubclass(CODECS[name], FORMATS[name]) for name in FORMATS)


@pytest.mark.parametrize("spec", SPECS)
def test_a_format_and_its_codec_are_known_by_their_spec(spec):
    assert parse(parse(spec).spec) == parse(spec)
    assert codec(parse(spec).spec) == codec(spec) and codec(spec).spec == parse(spec).spec
    assert parse(spec.partition(":")[0]) == parse(f"{spec.partition(':')[0]}:")


def test_bits_a_value_are_those_of_the_document():
    page = Path(__file__).parents[2] / "docs" / "reference" / "wire-format.md"
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+\.\d\d) \|$", page.read_text(), re.MULTILINE)
    assert rows == [(name, f"{8e-6 * parse(name).payload_bytes(10**6):.2f}") for name in FORMATS]


@pytest.mark.parametrize("spec", SPECS)
def test_bits_a_value_are_a_long_bodys(spec):
    assert parse(spec).bits_per_value == pytest.approx(8e-18 * parse(spec).body_bytes(10**18), abs=1e-6)


def test_bits_a_value_by_hand():
    for name, kind in FORMATS.items():
        if issubclass(kind, Blocks):
            assert parse(f"{name}:block=64").bits_per_value == kind.bits + kind.scale_bytes / 8
        elif issubclass(kind, Share):
            # One place in 16 takes 4 low bits, its own bit of the vector, and one bit for every 16 places.
            places = (4 + 1 + 1) / 16 if issubclass(kind, Placed) else 0
            spec = parse(f"{name}:density=0.0625,values=bf16")
            assert spec.bits_per_value == pytest.approx(1 + places, rel=1e-12)
    # 64 of 4096: 6 low bits, 2 of the vector and 2 of the value each; two bounds of 16.
    assert parse("sparseloco").bits_per_value == pytest.approx((64 * (6 + 2 + 2) + 32) / 4096, rel=1e-12)


@settings(max_examples=50)
@given(st.integers(1, 2000), st.floats(1e-3, 1.0))
def test_a_place_costs_less_than_two_bits_more_than_its_information(length, density):
    topk = parse(f"topk:density={density}")
    kept = topk.num_values(length)
    assert 8 * topk.places_bytes(length) <= kept * (2 + np.log2(length / kept)) + 2 * 8


@pytest.mark.parametrize("name", ["feddropout", "dare"])
def test_a_mask_has_room_for_six_standard_deviations_more_than_its_mean(name):
    lengths = {0: 0, 1: 1, 100: 45, 10_000: 1_206, 10**6: 101_914}  # 10 + ⌈6·√10⌉ + 16 …
    spec = parse(f"{name}:density=0.1")
    assert {length: spec.num_values(length) for length in lengths} == lengths
    assert spec.payload_bytes(10**6) == 32 + 4 * 101_914
    assert parse(f"{name}:density=1").num_values(10**6) == 10**6


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fp8", r"'fp8' is not a codec: did you mean e4m3\? There are fp32, bf16, fp16, e4m3"),
        ("", r"'' is not a codec"),
        (
            "e3m0:blocks=128",
            r"'blocks=128' is not an option of e3m0, .* \(it has: block=INTEGER, stochastic=true\|false\)",
        ),
        ("e3m0:block=many", r"block must be INTEGER, not 'many'"),
        ("e3m0:stochastic=yes", r"stochastic must be true\|false, not 'yes'"),
        ("bf16:block=128", r"'block=128' is not an option of bf16, .* \(it has: none\)"),
        ("e3m0:block=0", r"block must be from 2 to 65536 elements, a multiple of 2, not 0"),
        ("e3m0:block=255", r"block must be from 2 to 65536 elements, a multiple of 2, not 255"),
        ("int2:block=6", r"int2: block must be .* a multiple of 4, not 6"),
        ("int8:block=65537", r"int8: block must be from 2 to 65536 elements, not 65537"),
        ("e3m0:block=64,block=128", r"'block=128' is not an option of e3m0, or given twice"),
        ("topk:density=0", r"topk: density must be from 2\^-32 to 1, not 0"),
        ("dare:density=1e-40", r"dare: density must be from 2\^-32 to 1, not 1e-40"),
        ("topk:density=1.5", r"topk: density must be from 2\^-32 to 1, not 1.5"),
        ("topk:density=nan", r"topk: density must be from 2\^-32 to 1, not nan"),
        ("topk:values=topk", r"topk: values=topk must be one of fp32, bf16"),
        ("pulse:mask=fp16", r"pulse:mask=fp16': mask must be bf16\|fp32, not 'fp16'"),
        (
            "sparseloco:k=63",
            r"sparseloco: k must be a multiple of 4 and at most block, .* not k=63 and block=4096",
        ),
        ("sparseloco:block=60", r"at most block, and block at most 8192, not k=64 and block=60"),
        ("sparseloco:block=8196", r"block at most 8192, not k=64 and block=8196"),
    ],
)
def test_a_wire_that_does_not_exist_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)
