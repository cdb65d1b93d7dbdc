"""Signals: all replicas save the same step, and the run that goes on from there ends with the same bits."""

import json
import os
import random
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from tests.ports import free_port
from tests.processes import Program, program, run_main, run_replicas
from tests.rendezvous.replicas import Replica
from tests.running import torchrun as launched
from tests.sockets import family_of, listening
from tests.training.cases import rate
from tests.training.runs import (
    DILOCO,
    SAVING,
    SHORT,
    TIMEOUT_SECONDS,
    bodies,
    command,
    lines,
    quick_config,
    replicas,
    run,
    started,
    summary,
    wait_for_step,
)

from diloco.cli.main import main
from diloco.errors import ExchangeError, Stopped
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.log.entries import Leave
from diloco.rendezvous.replay import replayed
from diloco.training import loop, stopping
from diloco.training.config.config import CheckpointConfig, DilocoConfig, TrainConfig
from diloco.training.config.resolve import resolved
from diloco.training.loop import train
from diloco.training.processes import STORE
from diloco.training.records.checkpoints import finished_steps
from diloco.training.records.finished import run_parameters
from diloco.training.records.runs import read_config
from diloco.training.records.store_runs import initial_parameters
from diloco.training.world import alone

STEPS = 18
NUM_MOMENTS = int(os.environ.get("NUM_MOMENTS", "1"))
"""Random moments at which a run is stopped; the first ones of the same row each time."""


@pytest.fixture(scope="module")
def config(small_corpus, tmp_path_factory) -> TrainConfig:
    """A run of milliseconds per step, which saves nothing by itself before its end."""
    folder = tmp_path_factory.mktemp("interrupted")
    return quick_config(
        folder,
        small_corpus,
        name="whole",
        num_tokens=STEPS * 8 * 32,
        diloco=DilocoConfig(sync_every=6, layers_per_fragment=1, overlap_steps=(2, 4)),
        checkpoint=CheckpointConfig(every_steps=1000),
    )


def be_process(config: TrainConfig, meeting: str) -> int:
    """Be one of the processes of a run, which meet at a file; returns its number."""
    rank = os.environ["DILOCO_REPLICA"]
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(config.num_processes)}
    os.environ[STORE] = str(config.runs / f"meeting-{meeting}")
    return int(rank)


def stop_and_go_on(config: TrainConfig, stopped_rank: int, at_step: int) -> tuple[str, int, list[Any]]:
    """A run of which one process hears SIGTERM, and which goes on; its end, and its hash beside a whole run's."""
    rank, sentence, exit_code = be_process(config, "whole"), "", 0

    def hear(metrics) -> None:
        if rank == stopped_rank and metrics.step == at_step:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # by way of a launcher, too
        time.sleep(0.02 * (rank == 0))  # so that the others are ahead

    outcomes = [train(config)]
    stopped = replace(config, name="stopped")
    be_process(config, "stopped")
    try:
        train(stopped, on_step=hear)
    except Stopped as error:
        sentence, exit_code = str(error), error.exit_code
    be_process(config, "again")
    outcomes.append(train(stopped, resume=True))
    return sentence, exit_code, [outcome and outcome.summary["outer_hash"] for outcome in outcomes]


TAYLOR = {"outer": "rda:restart_every=2", "merge": "taylor", "mixing": None}


@pytest.mark.parametrize(
    ("changes", "stopped_rank"),
    [
        ({"num_replicas": 1, "diloco": {"overlap_steps": (2,)}}, 0),
        ({"diloco": {"outer": "eager:lr=0.5", "merge": "translate", "mixing": None}}, 1),
        pytest.param({"method": "data_parallel"}, 1, marks=pytest.mark.slow),
        pytest.param(
            {"num_replicas": 1, "shards_per_replica": 2, "diloco": TAYLOR | {"overlap_steps": (4,)}},
            1,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"num_replicas": 1, "ddp_per_replica": 2, "diloco": {"overlap_steps": (2,)}}, 1, marks=pytest.mark.slow
        ),
    ],
    ids=["alone", "streaming", "data_parallel", "shards", "ddp"],
)
def test_one_process_is_told_and_all_save_the_same_step(config, tmp_path, changes, stopped_rank):
    changes = {**changes, "diloco": replace(config.diloco, **changes.get("diloco", {}))}
    run = resolved(replace(config, runs=tmp_path, micro_batch=None, **changes))
    imports = ("torch._dynamo", "torch.distributed.fsdp") if run.shards_per_replica > 1 else ()
    everyones = run_replicas(
        stop_and_go_on, run.num_processes, run, stopped_rank, 9, joined=False, imports=imports
    )
    (held,) = {tuple(finished_steps(run.runs / "stopped" / "checkpoints", m)) for m in range(run.num_replicas)}
    step, last = held
    assert 9 <= step < STEPS == last
    whose = f"step {step} is saved" if run.num_replicas == 1 else f"every replica has saved step {step}"
    assert {(sentence, code) for sentence, code, _ in everyones} == {(f"stopped by SIGTERM: {whose}", 143)}
    hashes = everyones[0][2]
    assert hashes[0] and hashes[0] == hashes[1]
    for replica in range(run.num_replicas):
        whole, resumed = (lines(tmp_path / name, replica) for name in ("whole", "stopped"))
        assert [(line["step"], line["loss"]) for line in whole] == [
            (line["step"], line["loss"]) for line in resumed
        ]


def end_beside_a_tracker_that_waits(config: TrainConfig) -> bool:
    """True unless the first replica's tracker waits in vain for the other replica's end."""
    rank, ended, answers = be_process(config, "whole"), config.runs / "ended", list[bool]()

    def close() -> None:
        deadline = time.monotonic() + 30
        while rank == 0 and not ended.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        answers.append(rank > 0 or ended.exists())

    loop.tracker = lambda *_, **__: SimpleNamespace(log=lambda *_: None, close=close)
    train(config)
    if rank == 1:
        ended.touch()
    return answers == [True]


def test_a_tracker_that_waits_for_its_server_keeps_no_other_replica_from_its_end(config, tmp_path):
    run = replace(config, runs=tmp_path, timeout_seconds=10.0, trackers=("tensorboard",))
    assert run_replicas(end_beside_a_tracker_that_waits, 2, run, joined=False) == [True, True]


def losses(run: Path, replica: int) -> list[tuple[int, float, float | None]]:
    return [(line["step"], line["loss"], line.get("mean_loss")) for line in lines(run, replica)]


def stop_beside_one_that_stands_still(config: TrainConfig) -> str:
    """Replica 1 is stopped like a machine that hangs, and replica 0 hears a signal."""
    rank, pid = be_process(config, "meeting"), config.runs / "pid"
    stopping._SECONDS_TO_ANSWER = 1.0
    if rank == 1:
        pid.write_text(str(os.getpid()))

    def hear(metrics) -> None:
        if rank == 0 and metrics.step == 9:
            os.kill(int(pid.read_text()), signal.SIGSTOP)
            signal.raise_signal(signal.SIGINT)

    try:
        train(config, on_step=hear)
    except (Stopped, ExchangeError) as error:
        return str(error)
    finally:
        if rank == 0:
            os.kill(int(pid.read_text()), signal.SIGCONT)
    return "not stopped"


@pytest.mark.slow
def test_a_replica_that_does_not_answer_is_named_within_the_bound(config, tmp_path):
    begin = time.monotonic()
    first, _ = run_replicas(stop_beside_one_that_stands_still, 2, replace(config, runs=tmp_path), joined=False)
    expected = "stopped by SIGINT: this step is not saved by every replica: replica 1 did not answer within 1 s"
    assert first == expected and time.monotonic() - begin < 20


def test_a_signal_ends_a_process_at_once_that_has_lost_the_store_of_all():
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    with stopping.stoppable() as stop:
        stop.save_first(replace(alone(), store=client), 3)
        del server
        assert stop._listener is not None
        stop._listener.join(10)
        assert not stop.is_before(4)
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM: this step is not saved by every replica: "):
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_is_obeyed_though_others_keep_a_replica_waiting(tmp_path, monkeypatch):
    """With the quorum "all", beside one that has died, or at the end of a run, in a store that is full."""
    monkeypatch.setattr(stopping, "_SECONDS_TO_ANSWER", 0.5)
    ours, dead = (Replica(str(tmp_path), name=name, quorum="all", num_replicas=1) for name in ("ours", "dead"))
    dead.vanish()
    rendezvous = ours.exchange
    with stopping.stoppable() as stop:
        stop.save_first(replace(alone(), rendezvous=rendezvous), 0)
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM: this step is not saved: it waits for others"):
            for _ in range(20):
                ours.step()
    assert stop._watcher is not None and not stop._watcher.is_alive()
    rendezvous.abort("the test is over")


def wait_for(condition, process: Program) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.process.exitcode is None and not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def num_lines(directory: Path) -> int:
    metrics = directory / "metrics-0.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def stop_by_terminal(process: Program) -> int:
    os.killpg(process.pid, signal.SIGINT)
    return signal.SIGINT


def stop_the_first_process(process: Program) -> int:
    os.kill(process.pid, signal.SIGTERM)
    return signal.SIGTERM


def preempt(process: Program) -> int:
    os.killpg(process.pid, signal.SIGUSR1)
    return signal.SIGUSR1


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_a_run_stopped_at_any_moment_and_then_killed_goes_on_bit_for_bit(folder, short, moment):
    """While it starts, in its first steps, later, as it saves, and near its end."""
    draw = random.Random(moment)
    stop = (stop_the_first_process, preempt, stop_by_terminal)[moment % 3]
    step = (0, draw.randint(1, 3), draw.randint(24, 30), draw.randint(1, 28))[moment % 4]
    every, seconds = draw.choice(("1", "7", "1000")), draw.uniform(0, 0.03)
    directory = folder / "runs" / f"moment-{moment}"
    flags = [*SHORT, "--checkpoint.every-steps", every]
    with started(folder, "--name", directory.name, *flags) as process:
        if step:
            wait_for(lambda: num_lines(directory) >= step, process)
        else:
            process.wait_for_lines(1)
        time.sleep(seconds)
        number = stop(process) if process.process.exitcode is None else 0
        done = process.wait(TIMEOUT_SECONDS)
    at = num_lines(directory)
    print(f"moment {moment}: {stop.__name__} {at} steps, saved every {every}: {done.stderr}", end="")  # noqa: T201
    assert done.returncode or step > 20, "it was stopped, but near its end"
    if done.returncode:
        assert done.returncode == 128 + number and done.stderr.count("\n") == 1, done.stderr
        if saved := re.search(r"every replica has saved step (\d+); go on from step (\d+) with: ", done.stderr):
            assert saved[1] == saved[2] and at == int(saved[1]) >= step
        else:
            assert at in (0, 30) and "saved step" not in done.stderr, done.stderr
    is_claimed = (directory / "config.json").exists()
    again = ["--resume", str(directory)] if is_claimed else ["--name", directory.name, *SHORT, *SAVING]
    if at < 12 and every != "1000":
        kill_a_replica(folder, directory, again, step=12)
        again = ["--resume", str(directory)]
    done = run(folder, *again) if not (directory / "summary.json").exists() else done
    assert done.returncode == 0, done.stderr
    for name in ("outer_hash", "eval_loss", "bytes_sent_per_replica"):
        assert summary(directory)[name] == summary(short)[name]
    for replica in (0, 1):
        assert losses(directory, replica) == losses(short, replica)
        assert_equal(final_state(short, replica), final_state(directory, replica))


def kill_a_replica(folder: Path, directory: Path, flags: list[str], *, step: int) -> None:
    """Start or resume a run, and kill its last replica once replica 0 has taken a step; the other ends, too."""
    with started(folder, *flags) as process:
        victim, checkpoints = wait_for_step(process, directory, step), directory / "checkpoints"
        wait_for(lambda: all(finished_steps(checkpoints, replica) for replica in (0, 1)), process)
        os.kill(victim, signal.SIGSTOP)  # the run is not to end before
        assert {str(address) for address, _ in listening(*family_of(process.pid))} == {"127.0.0.1"}
        os.kill(victim, signal.SIGKILL)
        done = process.wait(60)
    sentence = r"diloco: replica \d was killed by SIGKILL .*; go on from step \d+ with: "
    assert done.returncode == 1 and re.fullmatch(
        rf"{sentence}.* --resume \S*runs/{directory.name}\n", done.stderr
    ), done.stderr
    assert num_lines(directory) < 30


def final_state(run: Path, replica: int) -> dict:
    newest = max((run / "checkpoints" / f"replica-{replica}").glob("step-*/"))
    tensors = {path.name: safetensors.torch.load_file(path) for path in newest.glob("*.safetensors")}
    facts = json.loads((newest / "facts.json").read_text())
    del facts["seconds"], facts["blocked_seconds"], facts["sync"]["blocked_seconds"]
    return facts | {"tensors": tensors}


def assert_equal(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(folder):
    directory = folder / "runs" / "twice"
    with started(folder, "--name", "twice", "--num-tokens", "10M", "--checkpoint.every-steps", "5") as process:
        wait_for(lambda: all(finished_steps(directory / "checkpoints", replica) for replica in (0, 1)), process)
        os.kill(max(replicas(process.pid)), signal.SIGSTOP)  # the others wait for its answer
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1.5)
        assert process.process.exitcode is None
        os.killpg(process.pid, signal.SIGINT)
        begin = time.monotonic()
        done = process.wait(10)
    assert time.monotonic() - begin < 5 and done.returncode == 130
    newest = min(finished_steps(directory / "checkpoints", replica)[-1] for replica in (0, 1))
    end = rf"diloco: stopped at once by a second signal; go on from step {newest} with: diloco train .*\n"
    assert re.fullmatch(end, done.stderr), done.stderr


@pytest.mark.slow
def test_one_of_two_machines_is_told_and_both_go_on_with_the_bits_of_one(folder, short):
    """Two launchers, each with one replica and a directory of its own."""
    machines = [folder / f"machine-{m}" for m in (0, 1)]
    for machine in machines:
        machine.mkdir()
        shutil.copy(folder / "text.jsonl", machine)

    def torchrun(rank: int, port: str) -> Any:
        arguments = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
        arguments += ["--master-addr", "127.0.0.1", "--master-port", port]
        arguments += ["-m", *command("--name", "far", *SHORT)[2:]]
        with program(launched, arguments, folder=machines[rank], GLOO_SOCKET_IFNAME="lo") as process:
            if rank == 1:
                wait_for(lambda: num_lines(machines[0] / "runs" / "far") >= 5, process)
                os.kill(process.pid, signal.SIGTERM)
            return process.wait(TIMEOUT_SECONDS)

    def again(rank: int, port: str) -> Any:
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        arguments = command("--resume", "runs/far")[len(DILOCO) :]
        return run_main(
            main, arguments, folder=machines[rank], timeout_seconds=TIMEOUT_SECONDS, MASTER_PORT=port, **place
        )

    def both(start: Any) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(start, (0, 1), [str(free_port())] * 2))

    first, second = both(torchrun)
    steps = [finished_steps(machine / "runs" / "far" / "checkpoints", m) for m, machine in enumerate(machines)]
    assert first.returncode and second.returncode and steps[0][-1] == steps[1][-1] > 5
    saved = rf"every replica has saved step {steps[0][-1]}; go on from step {steps[0][-1]} with: torchrun .*"
    assert re.search(rf"diloco: stopped by SIGTERM: {saved} --node-rank 1 ", second.stderr), second.stderr
    assert re.search(rf"diloco: stopped by SIGTERM at replica 1: {saved} --node-rank 0 ", first.stderr), (
        first.stderr
    )
    assert [done.stderr.count("of every network interface of 127.0.0.1") for done in (first, second)] == [1, 0]
    for machine, done in enumerate((first, second)):
        assert done.stdout.startswith(f"start replica {machine} of 2, which "), done.stdout

    processes = both(again)
    for process in processes:
        assert process.returncode == 0, process.stderr
    outer_hash = summary(machines[0] / "runs" / "far")["outer_hash"]
    assert outer_hash == summary(short)["outer_hash"]
    for machine, process in enumerate(processes):
        for line in (
            rf"replica {machine}  step 30/30  loss [\d.]+  .*",
            r"held-out loss +[\d.]+ ± .*",
            rf"outer hash +{outer_hash[:16]}",
            "files                runs/far.*",
        ):
            assert re.search(f"^{line}$", process.stdout, re.MULTILINE), (line, process.stdout)
    assert "The model writes" in processes[0].stdout and "this machine's metrics and" in processes[1].stdout
    commands = "next: diloco report runs/far, diloco chat runs/far --serve"
    assert processes[0].stdout.splitlines()[-1] == commands and "next:" not in processes[1].stdout
    assert not (machines[1] / "runs" / "far" / "summary.json").exists()
    mine, theirs = (read_config(machine / "runs" / "far") for machine in machines)
    assert replace(mine, runs=theirs.runs, data=theirs.data) == theirs


def stop_shards_in_a_store(config: TrainConfig) -> tuple[str, tuple[float, ...]]:
    """Two shards of one replica: the one that has not joined the store hears a signal; then they go on."""
    rank, rates = be_process(config, "stopped"), []

    def hear(metrics) -> None:
        rates.append(metrics.learning_rate)
        if rank == 1 and metrics.step == 9:
            signal.raise_signal(signal.SIGTERM)

    try:
        train(config, on_step=hear)
    except Stopped as error:
        be_process(config, "again")
        train(config, resume=True, on_step=hear)
        return str(error), tuple(rates)
    return "not stopped", ()


@pytest.mark.slow
def test_the_shards_of_a_replica_in_a_store_save_one_step_and_leave(config, tmp_path):
    """And are one replica there, with the tokens and the parameters of them all."""
    store = str(tmp_path / "store")
    diloco = replace(config.diloco, overlap_steps=2, **TAYLOR)
    changes = {"runs": tmp_path, "rendezvous": store, "micro_batch": None, "diloco": diloco}
    run = resolved(replace(config, num_replicas=1, shards_per_replica=2, **changes))
    ((sentence, rates),) = {*run_replicas(stop_shards_in_a_store, 2, run, joined=False)}
    step, _ = finished_steps(run.checkpoints, 0)
    assert sentence == f"stopped by SIGTERM: step {step} is saved" and step >= 9
    assert [leave.finished for leave in bodies(store, Leave)] == [False, True]
    metrics = lines(run.directory, 0)
    assert [line["step"] for line in metrics] == [*range(1, len(rates) + 1)]
    assert [line["learning_rate"] for line in metrics] == [*rates]
    assert [*rates[:9]] == [rate(run, k) for k in range(1, 10)], (
        "the batch of a replica is that of its shards together"
    )
    for line in metrics:  # at the resume a fragment that was counted meanwhile loses the steps since it was sent
        assert 0 <= line["step"] - line["tokens"] / (8 * 32) < 2, "tokens count once"
    replay, total = replayed(store, initial=initial_parameters), summary(run.directory)
    assert {member.tokens / member.steps for member in replay.state.members} == {8 * 32}
    model, _ = run_parameters(run.directory, "outer")
    hashes = {parameters_hash(each) for each in (replay.parameters(), dict(model.named_parameters()))}
    assert hashes == {total["outer_hash"]} and total["shards_per_replica"] == 2 and total["eval_loss"] < 6
