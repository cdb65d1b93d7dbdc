"""A run in a terminal: the lines before it starts, its progress, and the remedy of a plan that can not be."""

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.rendezvous.replicas import Replica
from tests.simulator.cases import task, with_replicas
from tests.training.test_metrics import metrics

from diloco.auto import chosen
from diloco.data.config import DataConfig
from diloco.data.prepare import PrepareProgress
from diloco.report.setup import setup
from diloco.report.terminal import training
from diloco.report.terminal.tables import remedy_sentence
from diloco.report.terminal.training import (
    TrainingProgress,
    change_lines,
    forecast_lines,
    preparation_progress,
    start_lines,
)
from diloco.simulator.link_planner import LinkTask, feasible, remedy
from diloco.training.config.forecast import forecast
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import Budget, resolved, text_facts
from diloco.training.prepare import prepare_run


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("To be, or not to be.\n" * 1500)
    data = DataConfig(train=(str(folder / "text.txt"),), cache=folder / "data")
    return replace(recipe("tiny"), name="run", runs=folder, data=data)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(10.2, "epochs"), "30.9 kB, 30,871 tokens; 10.2 epochs: the model will memorise it"),
        (Budget(2, "epochs"), "30.9 kB, 30,871 tokens; 1.99 epochs\n"),
        (Budget(1e5, "tokens"), "100,000 tokens are rounded to 195 whole steps of 512, 99,840 tokens"),
        (Budget(51_200, "tokens"), "epochs\nrun "),
    ],
)
def test_epochs_and_rounding_are_said_before_they_happen(asked, budget, expected):
    text = "\n".join(start_lines(resolved(prepare_run(asked, budget=budget)), budget))
    assert expected in text
    assert "the last 2.00% of each document is held out" in text
    assert text.endswith(str(asked.runs / "run"))


@pytest.mark.parametrize(
    ("most", "expected", "size"),
    [(1000, "30,871 tokens, of which the first 1,000 are read; ", "1k"), (40_000, "30,871 tokens; ", "30.9k")],
)
def test_the_tokens_that_a_run_reads_are_said_before_and_in_its_report(asked, most, expected, size):
    config = resolved(prepare_run(replace(asked, data=replace(asked.data, max_train_tokens=most))))
    assert expected in "\n".join(start_lines(config, None))
    text = text_facts(config.data)
    run = SimpleNamespace(config=config, text=text, directory=asked.runs, replicas={}, summary=None)
    assert f"text.txt, {size} tokens; " in setup(run, str)["data"]


def test_a_start_warns_of_an_outer_rule_far_from_auto(asked):
    def lines(**values) -> list[str]:
        config = replace(asked, diloco=replace(asked.diloco, **values))
        return [line for line in start_lines(resolved(prepare_run(config)), None) if line.startswith("outer ")]

    lr, momentum = chosen(6, 2, 10, 0.5)
    expected = "outer with 6 outer steps, η = 0.4 and μ = 0.9 are expected to end 1.5% above diloco.outer=auto, "
    assert lines() == [f"{expected}which takes {lr:g} and {momentum:g}"]
    assert lines(outer="auto") == lines(outer="torch.AdamW:lr=0.1") == []


def test_changes_name_both_values():
    changes = {"seed": (0, 3), "optimizer.warmup_steps": (6, None)}
    assert list(change_lines(changes)) == [
        "      seed is 3 from here on, and was 0",
        "      optimizer.warmup_steps is a tenth of the steps left (at most 1000) from here on, and was 6",
    ]


@pytest.mark.parametrize("method", ["streaming_overlapped_fp4", "data_parallel"])
def test_a_forecast_names_steps_syncs_and_bytes(asked, method):
    config = resolved(prepare_run(replace(asked, method=method)))
    text = "\n".join(forecast_lines(config, forecast(config)))
    assert "57,792 parameters, 2 replicas" in text and "steps  60 of 512 tokens" in text
    assert ("first sent after step 10, 13, 16" in text) == (method != "data_parallel")
    assert "0.1 Gbit/s each way" in text


def test_a_forecast_of_replicas_that_come_and_go_counts_no_bytes(asked, tmp_path):
    (tmp_path / "store").mkdir()
    one = replace(asked, num_replicas=1, replica_batch=2, rendezvous=str(tmp_path / "store"))
    config = resolved(prepare_run(one))
    *_, steps, own, _, syncs, last = forecast_lines(config, forecast(config))
    alone = -(-config.num_tokens // (2 * config.sequence_length))
    assert steps == "steps  60 of 512 tokens: 30,720 tokens"
    assert own.strip().startswith(
        f"of all replicas that join; this one reads {2 * config.sequence_length:,} tokens"
    )
    assert own.endswith(f"alone would take {alone:,} steps")
    assert syncs.startswith("syncs  H = 10") and last == "bytes  depend on how many replicas take part"


@pytest.mark.parametrize(("rank", "name"), [(0, "replica 0  "), (1, "replica 1  ")])
def test_held_out_losses_are_printed_when_they_are_measured(rank, name):
    output = io.StringIO()
    config = replace(recipe("tiny"), num_tokens=5 * recipe("tiny").tokens_per_step)
    progress = TrainingProgress(config, Console(file=output), rank=rank)
    for step in range(1, 6):
        tokens = step * config.tokens_per_step
        progress(replace(metrics(step), tokens=tokens, eval_loss=3 - step / 10 if step % 2 == 0 else None))
    progress.close()
    *evaluated, last = output.getvalue().splitlines()
    of_replica = f"of replica {rank}'s share of the text"
    assert evaluated == [
        f"step 2  held-out loss 2.8000 {of_replica}",
        f"step 4  held-out loss 2.6000 {of_replica}",
    ]
    assert last.startswith(f"{name}step 5/5  loss 2.000  held-out 2.600  ") and last.endswith("  ETA 0:00")


@pytest.mark.parametrize(("seconds", "num_lines"), [(0.0, 2), (10.0, 0)])
def test_a_long_preparation_says_how_far_it_is_where_there_is_no_terminal(seconds, num_lines, monkeypatch):
    monkeypatch.setattr(training, "_SECONDS_BETWEEN_LINES", seconds)
    output = io.StringIO()
    with preparation_progress(Console(file=output)) as progress:
        for number in (1, 2):
            progress(PrepareProgress(stage="packing", num_documents=number, num_bytes=10 * number))
    lines = ["packing: 1 documents, 10 bytes, 0 tokens", "packing: 2 documents, 20 bytes, 0 tokens"]
    assert output.getvalue().splitlines() == lines[:num_lines]


def test_a_replica_says_which_run_it_has_joined(tmp_path):
    config, lines, replicas = replace(recipe("tiny"), rendezvous=str(tmp_path)), [], []
    for name in "ab":  # the first is asked before it can have heard of the second
        replicas.append(Replica(str(tmp_path), name=name))
        output = io.StringIO()
        progress = TrainingProgress(config, Console(file=output))
        progress.started(7, replicas[-1].exchange, is_resume=name == "b")
        lines.append(output.getvalue().splitlines())
    assert lines == [
        [f"store {tmp_path}: replica 0, the first of a new run; round 0"],
        [f"store {tmp_path}: replica 1, beside a; round 0", "going on from step 7"],
    ]
    for replica in replicas:
        replica.vanish()


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (0, "no step was saved by every replica: starting over"),
        (7, "going on from step 7"),
        (60, "runs/a is over at step 60; to extend it: --more N"),
    ],
)
def test_a_resume_says_from_where_it_goes_on(step, line):
    output, config = io.StringIO(), replace(recipe("tiny"), name="a", num_tokens=60 * 512)
    assert config.num_steps == 60
    TrainingProgress(config, Console(file=output)).started(step, None, is_resume=True, longer="--more N")
    assert output.getvalue() == line + "\n"


def printed(wanted: LinkTask) -> tuple[str, dict[str, float]]:
    """The sentence about an infeasible target, and its numbers as printed."""
    sentence = remedy_sentence(wanted, remedy(wanted))
    patterns = {
        "mbit_s": "links of ([^ ]+) Mbit/s",
        "latency_seconds": "latency of ([^ ]+) s on every link",
        "factor": "compute ([^ ]+) times",
        "target": r"a target of ([0-9.]+?)[.;]?( |$)",
    }
    matches = {name: re.search(pattern, sentence) for name, pattern in patterns.items()}
    return sentence, {name: float(match[1]) for name, match in matches.items() if match is not None}


@pytest.mark.slow
def test_every_printed_number_is_rounded_to_where_it_is_still_enough():
    wanted = task(0.006, latency_seconds=0.0)
    sentence, numbers = printed(wanted)
    assert "No setting reaches a compute utilization of 0.95 here." in sentence and "latency" not in sentence
    assert feasible(with_replicas(wanted, gbit_s=numbers["mbit_s"] / 1e3))
    longer = with_replicas(wanted, step_seconds=2.3 * numbers["factor"])
    assert feasible(replace(longer, num_steps=int(66_757 / numbers["factor"])))
    assert feasible(replace(wanted, target=numbers["target"]))
    far = task(10.0, latency_seconds=300.0)
    _, numbers = printed(far)
    assert feasible(with_replicas(far, latency_seconds=numbers["latency_seconds"]))
    assert "mbit_s" not in numbers


def test_a_slow_replica_is_named_as_the_limit():
    wanted = task(1e3, num_replicas=2)
    first, *others = wanted.replicas
    wanted = replace(wanted, replicas=(replace(first, step_seconds=3 * first.step_seconds), *others))
    sentence, numbers = printed(wanted)
    assert "More than 0.667 can't be reached by replicas with these step times" in sentence
    assert set(numbers) == {"target"} and numbers["target"] == pytest.approx(2 / 3, abs=0.01)


def test_a_preparation_says_its_speed_and_the_time_that_is_left(monkeypatch):
    seconds = iter([100.0, 110.0])
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    speed = training._Speed()
    begun = PrepareProgress(stage="packing", num_bytes=10**6, fraction=0.2)
    assert speed.of(PrepareProgress(stage="training the tokenizer")) == speed.of(begun) == ""
    later = PrepareProgress(stage="packing", num_bytes=36 * 10**6, fraction=0.4)
    assert speed.of(later) == "  3.5 MB/s  ETA 0:30"
