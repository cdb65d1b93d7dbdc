"""A run's directory, looked at while it grows; beside it, what its whole files say."""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, replace

import pytest
from tests.training.test_metrics import metrics

from diloco.schedule import Schedule
from diloco.training.records import tail as module
from diloco.training.records.metrics import MetricsLog, read_metrics
from diloco.training.records.runs import running
from diloco.training.records.tail import MOST_BINS, ReplicaSteps, ReplicaTail, RunTail


@pytest.fixture
def growing(finished_run, tmp_path):
    """A copy of a run that has not begun, and a function that lets it take steps."""
    run = tmp_path / "run"

    def grow(num_steps: int, half_a_line: int = 0) -> None:
        run.mkdir(exist_ok=True)
        for file in ("data.json", "config.json"):
            if not (run / file).exists():
                shutil.copy(finished_run / file, run)
        for replica in (0, 1):
            lines = (finished_run / f"metrics-{replica}.jsonl").read_text().splitlines(keepends=True)
            path = run / f"metrics-{replica}.jsonl"
            text = "".join(lines[:num_steps]) + (lines[num_steps][:half_a_line] if half_a_line else "")
            with path.open("a") as file:
                file.write(text[path.stat().st_size :])

    return run, grow


def test_a_run_is_followed_from_before_its_beginning_to_its_end(growing, finished_run):
    run, grow = growing
    tail = RunTail(run)
    tail.again()
    assert tail.standing == "not begun" and tail.last is None and tail.part == 0
    whole = [read_metrics(finished_run, replica) for replica in (0, 1)]
    for num_steps, half in ((0, 0), (7, 30), (59, 0), (60, 10), (120, 0)):
        grow(num_steps, half)
        tail.again()
        steps = [each[:num_steps] for each in whole]
        assert not tail.trouble and tail.part == num_steps / 120
        assert tail.standing == ("running" if num_steps else "begun, no step yet")
        for each, one in zip(steps, tail.replicas.values(), strict=False):
            assert one.last == each[-1]
            assert (
                one.bytes_sent
                == sum(step.bytes_sent for step in each)
                == sum(part.bytes_sent for part in one.bins)
            )
            losses = sum(step.loss for step in each)
            assert sum(part.loss for part in one.bins) == pytest.approx(losses)
            assert sum(part.num_steps for part in one.bins) == num_steps
    held_out = [step.eval_loss for each in whole for step in each if step.step == 120]
    assert tail.eval_loss == pytest.approx(sum(held_out) / 2) and tail.eta_seconds == 0
    shutil.copy(finished_run / "summary.json", run)
    tail.again()
    assert (tail.standing, tail.part, tail.eta_seconds) == ("finished", 1, None)
    assert tail.eval_loss == json.loads((run / "summary.json").read_text())["eval_loss"]


def test_a_run_that_was_deleted_is_not_over_and_what_cannot_be_read_is_trouble(growing, finished_run, tmp_path):
    run, grow = growing
    grow(120)
    shutil.copy(finished_run / "summary.json", run)
    tail = RunTail(run)
    tail.again()
    assert tail.standing == "finished"
    shutil.rmtree(run)
    tail.again()
    assert (tail.standing, tail.summary, tail.part) == ("not begun", None, 0)
    grow(5)
    (run / "metrics-0.jsonl").unlink()
    (run / "metrics-0.jsonl").symlink_to("x" * 300)
    tail.again()
    assert tail.standing == f"{run} can't be read: File name too long"


def test_a_run_whose_lock_is_free_before_its_end_is_stopped_and_says_how(growing):
    run, grow = growing
    grow(5)
    tail = RunTail(run)

    def seen() -> tuple[str, bool, str]:
        tail.again()
        return tail.standing, tail.is_over, tail.ending

    assert seen() == ("running", False, "")  # this machine may be without replica 0, whose process has the lock
    error = KeyboardInterrupt("stopped by SIGINT: step 5 is saved\nand more")
    error.add_note("go on from step 5 with: it")
    with suppress(KeyboardInterrupt), running(run, hint="go on with: it"):
        held, lock = seen(), (run / "running").read_text()
        raise error
    assert held == ("running", False, "")
    assert seen() == ("stopped", True, "stopped by SIGINT: step 5 is saved; go on from step 5 with: it")
    (run / "running").write_text(lock)  # its process could say nothing
    standing, is_over, ending = seen()
    assert (standing, is_over) == ("stopped", True)
    assert ending == f"{lock.splitlines()[0]} was killed; go on with: it"
    (run / "running").write_text("process 7 on another-machine since yesterday\n")
    assert seen() == ("running", False, "")  # its lock may not reach this machine
    with running(run):
        pass
    assert seen() == ("stopped", True, "")


def test_a_machine_without_replica_0_knows_when_the_last_step_is_taken(growing, monkeypatch):
    run, grow = growing
    grow(120)
    tail = RunTail(run)
    tail.again()
    assert (tail.standing, tail.is_over) == ("running", False)
    monkeypatch.setattr(module, "_SILENT_SECONDS", -1.0)
    monkeypatch.setattr(module, "_SILENT_STEPS", -1)
    assert (tail.standing, tail.is_over) == ("all steps are taken", True)


def test_of_replicas_that_come_and_go_nothing_is_known_to_be_in_flight(growing):
    run, grow = growing
    grow(17)
    config = json.loads((run / "config.json").read_text())
    config["diloco"]["overlap_steps"] = 2
    (run / "config.json").write_text(json.dumps({**config, "num_replicas": 1, "rendezvous": "store"}))
    tail = RunTail(run)
    tail.again()
    assert tail.last is not None and not tail.trouble and not tail.in_flight()


@pytest.mark.parametrize("num_steps", [9, 10, 11, 16, 17, 40])
def test_what_is_in_flight_was_sent_and_not_merged(growing, num_steps):
    run, grow = growing
    grow(num_steps)
    tail = RunTail(run)
    tail.again()
    schedule = Schedule(sync_every=10, num_fragments=3, overlap_steps=(2, 7))
    for replica in (0, 1):
        due = [schedule.due(step, replica) for step in range(1, num_steps + 1)]
        sent = {sync for each in due for sync in each.send} - {sync for each in due for sync in each.merge}
        assert tail.in_flight()[replica] == {sync.fragment: sync.step for sync in sent}


def test_metrics_that_a_resume_wrote_anew_are_read_from_their_beginning(growing, finished_run):
    run, grow = growing
    grow(60)
    tail = RunTail(run)
    tail.again()
    for num_new in (40, 0):  # more bytes than at the last look, and fewer
        log = MetricsLog(run, 0, after_step=40)
        for step in read_metrics(finished_run, 1)[40 : 40 + num_new]:
            log.write(replace(step, loss=9.0))
        log.close()
        tail.again()
        (one, other), steps = tail.replicas.values(), read_metrics(run, 0)
        assert (one.last.step, other.last.step) == (len(steps), 60)
        assert sum(part.num_steps for part in one.bins) == len(steps)
        assert sum(part.loss for part in one.bins) == pytest.approx(sum(step.loss for step in steps))


def test_damage_is_named_at_every_look_and_nothing_is_counted_twice(growing):
    run, grow = growing
    grow(5)
    with (run / "metrics-0.jsonl").open("a") as file:
        file.write("{}\n")
    tail = RunTail(run)
    for _ in range(2):
        tail.again()
        assert "metrics-0.jsonl, line 6, can't be read" in tail.standing
    assert sum(part.num_steps for part in tail.replicas[0].bins) == 5
    (run / "config.json").write_text("{")
    for _ in range(2):
        tail.again()
        assert "config.json can't be read" in tail.standing and tail.config is None


def test_what_others_trained_while_a_replica_was_away_makes_its_pace_no_faster():
    steps = ReplicaSteps()
    for step in range(1, 41):
        away = 1_000_000 if step > 20 else 0
        new_tokens = None if step in (1, 21) else 10  # a process's first step
        steps.add(replace(metrics(step), tokens=10 * step + away, new_tokens=new_tokens))
    assert steps.tokens_per_second == pytest.approx(100) and steps.seconds_for(1000) == pytest.approx(10)


def test_curves_of_long_runs_keep_all_steps_in_bounded_memory_and_looks_read_bounded_parts(tmp_path, monkeypatch):
    num_steps = 3 * MOST_BINS + 5
    path = tmp_path / "metrics-0.jsonl"
    lines = (asdict(replace(metrics(step), bytes_sent=step)) for step in range(1, num_steps + 1))
    path.write_text("".join(json.dumps({**line, "outer_steps": []}) + "\n" for line in lines))
    monkeypatch.setattr(module, "_BYTES_A_LOOK", 1 << 14)
    tail, num_looks = ReplicaTail(path), 0
    while num_looks == 0 or tail.is_behind:
        tail.look()
        num_looks += 1
    assert num_looks == path.stat().st_size // (1 << 14) + 1 > 3
    assert len(tail.steps.bins) <= MOST_BINS and tail.steps.bins[-1].last == 10 * num_steps
    assert sum(part.bytes_sent for part in tail.steps.bins) == num_steps * (num_steps + 1) // 2
    assert {part.num_steps for part in tail.steps.bins[:-1]} == {4}
    assert tail.steps.tokens_per_second == pytest.approx(100)
