import hashlib
import json
from dataclasses import dataclass, field, replace

import pytest

from diloco.errors import UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.training.config.config import (
    DilocoConfig,
    TrainConfig,
    differences,
    differences_from_defaults,
    fields_with,
    from_json,
    to_json,
    trait,
)
from diloco.training.config.recipes import tiny

CONFIG = replace(tiny(), diloco=DilocoConfig(sync_every=10, overlap_steps=(0, 3), offsets=(0, 1, 2)))


def test_json_gives_the_config_back():
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(CONFIG)))) == CONFIG


@dataclass(frozen=True, kw_only=True)
class OtherConfig(DecoderConfig):
    """A family of its own."""

    num_experts: int = 1


def test_a_model_of_another_family_comes_back_and_the_decoders_json_names_none():
    assert "family" not in to_json(CONFIG)["model"]
    other = replace(CONFIG, model=OtherConfig(num_layers=4, num_heads=2, width=32, num_experts=8))
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(other)))) == other
    assert differences(CONFIG, other).keys() == {"model"}
    assert differences_from_defaults(other)["model.family"] == f"{__name__}.OtherConfig"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_replicas": "two"}, "num_replicas: expected int, got str"),
        ({"num_replicas": 0}, "num_replicas must be at least 1, not 0"),
        ({"num_replicas": 1 << 40}, "num_replicas must be at most 65536"),
        ({"diloco": {"fragments": "foo"}}, "diloco.fragments: invalid enum value 'foo'"),
        ({"method": "foo"}, "method: invalid enum value 'foo'"),
        ({"model": 3}, "it has no object as model"),
        ({"model": {"num_layers": 1}}, "model: object missing required field width"),
        ({"model": {"family": "nowhere.Config"}}, "model.family='nowhere.Config' is not known here"),
        ({"model": {"family": []}}, r"model.family='\[\]' is not known here"),
        ({"diloco": {"overlap_steps": [1, "x"]}}, r"diloco.overlap_steps\[1\]: expected int, got str"),
        ({"compile": 1}, "compile: expected bool, got int"),
        ({"runs": 3}, "runs: expected a path, got 3"),
        ({"optimizer": {"momentum": 0.5}}, r"unknown field optimizer\.momentum"),
    ],
)
def test_json_that_is_no_config_is_refused_with_the_field(change, sentence):
    with pytest.raises(UserError, match=sentence):
        from_json(TrainConfig, to_json(CONFIG) | change)


def test_differences_name_nested_fields():
    one, other = tiny(), replace(tiny(), seed=1, diloco=replace(tiny().diloco, wire="bf16"))
    assert differences(one, other) == {"seed": (0, 1), "diloco.wire": (None, "bf16")}


def test_fields_with_a_trait_are_named_with_its_value():
    @dataclass
    class Inner:
        one: int = field(default=1, metadata=trait(planned=True))
        two: int = 2

    @dataclass
    class Outer:
        inner: Inner
        whole: Inner = field(metadata=trait(column=True))
        other: int = field(metadata=trait(planned=True, column=True))

    Outer.__annotations__ |= {"inner": Inner, "whole": Inner}
    assert fields_with(Outer, "planned") == {"inner.one": True, "whole.one": True, "other": True}
    assert fields_with(Outer, "column") == {"whole": True, "other": True}
    with pytest.raises(AssertionError, match="no field of Outer has the trait 'colum'"):
        fields_with(Outer, "colum")


def test_a_new_field_with_a_default_changes_no_digest():
    @dataclass(frozen=True)
    class Before:
        size: int
        rate: float = 0.5

    @dataclass(frozen=True)
    class After:
        size: int
        rate: float = 0.5
        clip: float | None = None

    def digest(config) -> str:
        return hashlib.sha256(json.dumps(differences_from_defaults(config), sort_keys=True).encode()).hexdigest()

    assert differences_from_defaults(Before(3)) == {"size": 3}
    assert digest(Before(3, 0.25)) == digest(After(3, 0.25)) != digest(After(3, 0.25, 1.0))
