"""A resume that changes the schedule: the rates after its step, and a run that was over and goes on."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.training.cases import rate, resolved
from tests.training.runs import lines, run, summary

from diloco.errors import UserError
from diloco.training.config.config import with_value
from diloco.training.config.recipes import tiny
from diloco.training.records.runs import schedule_changes, with_phase


def scheduled(**optimizer):
    return resolved(optimizer=replace(tiny().optimizer, **optimizer))


def asked(saved, **changes):
    """The config of a resume that leaves the warm-up out."""
    return replace(with_value(saved, "optimizer.warmup_steps", None), **changes)


def continued(saved, asked, step):
    """The resolved config of a new phase."""
    return resolved(with_phase(saved, asked, step))


def test_an_extended_run_warms_up_from_where_it_was_and_ends_at_five_percent():
    saved = resolved()
    config = continued(saved, asked(saved, num_tokens=3 * saved.num_tokens), 60)
    peak = config.optimizer.learning_rate
    rates = [rate(config, step) for step in range(60, 181)]
    assert rates[0] == rate(saved, 60) == pytest.approx(0.05 * peak)
    assert rates[:13] == pytest.approx([peak * (0.05 + 0.95 * step / 12) for step in range(13)])
    assert rates[12 + 54] == pytest.approx(peak * (0.05 + 0.95 / 2))
    assert all(a > b for a, b in pairwise(rates[12:])) and rates[-1] == pytest.approx(0.05 * peak)


def test_wsd_before_its_decay_stays_at_the_peak_until_the_new_one():
    saved = scheduled(schedule="wsd", decay_fraction=0.25)
    config = continued(saved, asked(saved, num_tokens=2 * saved.num_tokens), 40)
    rates = [rate(config, step) for step in range(40, 121)]
    assert set(rates[:61]) == {config.optimizer.learning_rate}, "the last quarter of 80 steps decays"
    assert all(a > b for a, b in pairwise(rates[60:]))


def test_a_second_phase_begins_where_the_first_is():
    saved = resolved()
    first = continued(saved, asked(saved, num_tokens=2 * saved.num_tokens), 60)
    second = continued(first, with_value(asked(first), "optimizer.learning_rate", 1e-3), 80)
    assert rate(second, 80) == rate(first, 80)
    assert max(rate(second, step) for step in range(84, 121)) == 1e-3
    assert schedule_changes(first, second)["optimizer.learning_rate"] == (4e-3, 1e-3)
    assert not schedule_changes(first, with_value(first, "timeout_seconds", 5.0))


def test_a_warm_up_of_as_many_steps_as_the_saved_one_is_kept_where_it_is_asked_for():
    saved = scheduled(warmup_steps=3)
    longer = asked(saved, num_tokens=2 * saved.num_tokens)
    assert continued(saved, longer, 60).optimizer.warmup_steps == 6
    assert continued(saved, with_value(longer, "optimizer.warmup_steps", 3), 60).optimizer.warmup_steps == 3


def test_a_run_from_its_first_step_has_the_schedule_of_its_new_length():
    saved = resolved()
    config = continued(saved, asked(saved, num_tokens=2 * saved.num_tokens), 0)
    expected = resolved(num_tokens=2 * saved.num_tokens)
    assert [rate(config, t) for t in range(121)] == [rate(expected, t) for t in range(121)]


@pytest.mark.parametrize(("num_steps", "step"), [(60, 60), (40, 60)])
def test_a_run_cannot_end_before_the_step_it_has_reached(num_steps, step):
    saved = resolved()
    with pytest.raises(UserError, match=rf"are {num_steps} steps, and the run has taken 60: take more than 30720"):
        continued(saved, asked(saved, num_tokens=num_steps * 512), step)


@pytest.mark.slow
def test_a_finished_run_is_extended(folder, short):
    """The run goes on where it ended: steps, data and Θ; and a plain resume repeats the new phase bit for bit."""
    extended = shutil.copytree(short, folder / "runs" / "extended")
    before = summary(extended)
    num_steps = before["num_steps"]
    num_tokens, end = before["num_tokens"] * 4 // 3, num_steps * 4 // 3
    flags = ["--num-tokens", str(num_tokens), "--optimizer.learning-rate", "0.003"]
    process = run(folder, "--resume", str(extended), *flags)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"num_tokens is {num_tokens} from here on, and was {before['num_tokens']}" in process.stdout
    assert f"going on from step {num_steps}" in process.stdout
    config = json.loads((extended / "config.json").read_text())
    assert (config["num_tokens"], config["optimizer"]["start_step"]) == (num_tokens, num_steps)
    after = summary(extended)
    assert after["num_steps"] == end and after["num_tokens"] == num_tokens
    assert after["eval_loss"] < before["eval_loss"] and after["outer_hash"] != before["outer_hash"]
    rates = [line["learning_rate"] for line in lines(extended, 0)]
    assert len(rates) == end and rates[num_steps - 1] < rates[num_steps] <= max(rates[num_steps:]) == 0.003
    shutil.rmtree(extended / "checkpoints" / "replica-0" / f"step-{end:08d}")
    (extended / "checkpoints" / "replica-0" / f"step-{end:08d}.sha256").unlink()
    (extended / "summary.json").unlink()
    assert run(folder, "--resume", str(extended)).returncode == 0
    assert summary(extended)["outer_hash"] == after["outer_hash"]
