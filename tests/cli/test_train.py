"""`diloco train`: before it starts, stopped at any moment, and how it goes on."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.commands import refusal
from tests.data.test_shards import INDEX
from tests.training.runs import command

from diloco.cli import _recipe, train
from diloco.cli._command import changes
from diloco.cli.main import main
from diloco.cli.train import meeting_line, resume_command
from diloco.data.shards import INDEX_FILE, write_record
from diloco.training.config.config import with_value
from diloco.training.config.recipes import recipe
from diloco.training.records.runs import claim, running


def test_a_resume_needs_no_recipe(tmp_path, capsys):
    write_record(tmp_path / INDEX_FILE, INDEX)
    started = replace(recipe("tiny"), seed=3, micro_batch=4, runs=tmp_path, name="run")
    claim(with_value(started, "data.prepared", tmp_path))
    asked = ["train", "--resume", str(tmp_path / "run"), "--seed", "9"]
    assert "was started with --seed=3" in refusal(capsys, *asked)


def test_train_alone_lists_the_recipes_in_a_few_lines(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train"])
    printed = capsys.readouterr().out
    assert "35m … 10b" in printed and "laptop " in printed and printed.count("\n") < 10


def test_a_rendezvous_by_flag_starts_one_replica_of_a_file(tmp_path):
    (tmp_path / "run.toml").write_text("seed = 3")
    for flags, num_replicas in (([], 1), (["--num-replicas", "4"], 4)):
        arguments = ["tiny", "--config", str(tmp_path / "run.toml"), "--rendezvous", "store", *flags]
        config = train._parsed(arguments)[0].config
        assert (config.num_replicas, config.rendezvous, config.seed) == (num_replicas, "store", 3)


def test_a_papers_recipe_takes_the_values_of_the_replicas_that_are_asked_for(tmp_path):
    (tmp_path / "run.toml").write_text('recipe = "4b"\nnum_replicas = 4')
    of_file = ["--config", str(tmp_path / "run.toml")]
    for words in (["4b", "--num-replicas", "4"], ["4b", "--num-replicas=4"], of_file):
        config = train._parsed(words)[0].config
        assert config == recipe("4b", num_replicas=4) and config.global_batch == 512
        assert _recipe.law_lines(config) == [
            "4b takes the values of M = 4: learning rate 0.000116, batches of 512 sequences, η 0.8"
        ]
        assert shlex.join(word for each in changes(config).values() for word in each) == "--num-replicas 4"
    words = ["4b", "--num-replicas", "4", "--method", "data_parallel", "--optimizer.learning-rate", "1e-4"]
    config = train._parsed(words)[0].config
    assert config.optimizer.learning_rate == 1e-4
    assert _recipe.law_lines(config) == ["4b takes the values of Data-Parallel: batches of 128 sequences"]
    # With a store the number is open: the values are those of two replicas.
    config = train._parsed(["4b", "--num-replicas", "4", "--rendezvous", "store"])[0].config
    assert (config.num_replicas, config.global_batch) == (4, 256)


def test_a_value_behind_an_equals_sign_may_begin_with_a_dash():
    config = train._parsed(["tiny", "--name=-x", "--num-tokens=1M", "--runs=-runs"])[0].config
    assert (config.name, config.runs) == ("-x", Path("-runs"))


def test_a_dry_run_prints_what_the_run_would_be_and_starts_nothing(small_corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(f'[data]\ntrain = ["{small_corpus}"]\nheld_out_fraction = 0.1\n')
    main(["train", "tiny", "--config", "run.toml", "--num-tokens", "2x", "--diloco.sync-every", "12", "--dry-run"])
    printed = capsys.readouterr().out
    assert "2 tokens a parameter are rounded to" in printed and "first sent after step 12, 16, 20" in printed
    # A size of the paper is described before there is text for it.
    main(["train", "35m", "--num-tokens", "2x", "--dry-run"])
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["text"].startswith("none is named: 35m needs --data.train and a --data.tokenizer")
    assert lines["model"].endswith(" parameters, 2 replicas") and {"memory", "steps", "bytes", "link"} <= {*lines}
    assert not (tmp_path / "runs").exists()


CONFIG = replace(recipe("tiny"), name="my run", runs=Path("runs"))


def test_a_run_of_one_machine_is_resumed_by_its_directory():
    assert resume_command(CONFIG, {}, {}) == "diloco train tiny --resume 'runs/my run'"
    changes = {"num_tokens": 2048, "data.prepared": Path("a b"), "trackers": ()}
    assert resume_command(replace(CONFIG, recipe=""), changes, {}) == (
        "diloco train --resume 'runs/my run' --num-tokens 2048 --data.prepared 'a b' --trackers"
    )


def test_under_torchrun_each_machine_has_its_own_command():
    """As torchrun describes the second of three machines with two processes each."""
    environment = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "3", "GROUP_RANK": "1"}
    environment |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    expected = (
        "torchrun --nnodes 3 --nproc-per-node 2 --node-rank 1 --master-addr host --master-port 29500 "
        "-m diloco train tiny --resume 'runs/my run'"
    )
    assert resume_command(CONFIG, {}, environment) == expected


@pytest.mark.parametrize(
    ("changes", "environment", "line"),
    [
        ({}, {}, ""),
        ({}, {"RANK": "1"}, "replica 1 of 2, which meets replica 0 at host, port 29500, for up to 600 s"),
        ({}, {"RANK": "0"}, "replica 0 of 2, which waits for the others at host, port 29500, for up to 600 s"),
        (
            {"shards_per_replica": 2, "timeout_seconds": 9.0},
            {"RANK": "2"},
            "process 0 of replica 1 of 2, which meets process 0 of replica 0 at host, port 29500, for up to 9 s",
        ),
        ({"rendezvous": "s3://bucket/run"}, {"RANK": "0"}, "a replica, in the store s3://bucket/run"),
    ],
)
def test_a_machine_says_first_whom_it_meets(changes, environment, line):
    address = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert meeting_line(replace(CONFIG, **changes), environment | address) == (line and f"start {line}")


@pytest.mark.parametrize("flags", [["--name", "one"], ["--resume", "RUN"]])
def test_a_run_that_is_being_trained_is_not_started_again(flags, finished_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    where = tmp_path / "runs" / "one"
    if "RUN" in flags:
        shutil.copytree(finished_run, where)
        flags = ["--resume", str(where)]
    with running(where):
        assert f"{where.name} is in use: process " in refusal(capsys, "train", "tiny", *flags)


def interrupted(folder: Path, after: str) -> tuple[int, str]:
    """The exit code and the errors of a run that Ctrl-C in a terminal ends at a moment, in seconds."""
    log, metrics = folder / "errors", [folder / "runs" / after / f"metrics-{replica}.jsonl" for replica in (0, 1)]
    profile = "1" if after == "import" else ""  # a line for each module, where errors go
    with log.open("w") as file:
        process = subprocess.Popen(
            command("--name", after, "--num-tokens", "10M"),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPROFILEIMPORTTIME": profile},
        )
    with process:
        while after == "import" and " torch._C\n" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.02)
        if after != "import":
            assert process.stdout is not None and any("run   " in line for line in process.stdout)
        while after == "step" and not all(path.exists() and path.stat().st_size for path in metrics):
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=20)
        return process.returncode, re.sub("import time:.*\n", "", log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        ("import", "diloco: interrupted\n"),
        (
            "start",
            r"diloco: (interrupted|stopped by SIGINT(: there is no step to save yet)?); "
            r"nothing is saved yet: start again with the same command\n",
        ),
        ("step", "diloco: stopped by SIGINT: every replica has saved step "),
    ],
)
def test_ctrl_c_ends_a_run_soon_and_with_one_line(tmp_path, small_corpus, after, sentence):
    shutil.copy(small_corpus, tmp_path / "text.jsonl")
    code, errors = interrupted(tmp_path, after)
    assert re.match(sentence, errors) and errors.count("\n") == 1, errors
    assert (tmp_path / "runs" / after).exists() == (after == "step")
    # CPython takes an interrupt inside of exec() for an unhandled one, and ends by the signal itself.
    assert code in (130, -signal.SIGINT)
