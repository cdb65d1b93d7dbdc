"""Names of runs beside each other: the settings in which they differ."""

from dataclasses import replace
from pathlib import Path

from diloco.report.text import differing_settings
from diloco.training.config.recipes import recipe


def test_text_and_precision_are_settings_and_places_are_none():
    base = recipe("tiny")
    other = replace(base, precision="fp32", data=replace(base.data, train=("other.txt",)))
    assert differing_settings([base, other]) == {
        "data.train": [str(base.data.train), "('other.txt',)"],
        "precision": ["auto", "fp32"],
    }
    elsewhere = replace(base, name="x", runs=Path("there"), device="cpu", data=replace(base.data, cache=Path("c")))
    assert differing_settings([base, elsewhere]) == {}


def test_text_that_was_prepared_differently_is_known_by_its_directory():
    base = recipe("tiny")
    here, there, other = (
        replace(base, data=replace(base.data, prepared=Path(path))) for path in ("/a/0123", "/b/0123", "/a/4567")
    )
    assert differing_settings([here, there]) == {}
    assert differing_settings([here, other]) == {"data.prepared": ["0123", "4567"]}
