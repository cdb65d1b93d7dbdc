"""The command line itself: its verbs, its flags, its errors, and what it loads."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import invalidate_caches
from typing import Annotated

import pytest
import tyro
from tests.cli.commands import loaded

import diloco
from diloco import __main__, cli
from diloco.cli._command import fields_of, flag, flag_words, flags_in_errors
from diloco.cli._streams import explained, hinted
from diloco.cli.main import main, verbs
from diloco.errors import DilocoError, ReplicaFailedError, UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.training.config.config import TrainConfig


def test_no_command_loads_more_than_it_needs():
    """One process for all commands, those that need least first: what none has loaded, each goes without."""
    printed, modules = loaded(["--help"], ["--version"])
    assert "train" in printed and diloco.__version__ in printed and modules == set()
    size = ["--num-params", "1e9", "--num-layers", "24", "--step-seconds", "0.1"]
    printed, modules = loaded(
        ["train", "-h"],
        ["train", "tiny", "--help"],
        ["generate", "--help"],
        ["plan", *size, "--latency-seconds", "0.01", "--link", "1Gbit", "--store"],
        ["simulate", "bandwidth", *size, "--method", "streaming", "--json"],
        ["scaling", "predict", "--num-params", "1e9"],
    )
    fields = ("--epochs", "--num-replicas", "--diloco.sync-every", "--optimizer.learning-rate", "--data.train")
    assert all(name in printed for name in fields) and modules == {"numpy", "tyro"}


def test_a_module_of_the_package_is_a_verb(tmp_path, monkeypatch, capsys):
    text = 'HELP = "greet somebody"\n\n\ndef run(arguments):\n    print("hello", *arguments)\n'
    (tmp_path / "hello.py").write_text(text)
    (tmp_path / "_support.py").write_text("")
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "diloco.cli.hello", raising=False)
    invalidate_caches()
    assert "hello" in verbs() and "train" in verbs() and not {"main", "_support"} & set(verbs())
    main(["hello", "you"])
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("hello you\n") and "greet somebody" in printed
    shown = [word for line in printed.splitlines() for word in line.split()[:1] if word in verbs()]
    assert shown[:4] == ["hello", "demo", "train", "plan"] and shown[-1] == "hello", "without ORDER it is last"


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_an_interrupt_that_a_shell_has_ignored_stays_ignored(monkeypatch, handler):
    handlers = []
    monkeypatch.setattr("diloco.cli.main.main", lambda: handlers.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, handler)
    try:
        __main__.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [handler]


@pytest.mark.parametrize("command", ["train tiny --help | head -1", "scaling predict --num-params 1e9 | true"])
def test_a_reader_may_close_the_pipe(command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"{sys.executable} -m diloco {command}"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=environment)
    assert process.stderr == ""


def end(error: BaseException, **hint) -> int:
    with pytest.raises(SystemExit) as end, explained(), hinted("call it again", **hint):
        raise error
    return end.value.code


@pytest.mark.parametrize(
    ("error", "exit_code", "sentence"),
    [
        (UserError("a mistake"), 2, "a mistake"),
        (DilocoError("a failure"), 1, "a failure; call it again"),
        (OSError(28, "No space left on device"), 1, "no space left on device; call it again"),
        (KeyboardInterrupt(), 130, "interrupted; call it again"),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(error, exit_code, sentence, capsys):
    assert end(error) == exit_code
    assert capsys.readouterr().err == f"diloco: {sentence}\n"


def test_a_hint_waits_until_something_has_begun(tmp_path, capsys):
    begun = (tmp_path / "config.json").exists
    assert end(DilocoError("a failure"), when=begun) == 1
    (tmp_path / "config.json").touch()
    assert end(DilocoError("a failure"), when=begun) == 1
    assert capsys.readouterr().err == "diloco: a failure\ndiloco: a failure; call it again\n"


def test_a_bug_shows_its_traceback():
    with pytest.raises(ValueError, match="a bug"), explained():
        raise ValueError("a bug")


def test_every_error_shows_its_traceback_on_request(monkeypatch, capsys):
    monkeypatch.setenv("DILOCO_TRACEBACK", "1")
    assert end(UserError("a mistake")) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and "UserError: a mistake" in printed


@pytest.mark.parametrize(("redirection", "encoding"), [(">&-", "utf-8"), ("> /dev/null", "ascii")])
def test_an_output_that_is_closed_or_lacks_a_letter_is_no_failure(redirection, encoding):
    command = f'"$0" -m diloco scaling predict --num-params 1e9 --num-replicas 4 {redirection}'
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    process = subprocess.run(
        ["sh", "-c", command, sys.executable], env=environment, capture_output=True, text=True
    )
    assert (process.returncode, process.stderr) == (0, "")


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
    with (
        pytest.raises(type(error), match=r"^--diloco.sync-every=0 with run=1$") as raised,
        flags_in_errors(command),
    ):
        raise error
    assert raised.value is error and error.fields == ("diloco.sync_every", "run")


def test_flags_give_settings_their_values():
    settings = {"data.train": ("a.txt", "b c.txt"), "diloco.freeze": True, "compile": False, "num_tokens": 7}
    assert [word for words in flag_words(settings).values() for word in words] == [
        *("--data.train", "a.txt", "b c.txt"),
        *("--diloco.freeze", "--no-compile", "--num-tokens", "7"),
    ]
