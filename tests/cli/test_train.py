import json
from dataclasses import replace

import pytest
from tests.cli.commands import loaded, refusal

from diloco.cli import train
from diloco.cli.main import main
from diloco.training.config.config import with_value
from diloco.training.config.recipes import recipe
from diloco.training.records.runs import claim


@pytest.mark.parametrize("command", [["train"], ["sweep"], ["plan", "--measure"]])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model.num-heads", "3"], "--model.width=32 must be a multiple of twice"),
        (["--optimizer.learning-rate", "nan"], "--optimizer.learning-rate must be above 0 and finite, not nan"),
        (["--evaluation.num-tokens", "0"], "--evaluation.num-tokens must be at least 1, not 0"),
        (["--num-replicas", "3"], "--global-batch=8 must be a multiple of --num-replicas=3"),
    ],
)
def test_a_refusal_of_a_config_names_flags(command, flags, sentence, capsys):
    assert sentence in refusal(capsys, *command, "tiny", *flags)


def test_a_resume_needs_no_recipe(tmp_path, capsys):
    shard = {"num_tokens": 9, "num_documents": 1, "num_bytes": 9, "tokens_digest": "ab"}
    (tmp_path / "index.json").write_text(
        json.dumps({"digest": "ab", "vocab_size": 9, "splits": {"train": [shard]}})
    )
    started = replace(recipe("tiny"), seed=3, micro_batch=4, runs=tmp_path, name="run")
    claim(with_value(started, "data.prepared", tmp_path))
    asked = ["train", "--resume", str(tmp_path / "run"), "--seed", "9"]
    assert "was started with --seed=3" in refusal(capsys, *asked)


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["train", "tiny", "--help"], "--epochs"), (["train", "-h"], "35m")]
)
def test_help_loads_no_torch(arguments, expected):
    output = loaded(*arguments)
    assert expected in output and "'torch'" not in output.splitlines()[-1]


def test_train_alone_lists_the_recipes_in_a_few_lines(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    printed = capsys.readouterr().out
    assert "35m … 10b" in printed and "laptop " in printed and printed.count("\n") < 10


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--num-tokens", "1MB"], "--num-tokens=1MB is no number of tokens"),
        (["--num-tokens", "1M", "--epochs", "2"], "--num-tokens=1M and --epochs=2 are two budgets"),
        (["--num-tokens"], "--num-tokens needs a value"),
        (["--epochs", "two"], "--epochs takes a number, not 'two'"),
        (["--resume", "a", "--config", "b.toml"], "--resume goes on with the run's own settings: leave"),
        (["--config", "b.toml"], "b.toml can't be read"),
    ],
)
def test_a_budget_or_a_file_that_cannot_be_used_is_refused(flags, sentence, capsys):
    assert refusal(capsys, "train", "tiny", *flags).startswith(sentence)


def test_a_rendezvous_by_flag_starts_one_replica_of_a_file(tmp_path):
    (tmp_path / "run.toml").write_text("seed = 3")
    for flags, num_replicas in (([], 1), (["--num-replicas", "4"], 4)):
        arguments = ["tiny", "--config", str(tmp_path / "run.toml"), "--rendezvous", "store", *flags]
        config = train._parsed(arguments)[0].config
        assert (config.num_replicas, config.rendezvous, config.seed) == (num_replicas, "store", 3)


def test_a_dry_run_prints_what_the_run_would_be_and_starts_nothing(small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(f'[data]\ntrain = ["{small_corpus}"]\nheld_out_fraction = 0.1\n')
    main(["train", "tiny", "--config", "run.toml", "--num-tokens", "2x", "--diloco.sync-every", "12", "--dry-run"])
    printed = capsys.readouterr().out
    assert "2 tokens a parameter are rounded to" in printed and "first sent after step 12, 16, 20" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml", "data"] or not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_help_of_a_recipe_names_every_field(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "laptop", "--help"])
    printed = capsys.readouterr().out
    for flag in ("--num-replicas", "--diloco.sync-every", "--optimizer.learning-rate", "--data.train", "--resume"):
        assert flag in printed
