"""Replicas that come and go: real processes of the trainer, which meet in a directory."""

import asyncio
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from tests.processes import program, run_main, run_replicas
from tests.training.cases import rate
from tests.training.runs import (
    DILOCO,
    TIMEOUT_SECONDS,
    bodies,
    command,
    lines,
    quick_config,
    run,
    started,
    summary,
)

from diloco.cli.main import main
from diloco.errors import DisagreementError, ExchangeError, Stopped, UserError
from diloco.models.decoder_config import DecoderConfig
from diloco.outer.digest import parameters_hash
from diloco.publishing.follower import Follower
from diloco.rendezvous.log.entries import Join, Leave, Outer
from diloco.rendezvous.log.log import Log, first_entry
from diloco.rendezvous.log.run import RunState
from diloco.rendezvous.log_thread import LogThread
from diloco.rendezvous.replay import replayed
from diloco.rendezvous.store import Store
from diloco.report.runs import summary_facts
from diloco.schema import converted
from diloco.training import loop
from diloco.training.config.config import (
    CheckpointConfig,
    DilocoConfig,
    ElasticConfig,
    TrainConfig,
)
from diloco.training.config.resolve import resolved
from diloco.training.loop import begin_step, train
from diloco.training.prepare import prepare_run
from diloco.training.processes import STORE
from diloco.training.records.checkpoints import finished_steps
from diloco.training.records.finished import run_parameters
from diloco.training.records.metrics import metrics_file
from diloco.training.records.store_runs import initial_parameters
from diloco.training.records.summary import Summary, contributors
from diloco.training.records.tail import ReplicaTail

STEPS = 48
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(small_corpus, tmp_path_factory) -> TrainConfig:
    """A run that takes milliseconds per step; it begins with two replicas."""
    folder = tmp_path_factory.mktemp("elastic")
    return quick_config(
        folder,
        small_corpus,
        name="a",
        rendezvous=str(folder / "store"),
        num_tokens=STEPS * 8 * 32,
        diloco=DilocoConfig(sync_every=6, layers_per_fragment=1, overlap_steps=2),
        checkpoint=CheckpointConfig(every_steps=2),
    )


def state_of(store: str) -> RunState:
    """The state that the entries of a log make."""

    async def read() -> RunState:
        place = Store.open(store)
        return await Log(place, (await first_entry(place))[1]).read_all()

    return asyncio.run(read())


def wait_for(path: Path, num_lines: int = 0, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() or path.read_text().count("\n") < num_lines:
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def of(config: TrainConfig, name: str, **changes) -> TrainConfig:
    return replace(config, name=name, **changes)


def alone(config: TrainConfig, folder: Path) -> TrainConfig:
    """A short run of one replica in a store of its own."""
    return replace(config, runs=folder, rendezvous=str(folder / "store"), num_replicas=1, num_tokens=16 * 8 * 32)


def be_shard(rank: int, meeting: Path) -> None:
    """Be one of two processes that our own launcher has started; they meet at a file."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", STORE: str(meeting)}


def come_and_go(config: TrainConfig) -> None:
    """Replicas a and b begin; c joins in two shards, is killed, and comes back from its checkpoint in one."""
    names = ("a", "b", "c", "c", "c")
    rank = int(os.environ["DILOCO_REPLICA"])
    others_metrics = config.directory / "metrics-0.jsonl"
    is_back, is_counted = config.runs / "is-back", config.runs / "is-counted"
    saved = config.runs / "c" / "checkpoints" / "replica-0" / "step-00000004.sha256"

    def wait_for_the_last(metrics) -> None:
        if metrics.step == STEPS // 3:
            wait_for(is_back)
        if metrics.step == STEPS // 2:
            wait_for(is_counted)

    def tell(metrics) -> None:
        if any("c" in outer_step.contributors for outer_step in metrics.outer_steps):
            is_counted.touch()

    def die(metrics) -> None:
        if metrics.step == 5:
            wait_for(saved)
            os.kill(os.getpid(), signal.SIGKILL)

    batch = (4, 2, 4, 4, 4)[rank]
    mine = of(config, names[rank], replica_batch=batch, micro_batch=2)
    if rank < 2:
        train(mine, on_step=wait_for_the_last)
    elif rank < 4:
        wait_for(others_metrics, num_lines=8)
        be_shard(rank - 2, config.directory / "meeting")
        train(replace(mine, shards_per_replica=2), on_step=die)
    else:
        wait_for(mine.directory / "metrics-0.jsonl", num_lines=5)
        wait_for(saved)
        train(mine, resume=True, on_start=lambda step, _: is_back.write_text(str(step)), on_step=tell)


@pytest.fixture(scope="module")
def eventful(config) -> TrainConfig:
    """The config of such a run, which is over."""
    config = replace(config, publish=str(config.runs.parent / "place"))  # a place takes one run
    run_replicas(come_and_go, 5, config, joined=False, mortal=(2, 3))
    return config


def test_a_run_ends_though_replicas_come_and_go(eventful):
    state = state_of(eventful.rendezvous)
    assert state.finished
    assert [member.name for member in state.members][2:] == ["c", "c"]
    first, second = state.members[2:]
    assert first.fenced and first.slot == second.slot and len({member.slot for member in state.members}) == 3
    assert (eventful.runs / "is-back").read_text() == "4"
    totals = {name: summary(eventful.runs / name) for name in "abc"}
    assert max(lines(eventful.runs / name, 0)[-1]["tokens"] for name in totals) >= eventful.num_tokens
    counted = state.tokens // len(state.fragments)
    assert {total["num_tokens"] for total in totals.values()} == {counted}
    for name, total in totals.items():
        steps = [line["step"] for line in lines(eventful.runs / name, 0)]
        assert steps == list(range(1, len(steps) + 1)) and total["num_steps"] == steps[-1]
        assert total["eval_loss"] < 5
    firsts = [line["step"] for line in lines(eventful.runs / "c", 0) if "new_tokens" not in line]
    assert firsts == [1, 5], "the others' tokens while c had no process are not of its steps"
    assert set(contributors(state)) == {"a", "b", "c"}
    expected = parameters_hash(replayed(eventful.rendezvous, initial=initial_parameters).parameters())
    ends = {(total["outer_hash"], total["entry"], total["closed"]) for total in totals.values()}
    assert ends == {(expected, state.number - 1, True)}
    assert len({total["eval_loss"] for total in totals.values()}) == 1
    for name in totals:
        model, step = run_parameters(eventful.runs / name, "outer")
        assert parameters_hash(dict(model.named_parameters())) == expected
        assert step == counted // eventful.tokens_per_step == run_parameters(eventful.rendezvous, "outer")[1]


def test_one_of_the_replicas_has_no_average_of_all(eventful):
    with pytest.raises(
        UserError, match=r"parameters=average: .*/a holds one of the replicas that meet in"
    ) as error:
        run_parameters(eventful.runs / "a", "average")
    assert error.value.fields == ("parameters",)


def test_a_summary_tells_the_tokens_per_second_of_its_replica_and_of_the_run(eventful):
    for name, batch in (("a", 4), ("b", 2)):
        total = summary(eventful.runs / name)
        own = batch * eventful.sequence_length * total["num_steps"] / total["wall_seconds"]
        assert total["replica_tokens_per_second"] == pytest.approx(own)
        run_pace = ReplicaTail(metrics_file(eventful.runs / name, 0)).read().tokens_per_second
        assert total["tokens_per_second"] == run_pace > own, "the tokens of all, while this replica trained"


def test_replicas_publish_the_runs_outer_parameters_in_turn(eventful):
    outer = replayed(eventful.rendezvous, initial=initial_parameters).parameters()
    with Follower(eventful.publish) as follower:
        version = follower.update()
        state = follower.state
        assert version.facts["final"] and version.number > 2
        assert all(torch.equal(state[name], tensor.bfloat16()) for name, tensor in outer.items())


def test_each_outer_step_says_who_contributed_with_what_weight(eventful):
    state, seen = state_of(eventful.rendezvous), {}
    for line in lines(eventful.runs / "b", 0):
        for outer_step in line.get("outer_steps", []):
            seen[outer_step["fragment"], outer_step["round"]] = outer_step["contributors"]
    assert {name for part in seen.values() for name in part} == {"a", "b", "c"}
    assert all(max(part.values()) == 1 for part in seen.values())
    assert any(part.keys() >= {"a", "b"} and part["b"] < part["a"] for part in seen.values())
    last = summary(eventful.runs / "b")["contributors"]
    assert sum(part["tokens"] for part in last.values()) <= state.tokens // state.rules.num_fragments
    assert last["a"]["tokens"] > last["b"]["tokens"] > 0


def test_the_log_tells_the_losses_of_the_replicas_metrics(eventful):
    state, counted = state_of(eventful.rendezvous), bodies(eventful.rendezvous, Outer)
    losses = [line["loss"] for line in lines(eventful.runs / "a", 0)]
    number = [member.name for member in state.members].index("a")
    (first,) = (c for outer in counted for c in outer.contributions if c.seq == 0 and c.replica == number)
    assert first.loss == pytest.approx(fmean(losses[: first.steps]))
    counted_losses = [c.loss for outer in counted for c in outer.contributions if c.loss is not None]
    assert sum(count for _, count in state.losses.parts) == len(counted_losses) > len(counted) / 2
    assert 2 < state.losses.last(state.num_outer) < losses[0]


def test_learning_rate_and_progress_never_go_back(eventful):
    for name in "ab":
        metrics = lines(eventful.runs / name, 0)
        tokens = [line["tokens"] for line in metrics]
        assert tokens == sorted(tokens)
        rates = [line["learning_rate"] for line in metrics if line["tokens"] > eventful.num_tokens // 4]
        assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": DecoderConfig(num_layers=3, num_heads=2, width=16, vocab_size=257)}, "model.num_layers"),
        ({"seed": 1}, "seed"),
        ({"diloco": {"wire": "bf16"}}, "diloco.wire"),
        ({"diloco": {"sync_every": 5}}, "diloco.sync_every"),
        ({"optimizer": {"learning_rate": 1e-4}}, "optimizer.learning_rate"),
        ({"elastic": {"quorum": "all"}}, "quorum"),
    ],
)
def test_a_joiner_with_other_settings_is_refused_with_the_field_and_both_values(eventful, change, field):
    changes = {
        name: replace(getattr(eventful, name), **value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    other = of(eventful, "other", **changes)
    with pytest.raises(DisagreementError) as error:
        train(other)
    assert error.value.field == field and field in str(error.value)
    assert not other.directory.exists()


def test_who_comes_back_creates_no_run_where_its_own_was(eventful, tmp_path):
    """Such as in a directory that is not mounted, or a bucket that was emptied."""
    shutil.copytree(eventful.runs / "a", tmp_path / "a")
    again = replace(of(eventful, "a"), runs=tmp_path, rendezvous=str(tmp_path / "store"))
    for reason in ("there is no directory", r"store holds no run: log/0000000000 is missing"):
        with pytest.raises(UserError, match=rf"{reason}.*, and .*/a has steps of a run there: bring"):
            train(again, resume=True)
        assert not list(tmp_path.glob("store/*"))
        (tmp_path / "store").mkdir(exist_ok=True)


def test_a_joiner_with_other_text_is_refused(eventful, tmp_path, small_corpus):
    data = replace(eventful.data, prepared=None, held_out_fraction=0.2, cache=tmp_path)
    other = resolved(prepare_run(of(eventful, "other", data=data)))
    with pytest.raises(DisagreementError, match="differs from the run in digest of the data: the run has"):
        train(other)


def test_a_joiner_of_a_run_that_is_over_is_told_so(eventful):
    with pytest.raises(
        UserError,
        match=r"^the run refuses this replica: .* run that has ended: diloco export .* create another in another",
    ):
        train(of(eventful, "late"))
    assert len(bodies(eventful.rendezvous, Join)) == 4


def test_a_finished_run_whose_metrics_are_damaged_ends_well(config, tmp_path, caplog):
    run = alone(config, tmp_path)

    def damage(metrics) -> None:
        if metrics.step == 3:
            with (run.directory / "metrics-0.jsonl").open("a") as file:
                file.write("{\n")

    outcome = train(run, on_step=damage)
    assert outcome is not None and "training_loss" not in outcome.summary and summary(run.directory)["closed"]
    (warning,) = (message for message in caplog.messages if "metrics-0" in message)
    assert re.search(
        r"metrics-0.jsonl, line 4, can't be read.*; the run is finished, and summary.json leaves out", warning
    )
    shown = summary_facts(converted(outcome.summary, Summary, source="the summary"))
    assert not {"training loss", "tokens/s", "compute utilization"} & shown.keys(), shown


@pytest.mark.parametrize("comes_and_goes", [True, False])
def test_an_evaluation_takes_time_from_a_replica_whose_others_go_on(comes_and_goes, config, tmp_path, monkeypatch):
    """Their tokens meanwhile are in those of its next step: so is the time."""
    run = replace(alone(config, tmp_path), evaluation=replace(config.evaluation, every_steps=4))
    if not comes_and_goes:
        run = replace(run, rendezvous=None)
    clock = count()

    def evaluated(_: object) -> float:
        for _ in range(1000):
            next(clock)
        return 3.0

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(loop._Run, "held_out_loss", evaluated)
    train(run)
    long = {line["step"] for line in lines(run.directory, 0) if line["step_seconds"] > 1000}
    assert long == ({5, 9, 13} if comes_and_goes else set())


def test_a_run_that_nobody_closes_is_summed_up_and_said(config, tmp_path, monkeypatch):
    monkeypatch.setattr(LogThread, "_end", lambda log_thread: None)
    run = replace(alone(config, tmp_path), timeout_seconds=2.0)
    with pytest.raises(
        ExchangeError, match=r"the run was not closed within 2 s: .* are those after entry \d+ of"
    ) as e:
        train(run)
    total = summary(run.directory)
    assert total["closed"] is False and f"after entry {total['entry']} of the log" in str(e.value)
    replay = replayed(run.rendezvous, initial=initial_parameters)
    assert total["outer_hash"] == parameters_hash(replay.parameters()), "of the entries that there are"
    assert replay.state.finished and not replay.state.closed
    monkeypatch.undo()
    train(run, resume=True)
    assert summary(run.directory)["closed"] is True, "a resume after the last step closes the run"
    assert replayed(run.rendezvous, initial=initial_parameters).checked.closed_by is not None


def train_together(config: TrainConfig) -> list[float]:
    """Two fixed members, of which the second is interrupted where the config says so."""
    rank = int(os.environ["DILOCO_REPLICA"])
    train(of(config, "ab"[rank]))
    return [line["learning_rate"] for line in lines(config.runs / "ab"[rank], 0)]


def test_fixed_members_have_the_learning_rates_of_a_fixed_group(config, tmp_path):
    """And combine by reduce_scatter."""
    fixed = replace(
        config,
        runs=tmp_path,
        rendezvous=str(tmp_path / "store"),
        elastic=ElasticConfig(quorum="all", num_shares=2),
        diloco=replace(config.diloco, combine="reduce_scatter:bf16"),
        num_tokens=(num_steps := 24) * 8 * 32,
    )
    everyones = run_replicas(train_together, 2, fixed, joined=False)
    expected = [rate(fixed, step) for step in range(1, num_steps + 1)]
    assert max(map(len, everyones)) == num_steps
    for rates in everyones:  # who sees first that the other has finished may stop some steps earlier
        assert rates[:-1] == expected[: len(rates) - 1] and len(rates) > num_steps - 8
    assert len({summary(tmp_path / name)["outer_hash"] for name in "ab"}) == 1
    tokens = [line["tokens"] for line in lines(tmp_path / "a", 0)]
    assert tokens[:-1] == [step * 8 * 32 for step in range(1, len(tokens))]


def interrupt(config: TrainConfig) -> str:
    """Replica b presses Ctrl-C; its payloads are counted, and a goes on."""
    rank, has_left = int(os.environ["DILOCO_REPLICA"]), config.runs / "has-left"

    def wait_for_b(metrics) -> None:
        if metrics.step == STEPS * 3 // 8:
            wait_for(has_left)

    if rank == 0:
        train(of(config, "a"), on_step=wait_for_b)
        return "finished"

    def press(metrics) -> None:
        if metrics.bytes_sent and metrics.step > 12:
            signal.raise_signal(signal.SIGINT)

    try:
        train(of(config, "b"), on_step=press)
    except Stopped as error:
        has_left.touch()
        return str(error)
    return "not interrupted"


def test_ctrl_c_leaves_the_run_and_loses_no_payload(config, tmp_path):
    run = replace(config, runs=tmp_path, rendezvous=str(tmp_path / "store"))
    finished, interrupted = run_replicas(interrupt, 2, run, joined=False)
    assert finished == "finished"
    (step,) = re.findall(r"^stopped by SIGINT: step (\d+) is saved$", interrupted)
    assert max(finished_steps(tmp_path / "b" / "checkpoints", 0)) == int(step) > 12
    state = state_of(run.rendezvous)
    assert [leave.finished for leave in bodies(run.rendezvous, Leave)] == [False, True]
    b = next(number for number, member in enumerate(state.members) if member.name == "b")
    sent = len(list(Path(run.rendezvous, "payloads", str(b)).iterdir()))
    last = max(log.last_seq.get(b, -1) for log in state.fragments)
    assert last == sent - 1, "the payload that was on its way at Ctrl-C"


def main_until(file: Path, arguments: list[str]) -> None:
    """The command line, whose replica takes three steps and waits for a file."""

    def begin(state, *others, **values):
        if state.step == 3:
            wait_for(file, seconds=TIMEOUT_SECONDS)
        return begin_step(state, *others, **values)

    loop.begin_step = begin
    main(arguments)


def test_a_joiner_needs_no_settings_but_its_text_and_name(folder):
    """And the same command goes on with the replica."""
    own = ["--rendezvous", "joined", "--runs", "elastic-joined", "--precision", "fp32"]
    own += ["--evaluation.num-tokens", "2048"]
    shared = ["--seed", "3", "--diloco.sync-every", "7", "--global-batch", "6", "--num-tokens", str(6 * 64 * 50)]
    first_tokens = ["--data.max-train-tokens", "20000"]
    join = ["train", *own, "--name", "b", "--data.train", "text.jsonl", "--data.held-out-fraction", "0.1"]
    metrics = {name: folder / "elastic-joined" / name / "metrics-0.jsonl" for name in "ab"}
    begin, is_back = command("--name", "a", *own, *shared, *first_tokens)[len(DILOCO) :], folder / "is-back"
    with program(main_until, is_back, begin, folder=folder) as first:
        wait_for(metrics["a"], num_lines=1)
        refused = run_main(main, join, folder=folder, timeout_seconds=TIMEOUT_SECONDS)
        assert "reads the first 20000 tokens of its training text" in refused.stderr, refused
        assert "set --data.max-train-tokens=20000" in refused.stderr
        join += first_tokens
        with program(main, join, folder=folder) as second:
            wait_for(metrics["b"], num_lines=10)
            os.kill(second.pid, signal.SIGTERM)
            assert second.wait(TIMEOUT_SECONDS).returncode == 143
        num_lines = metrics["b"].read_text().count("\n")
        with program(main, join, folder=folder) as second:
            wait_for(metrics["b"], num_lines=num_lines + 1)
            is_back.touch()
            done = second.wait(TIMEOUT_SECONDS)
        assert done.returncode == 0 and "going on from step" in done.stdout, done
        assert first.wait(TIMEOUT_SECONDS).returncode == 0
    a, b = (summary(folder / "elastic-joined" / name) for name in "ab")
    assert a["contributors"].keys() == {"a", "b"} and a["outer_hash"] == b["outer_hash"]


def test_a_command_joins_and_a_signal_lets_it_leave(folder):
    """A terminal sends Ctrl-C to all processes of the command; others send SIGTERM to its first."""
    flags = ["--rendezvous", "bucket", "--runs", "elastic-stopped"]
    metrics, bucket = folder / flags[-1] / "stopped" / "metrics-0.jsonl", str(folder / "bucket")
    saved = list[str]()  # by the same command
    for stop, number, exit_code in ((os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)):
        is_first, num_lines = not saved, 8 * (1 + len(saved))
        with started(folder, "--name", "stopped", *flags, "--num-tokens", str(8 * 64 * 4000)) as process:
            wait_for(metrics, num_lines=num_lines)
            stop(process.pid, number)
            done = process.wait(TIMEOUT_SECONDS)
        assert done.returncode == exit_code
        *_, stopped = done.stderr.splitlines()
        assert ("this run trusts everybody who can write to " in done.stderr) == is_first
        end = rf"diloco: stopped by {number.name}: step (\d+) is saved; go on from step \1 with: .*/stopped"
        match = re.fullmatch(end, stopped)
        assert match and int(match[1]) == metrics.read_text().count("\n") >= num_lines
        assert is_first or f"going on from step {saved[-1]}" in done.stdout
        saved.append(match[1])
    assert [join.name for join in bodies(bucket, Join)] == ["stopped"] * 2
    assert [leave.finished for leave in bodies(bucket, Leave)] == [False] * 2
    refused = run(folder, "--name", "other", *flags, "--diloco.sync-every", "7")
    assert refused.returncode == 2
    assert "differs from the run in --num-tokens: the run has 2048000, and this replica 30720" in refused.stderr
