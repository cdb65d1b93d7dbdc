"""`diloco experiment`: the commands of a cluster, and tables of the runs that are finished."""

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.experiments.papers.made_up import made_up
from tests.experiments.runner.machines import FakeMachine

from diloco.cli import experiment as cli_experiment
from diloco.cli.main import main
from diloco.experiments.papers import experiment
from diloco.experiments.papers.tiers import TIERS
from diloco.experiments.runner.grid import make_job, run_name
from diloco.experiments.runner.rows import read_rows, write_rows


def test_the_commands_of_a_cluster_are_those_of_the_runs(capsys, tmp_path):
    main(["experiment", "freezing", "--tier", "paper", "--commands", "--output", str(tmp_path)])
    words, text, prepare, label, command, *_, frozen, cost = capsys.readouterr().out.splitlines()
    assert (
        words.startswith("# NODE: ")
        and text == "# text: hf:allenai/c4:en:train"
        and prepare.startswith("diloco data prepare --output ")
    )
    assert label == "# freezing: {'frozen': 'no', 'seed': 0}"
    assert command.startswith("torchrun --nproc-per-node 2 -m diloco train 550m ")
    assert frozen.split().count("--diloco.freeze") == 1 and prepare.split()[4] in frozen
    assert cost == "# freezing: 2 runs, 2 H100-days at 40% MFU"


def test_a_row_of_a_table_counts_as_a_finished_run(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    machine = FakeMachine()
    monkeypatch.setattr(cli_experiment, "machines_of", lambda *_: machine)
    one = experiment("freezing", TIERS["small"]())
    rows = made_up(one, lambda labels: 1.2 if labels["frozen"] == "yes" else 1.0)
    rows = [{**row, "run": run_name(run.config)} for row, run in zip(rows, one.runs, strict=True)]
    # As the table of another experiment had it.
    write_rows(rows[:3], tmp_path / "overlap.csv")
    main(["experiment", "freezing", "--output", str(tmp_path)])
    assert [job.config.name for job in machine.jobs] == [rows[3]["run"]]
    written = read_rows(tmp_path / "freezing.csv")
    assert [row["eval_loss"] for row in written] == [row["eval_loss"] for row in rows[:3]] + [1.0]
    main(["experiment", "freezing", "--output", str(tmp_path)])
    assert len(machine.jobs) == 1 and read_rows(tmp_path / "freezing.csv") == written


def test_equal_runs_are_one_command_with_all_labels(capsys, tmp_path):
    main(["experiment", "all", "--commands", "--output", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines if line.startswith("torchrun ")]
    assert len(set(commands)) == len(commands) < len(lines) - len(commands)
    page = (Path(__file__).parents[2] / "docs/how-to/experiments.md").read_text()
    assert len(commands) == sum(map(int, re.findall(r"(\d+) runs, [\d.]+ hours", page)))
    names = [words[words.index("--name") + 1] for words in map(shlex.split, commands)]
    assert len(set(names)) == len(names), "a second command of a name would be refused"


def test_only_finished_runs_are_tabulated(capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "freezing", "--tabulate", "--output", str(tmp_path)])
    assert "no run of freezing is over in" in capsys.readouterr().err
    one = experiment("freezing", TIERS["small"]())
    jobs = [make_job(run.config, tmp_path / "runs") for run in one.runs]
    jobs[1].directory.mkdir(parents=True)
    (jobs[1].directory / "summary.json").touch()
    assert list(cli_experiment._finished(one, tmp_path, ()).runs) == [one.runs[1]]
    # A run that took place on another machine left its result; a failed run is not finished.
    counts = dict.fromkeys(("num_params", "num_tokens", "num_steps"), 1)
    losses = {"eval_loss": 1.0, "eval_standard_error": None, "eval_bits_per_byte": 1.0}
    sent = {"bytes_sent_per_replica": 0, "data_parallel_bytes_per_replica": 0, "outer_hash": "", "precision": ""}
    for job, result in (
        (jobs[0], {"summary": counts | losses | sent, "evaluated": {}}),
        (jobs[2], {"failed": "no"}),
    ):
        job.directory.mkdir(parents=True)
        (job.directory / "result.json").write_text(json.dumps(result))
    assert list(cli_experiment._finished(one, tmp_path, ()).runs) == list(one.runs[:2])
    # A result that lacks a task is not finished: the run would have to be trained again for it.
    (tmp_path / "mine.jsonl").write_text("a question")
    assert list(cli_experiment._finished(one, tmp_path, (tmp_path / "mine.jsonl",)).runs) == [one.runs[1]]


def test_the_table_of_another_corpus_is_left_alone(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{**row, "run": "run-0123456789ab"} for row in made_up(experiment("freezing", TIERS["small"]()))]
    write_rows(rows, tmp_path / "freezing.csv")
    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "freezing", "--output", str(tmp_path)])
    sentence = "freezing.csv is of another --corpus, --held-out or --tier: choose another --output"
    assert sentence in capsys.readouterr().err and len(read_rows(tmp_path / "freezing.csv")) == len(rows)
    with pytest.raises(SystemExit, match="2"):
        main(["experiment", "freezing", "--tabulate", "--output", str(tmp_path)])
    sentence = (
        "freezing.csv are of another --corpus, --held-out or --tier: set those, or leave out --tabulate and choose"
    )
    assert sentence in capsys.readouterr().err
