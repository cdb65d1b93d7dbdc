import os
import subprocess
import sys
from pathlib import Path

import pytest

import diloco
from diloco.cli.main import main

LOADED = """
import sys
from diloco.cli.main import main

try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code
print(sorted({{"torch", "numpy", "tyro"}} & set(sys.modules)))
"""


def python(code: str, folder: Path | None = None) -> str:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize(("flag", "expected"), [("--help", "train"), ("--version", diloco.__version__)])
def test_help_and_version_load_nothing_heavy(flag, expected):
    output = python(LOADED.format(arguments=[flag]))
    assert expected in output and output.endswith("[]\n")


def test_importing_the_package_and_its_schedule_loads_nothing_heavy():
    assert python("import sys, diloco, diloco.schedule; print('torch' in sys.modules)") == "False\n"


def test_every_public_name_can_be_loaded():
    assert all(getattr(diloco, name) is not None for name in diloco.__all__)
    assert set(diloco.__all__) == set(dir(diloco))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = diloco.Nothing


def test_a_command_that_does_not_exist_is_refused():
    process = subprocess.run([sys.executable, "-m", "diloco", "trian"], capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and "trian" in process.stderr


def test_an_option_before_the_command_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--versoin"])
    assert "unknown option --versoin: COMMAND comes first" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["train"], ["sweep"], ["plan", "--measure"]])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model.num-heads", "3"], "model: width=32 must be a multiple of 2·num_heads=6: each head needs"),
        (["--optimizer.learning-rate", "nan"], "optimizer.learning_rate must be above 0 and finite, not nan"),
        (["--evaluation.num-tokens", "0"], "evaluation.num_tokens must be at least 1, not 0"),
        (["--data.train"], "train=() names no source of training text"),
        (["--num-replicas", "3"], "global_batch=8 must be a multiple of num_replicas=3"),
    ],
)
def test_what_a_config_refuses_is_one_sentence(command, flags, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, "tiny", *flags])
    told = capsys.readouterr().err
    assert told.startswith(f"diloco: {sentence}") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told", "helped"),
    [
        (["train", "tiny", "--metod", "diloco"], "--method {streaming,", "diloco train tiny --help"),
        (["train", "tiny", "--num-replicas", "two"], "with base 10: 'two'", "diloco train tiny --help"),
        (["simulate", "published", "--json"], "--json", "diloco simulate published --help"),
        (["train", "tony"], "Available subcommands: laptop, tiny", "diloco train --help"),
    ],
)
def test_what_cannot_be_parsed_is_explained_with_the_command_that_helps(arguments, told, helped, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    printed = capsys.readouterr().err
    assert told in printed and f"run {helped}" in printed.replace("see ", "run ")
    assert "1.3b --help" not in printed


def test_a_resume_needs_no_recipe(finished_run, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--resume", str(finished_run), "--seed", "9"])
    assert "was started with seed=3, and now 9 is asked for" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train tiny --help | head -1", "scaling predict --num-params 1e9 | true"])
def test_who_reads_may_stop(command):
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


def test_help_of_a_recipe_names_every_field():
    process = subprocess.run(
        [sys.executable, "-m", "diloco", "train", "laptop", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "120"},
    )
    for flag in ("--num-replicas", "--diloco.sync-every", "--optimizer.learning-rate", "--data.train", "--resume"):
        assert flag in process.stdout


def test_data_prepare_writes_a_directory_that_train_can_read(tmp_path):
    (tmp_path / "text.txt").write_text("one two three " * 100)
    (tmp_path / "held.txt").write_text("four five six " * 20)
    flags = ["--output", "prepared", "--train", "text.txt", "--held-out", "held.txt"]
    process = subprocess.run(
        [sys.executable, "-m", "diloco", "data", "prepare", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    assert "train: 1 documents, 1,401 tokens" in process.stdout
    assert (tmp_path / "prepared" / "index.json").exists()
