from dataclasses import dataclass, field
from typing import Annotated

import pytest
import tyro

from diloco.cli._flags import fields_of, flag, flags, spelled
from diloco.errors import ReplicaFailedError, UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.training.config.config import TrainConfig


@dataclass(frozen=True)
class Inner:
    sync_every: int = 30
    freeze: bool = False


@dataclass(frozen=True)
class Config:
    recipe: tyro.conf.Suppress[str] = ""
    seed: int = 0
    diloco: Inner = field(default_factory=Inner)


def command(
    run: tyro.conf.Positional[str], config: Annotated[Config, tyro.conf.arg(name="")], limit: int = 1
) -> None:
    """A command."""


def test_a_commands_fields_are_those_with_a_flag():
    assert list(fields_of(command)) == ["seed", "diloco.sync_every", "diloco.freeze", "limit"]


def test_the_fields_of_a_models_family_have_flags():
    assert "num_heads" in fields_of(DecoderConfig)
    assert flag("model.num_heads", set(fields_of(TrainConfig))) == "--model.num-heads"


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("seed", "--seed"),
        ("diloco.sync_every", "--diloco.sync-every"),
        ("sync_every", "--diloco.sync-every"),
        ("train.diloco.sync_every", "--diloco.sync-every"),
        ("data.limit", "--limit"),
        ("diloco.freeze", "--diloco.freeze"),
        ("every", "every"),
        ("run", "run"),
        ("recipe", "recipe"),
    ],
)
def test_a_setting_is_spelled_as_the_flag_with_its_last_words(field, expected):
    assert flag(field, set(fields_of(command))) == expected


def test_a_setting_that_two_flags_may_mean_stays_as_it_is():
    assert flag("every_steps", {"checkpoint.every_steps", "evaluation.every_steps"}) == "every_steps"


@pytest.mark.parametrize(
    "error",
    [
        UserError("diloco.sync_every=0 with run=1", "diloco.sync_every", "run"),
        ReplicaFailedError("diloco.sync_every=0 with run=1", exit_code=2, fields=("diloco.sync_every", "run")),
    ],
)
def test_an_error_keeps_its_class_and_names_flags(error):
    with pytest.raises(type(error), match=r"^--diloco.sync-every=0 with run=1$") as raised, spelled(command):
        raise error
    assert raised.value is error and error.fields == ("diloco.sync_every", "run")


def test_flags_give_settings_their_values():
    settings = {"data.train": ("a.txt", "b c.txt"), "diloco.freeze": True, "compile": False, "num_tokens": 7}
    assert [word for words in flags(settings).values() for word in words] == [
        *("--data.train", "a.txt", "b c.txt"),
        *("--diloco.freeze", "--no-compile", "--num-tokens", "7"),
    ]
