import pickle

import pytest

from diloco.errors import (
    CheckpointWriteError,
    DilocoError,
    ExchangeError,
    MissingLibraryError,
    ReplicaFailedError,
    UserError,
    exit_code_of,
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("num_tokens=7 is too few", "[num_tokens]=7 is too few"),
        ("evaluation.num_tokens=7 is too few", "[evaluation.num_tokens]=7 is too few"),
        ("set num_tokens: it is too small", "set [num_tokens]: it is too small"),
        ("lower evaluation.num_tokens, or num_tokens.", "lower [evaluation.num_tokens], or [num_tokens]."),
        ("batch·num_tokens=7 (num_tokens)", "batch·[num_tokens]=7 ([num_tokens])"),
        ("num_tokens_x, x_num_tokens and num_tokens.x", "num_tokens_x, x_num_tokens and num_tokens.x"),
        ("/data/num_tokens, num_tokens/a and num_tokens.csv", "/data/num_tokens, num_tokens/a and num_tokens.csv"),
        ("axis=num_tokens", "axis=num_tokens"),
    ],
)
def test_settings_are_rewritten_where_they_stand_alone(message, expected):
    error = UserError(message, "num_tokens", "evaluation.num_tokens")
    assert error.spelled(lambda field: f"[{field}]") == expected


def test_a_message_without_fields_stays_as_it_is():
    assert UserError("num_tokens=7").spelled(str.upper) == "num_tokens=7"


def test_the_first_field_is_the_one_at_fault():
    assert UserError("a=1 contradicts b=2", "a", "b").field == "a"
    assert UserError("no setting is at fault").field is None


@pytest.mark.parametrize(
    "error",
    [
        UserError("a=1", "a"),
        MissingLibraryError("peft is not installed"),
        CheckpointWriteError("the disk is full"),
        ExchangeError("a payload is missing", (1, 2)),
        ReplicaFailedError("a=1", exit_code=2, fields=("a",)),
    ],
)
def test_an_error_travels_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)
    assert copy.exit_code == error.exit_code


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UserError("a mistake"), 2),
        (ExchangeError("a payload is missing", (1,)), 1),
        (ReplicaFailedError("a replica's mistake", exit_code=2), 2),
        (DilocoError("a failure"), 1),
        (OSError("the disk is full"), 1),
        (KeyboardInterrupt(), 130),
        (ValueError("a bug"), None),
    ],
)
def test_the_class_of_an_error_is_its_exit_code(error, exit_code):
    assert exit_code_of(error) == exit_code
