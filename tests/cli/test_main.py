import os
import signal
import subprocess
import sys
from importlib import invalidate_caches

import pytest
from tests.cli.commands import loaded, refusal

import diloco
from diloco import __main__, cli
from diloco.cli.main import main, verbs


@pytest.mark.parametrize(("flag", "expected"), [("--help", "train"), ("--version", diloco.__version__)])
def test_help_and_version_load_nothing_heavy(flag, expected):
    output = loaded(flag)
    assert expected in output and output.endswith("[]\n")


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
    assert shown[:4] == ["hello", "train", "plan", "simulate"] and shown[-1] == "hello", "without ORDER it is last"


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


def test_a_command_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trian"])
    assert "there is no command 'trian': did you mean train?" in capsys.readouterr().err


def test_an_option_before_the_command_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--versoin"])
    assert "unknown flag --versoin: the command comes first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            "train tiny --num-tokens 7",
            "7 tokens are less than half a step of --global-batch·--sequence-length=512",
        ),
        ("train tiny --diloco.freeze --diloco.fragments whole", "--diloco.freeze"),
        ("sweep tiny --axis seed=0 --cores 0", "--cores=0 must be at least 1"),
        (
            "plan --num-params 1 --num-layers 1 --link-gbit-s 1 --step-seconds -1",
            "--step-seconds must be above 0",
        ),
        ("plan --measure tiny --diloco.wire int8", "--diloco.wire=int8: the plan chooses it"),
        ("train tiny --model.num-heads 5", "--model.width=32 must be a multiple of twice --model.num-heads=5"),
        ("eval run --limit 0", "--limit=0 must be at least 1"),
        ("experiment freezing --commands --tabulate", "--commands prints what to run, and --tabulate"),
        ("scaling fit --sync-every 30", "--sync-every=30 chooses among the runs of --data"),
        ("bench wire --values 0", "--values=0 must be at least 1"),
        ("data prepare --output new --cache old", "--prepared and --cache mean nothing here"),
        ("report", "name a run's directory"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_flags(command, sentence, capsys):
    assert refusal(capsys, *command.split()).startswith(sentence)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train tiny --metod diloco", "unknown flag --metod: did you mean --method? (diloco train tiny --help"),
        ("train tiny --learning-rate 1", "unknown flag --learning-rate: did you mean --optimizer.learning-rate?"),
        (
            "train tiny --num-replicas two",
            "--num-replicas takes a whole number, not 'two' (diloco train tiny --help)",
        ),
        ("train tiny --optimizer.beta1 x", "--optimizer.beta1 takes a number, not 'x'"),
        ("train tiny --diloco.overlap-steps x", "--diloco.overlap-steps takes a whole number, not 'x'"),
        ("train tiny --device gpu", "--device takes one of 'auto', 'cpu', 'cuda', not 'gpu'"),
        ("train tiny --seed", "--seed needs a value"),
        ("train tiny --max-steps 9", "unknown flag --max-steps: did you mean --num-tokens?"),
        ("train tiny --training.seq_len 9", "unknown flag --training.seq_len: did you mean --sequence-length?"),
        ("train --num-tokens 1M", "diloco train --num-tokens: name one of laptop, tiny"),
        ("sweep tiny --data.train nowhere.txt --axis seed=x", "--axis 'seed=x' is not of the form"),
        ("train tiny more", "'more' is not expected here"),
        ("train tony", "diloco train has no 'tony': did you mean tiny?"),
        ("train --seed 3", "diloco train --seed: name one of laptop, tiny, 35m"),
        ("simulate published --json", "unknown flag --json (diloco simulate published --help"),
        ("bench", "diloco bench needs one of wire"),
        ("eval", "diloco eval needs RUN"),
        ("export run", "diloco export needs --to"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_one_sentence(command, sentence, capsys):
    assert refusal(capsys, *command.split()).startswith(sentence)


@pytest.mark.parametrize("command", ["train tiny --help | head -1", "scaling predict --num-params 1e9 | true"])
def test_a_reader_may_close_the_pipe(command):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.run(
        f"{sys.executable} -m diloco {command}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert process.stderr == ""
