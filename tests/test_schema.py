import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import FileError, UserError
from diloco.schema import Count, Seconds, converted, decoded, read_json


@dataclass(frozen=True, kw_only=True)
class Part:
    count: Count
    seconds: Seconds = 0.0
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.kind == "b" and not self.count:
            raise UserError("kind=b needs a count above 0", "count")


@dataclass(frozen=True, kw_only=True)
class Whole:
    part: Part
    parts: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    path: Path | None = None
    anything: Any = None


TEXT = '{"part": {"count": 1, "seconds": 2}, "parts": {"x": [{"count": 0}]}, "path": "a/b"}'


def test_json_becomes_dataclasses():
    parts = {"x": (Part(count=0),)}
    assert decoded(TEXT, Whole, source="f") == Whole(
        part=Part(count=1, seconds=2.0), parts=parts, path=Path("a/b")
    )
    assert converted(json.loads(TEXT), Whole, source="f") == decoded(TEXT.encode(), Whole, source="f")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"part": {"count": -1}}', "part.count: expected int >= 0"),
        ('{"part": {"count": 9223372036854775808}}', "part.count: expected int <= 9223372036854775807"),
        ('{"part": {"count": "1"}}', "part.count: expected int, got str"),
        ('{"part": {"count": true}}', "part.count: expected int, got bool"),
        ('{"part": {"count": 1, "seconds": NaN}}', "JSON is malformed"),
        ('{"part": {"count": 1, "seconds": 1e999}}', "part.seconds: number out of range"),
        ('{"part": {"count": 1, "kind": "c"}}', "part.kind: invalid enum value 'c'"),
        ('{"part": {"count": 0, "kind": "b"}}', "kind=b needs a count above 0"),
        ('{"part": {"count": 1}, "parts": {"x": [{"count": 1, "z": 1}]}}', "unknown field parts.x.0.z"),
        ('{"part": {"count": 1, "count": 2}}', "the key 'count' stands twice"),
        ('{"part": {"count": 1}, "path": "\\u0000"}', "path: expected a path"),
        ('{"part": {"count": 1}, "path": "\\ud800"}', "truncated"),
        ('{"part": {}}', "object missing required field count"),
        ('{"part": {"count": 1}, "anything": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ("[" * 100_000, "expected object, got array"),
        ("", "truncated"),
        ("\ufeff{}", "JSON is malformed"),
    ],
)
def test_what_the_fields_do_not_allow_is_refused_with_source_and_place(text, reason):
    with pytest.raises(FileError, match=r"^run/config\.json can't be read: ") as refusal:
        decoded(text, Whole, source="run/config.json")
    assert reason in str(refusal.value)


def test_the_refusal_of_a_dataclass_keeps_the_fields_that_it_names():
    with pytest.raises(FileError) as refusal:
        decoded('{"part": {"count": 0, "kind": "b"}}', Whole, source="f")
    assert refusal.value.fields == ("count",)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(FileError, match="codec can't decode byte 0xff"):
        decoded(b'{"\xff": 1}', dict[str, int], source="f")


def test_a_file_is_read_up_to_a_size(tmp_path):
    path = tmp_path / "part.json"
    with pytest.raises(FileError, match=r"part\.json can't be read: No such file"):
        read_json(path, Part)
    path.write_text('{"count": 3}')
    assert read_json(path, Part, most_bytes=12) == Part(count=3)
    with pytest.raises(FileError, match="more than 11 bytes"):
        read_json(path, Part, most_bytes=11)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(settings.get_profile("hostile"))
@given(values, st.sampled_from(["part", "parts", "path", "count", "anything"]), values)
def test_any_json_is_a_value_of_the_kind_or_refused(whole, name, value):
    """The reader of the standard library and msgspec's agree about all that is accepted."""
    for candidate in (whole, {"part": {"count": 1}} | {name: value}, {"part": {"count": 1, name: value}}):
        try:
            read = decoded(json.dumps(candidate), Whole, source="f")
        except FileError:
            continue
        assert isinstance(read, Whole) and 0 <= read.part.count < 2**63
