"""Figures of a run, from diaries whose answers are known."""

import json
from pathlib import Path

import pytest
from benchmarks.peer_study.figures import Times, figures, read

TIMES = Times(begin=5.0, death=100.0, join=200.0, end=250.0)


def line(event: str, at: float, **values: float | bool) -> dict:
    return {"event": event, "at": at, **values}


def survivor(*, stall_seconds: float, failed_steps: float) -> list[dict]:
    """Steps of 1 s; an outer step each 10 s, but for a gap; 100 B up and 200 B down a step."""
    starts = [float(at) for at in range(101)] + [at + 100 + stall_seconds for at in range(1, 151)]
    steps = [line("step", at, sent=100 * i, received=200 * i) for i, at in enumerate(starts)]
    merges, commits = [], []
    for at in (*range(8, 100, 10), *range(128, 250, 10)):
        commits.append(line("commit", at + 0.5))
        merges.append(line("merge", at + 0.5, lost_steps=2.0, counted=True))
    merges.append(line("merge", 110.0, lost_steps=failed_steps, counted=False))
    return sorted([*steps, *merges, *commits], key=lambda event: event["at"])


def test_figures_of_a_death_and_a_join():
    survivors = [
        survivor(stall_seconds=4.0, failed_steps=40.0),
        survivor(stall_seconds=0.0, failed_steps=0.0),
    ]
    joiner = [
        line("start", 200.0),
        line("step", 203.0),
        line("merge", 205.0, lost_steps=0.0, counted=False),
        line("merge", 207.0, lost_steps=0.0, counted=True),
    ]
    row = figures(survivors, survivors[1], joiner, TIMES, num_fragments=2)
    assert row.step_seconds == 1.0
    assert (row.quiet_stall_seconds, row.stall_seconds) == (0.0, 4.0)
    assert (row.quiet_lost_steps, row.lost_steps) == (2.0, 40.0)
    assert row.quiet_lost_percent == pytest.approx(100 * 10 * 2 / 2 / 95)
    assert (row.quiet_commits, row.dead_commits) == (pytest.approx(60 * 10 / 95), 60 * 8 / 100)
    assert row.gap_seconds == 28.5
    assert (row.joined_seconds, row.counted_seconds) == (3.0, 7.0)
    assert row.kilobytes_down == 2 * row.kilobytes_up == pytest.approx(0.2 * 94 / 10)


def test_survivors_that_never_step_again_stall_for_all_the_time():
    stuck = [event for event in survivor(stall_seconds=0.0, failed_steps=0.0) if event["at"] < TIMES.death]
    row = figures([stuck], stuck, [line("step", 203.0)], TIMES, num_fragments=2)
    assert row.stall_seconds == 99.0, "100 s, less the median"
    assert row.dead_commits == 0 and row.gap_seconds == 100.0
    assert row.counted_seconds != row.counted_seconds, "the new replica was in no outer step"


def test_a_death_before_the_warm_seconds_are_over_is_refused():
    diary = survivor(stall_seconds=0.0, failed_steps=0.0)
    early = Times(begin=5.5, death=6.0, join=20.0, end=30.0)
    with pytest.raises(ValueError, match=r"no step in the 0\.5 s between .* raise --quiet-seconds"):
        figures([diary], diary, [line("step", 21.0)], early, num_fragments=2)


def test_a_diary_may_end_in_the_middle_of_a_line(tmp_path: Path):
    whole = line("step", 1.0, sent=0, received=0)
    (tmp_path / "0.jsonl").write_text(json.dumps(whole) + '\n{"event": "st')
    assert read(tmp_path / "0.jsonl") == [whole]
