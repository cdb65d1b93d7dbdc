import json
from dataclasses import replace

import pytest
from tests.cli.commands import refusal

from diloco.cli.main import main
from diloco.training.recipes import recipe
from diloco.training.traits import to_json


@pytest.mark.parametrize("command", [["train"], ["sweep"], ["plan", "--measure"]])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model.num-heads", "3"], "--model.width=32 must be a multiple of twice"),
        (["--optimizer.learning-rate", "nan"], "--optimizer.learning-rate must be above 0 and finite, not nan"),
        (["--evaluation.num-tokens", "0"], "--evaluation.num-tokens must be at least 1, not 0"),
        (["--num-tokens", "7"], "--num-tokens=7 is no whole number of steps of --global-batch"),
        (["--num-replicas", "3"], "--global-batch=8 must be a multiple of --num-replicas=3"),
    ],
)
def test_a_refusal_of_a_config_names_flags(command, flags, sentence, capsys):
    assert sentence in refusal(capsys, *command, "tiny", *flags)


def test_a_resume_needs_no_recipe(tmp_path, capsys):
    started = replace(recipe("tiny"), seed=3, micro_batch=4)
    (tmp_path / "config.json").write_text(json.dumps(to_json(started)))
    assert "was started with --seed=3" in refusal(capsys, "train", "--resume", str(tmp_path), "--seed", "9")


@pytest.mark.slow
def test_help_of_a_recipe_names_every_field(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "laptop", "--help"])
    printed = capsys.readouterr().out
    for flag in ("--num-replicas", "--diloco.sync-every", "--optimizer.learning-rate", "--data.train", "--resume"):
        assert flag in printed
