"""The figures of a run, from the diaries of its replicas."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Diary = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Times:
    """The times of events, on the monotonic clock."""

    begin: float
    """The end of the first seconds of training, which are left out."""
    death: float
    join: float
    """The new replica has imported its modules, and built its model."""
    end: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A row of the table; nan where nothing was seen."""

    step_seconds: float
    """Median inner step of the survivors."""
    quiet_stall_seconds: float
    """Longest step of a survivor before the death, beyond the median: what the machine itself does."""
    stall_seconds: float
    """The same between death and join."""
    quiet_lost_percent: float
    """Inner steps of the survivors that entered no outer step, before the death: a merge drops 1 − α of the steps
    since the send, and GradientMail's `Overwrite` all of them."""
    quiet_lost_steps: float
    """The most steps of one fragment that a survivor lost at once, before the death."""
    lost_steps: float
    """The same between death and join."""
    quiet_commits: float
    """Outer steps a minute before the death."""
    dead_commits: float
    """The same between death and join."""
    gap_seconds: float
    """Longest time without an outer step, between death and join."""
    joined_seconds: float
    """Time from the new replica's start to its first inner step."""
    counted_seconds: float
    """Time from its start to the first outer step that it was in."""
    kilobytes_up: float
    """Kilobytes sent for each outer step, on average over the replicas, before the death."""
    kilobytes_down: float


def read(path: Path) -> Diary:
    """The whole lines of a diary."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def figures(
    survivors: Sequence[Diary], victim: Diary, joiner: Diary, times: Times, *, num_fragments: int
) -> Figures:
    """A run's figures."""
    quiet, dead = (times.begin, times.death), (times.death, times.join)
    steps = [_seconds_of_steps(diary, quiet) for diary in survivors]
    if not all(steps):
        raise ValueError(
            f"a replica made no step in the {quiet[1] - quiet[0]:.1f} s between --warm-seconds, which are left "
            "out, and the death: raise --quiet-seconds"
        )
    median = statistics.median([seconds for part in steps for seconds in part])
    stalls = [max(_seconds_of_steps(diary, dead), default=dead[1] - dead[0]) for diary in survivors]
    lost_steps = sum(line["lost_steps"] for diary in survivors for line in _within(diary, "merge", quiet))
    traffic = [_traffic(diary, quiet) for diary in (*survivors, victim)]
    counted = [line["at"] for line in joiner if line["event"] == "merge" and line["counted"]]
    return Figures(
        step_seconds=median,
        quiet_stall_seconds=max(map(max, steps)) - median,
        stall_seconds=max(stalls) - median,
        quiet_lost_percent=100 * lost_steps / num_fragments / sum(map(len, steps)),
        quiet_lost_steps=_most_lost(survivors, quiet),
        lost_steps=_most_lost(survivors, dead),
        quiet_commits=_a_minute(survivors, quiet),
        dead_commits=_a_minute(survivors, dead),
        gap_seconds=max(_longest_gap(diary, dead) for diary in survivors),
        joined_seconds=next(line["at"] for line in joiner if line["event"] == "step") - times.join,
        counted_seconds=min(counted) - times.join if counted else float("nan"),
        kilobytes_up=statistics.mean(up for up, _ in traffic) / 1000,
        kilobytes_down=statistics.mean(down for _, down in traffic) / 1000,
    )


def _within(diary: Diary, event: str, span: tuple[float, float]) -> Diary:
    return [line for line in diary if line["event"] == event and span[0] <= line["at"] < span[1]]


def _seconds_of_steps(diary: Diary, span: tuple[float, float]) -> list[float]:
    """The time from each inner step to the next, of the steps that begin in a span."""
    steps = [line["at"] for line in diary if line["event"] == "step"]
    return [after - at for at, after in pairwise(steps) if span[0] <= at < span[1]]


def _most_lost(diaries: Sequence[Diary], span: tuple[float, float]) -> float:
    return max((line["lost_steps"] for diary in diaries for line in _within(diary, "merge", span)), default=0.0)


def _a_minute(diaries: Sequence[Diary], span: tuple[float, float]) -> float:
    return 60 * statistics.mean(len(_within(diary, "commit", span)) for diary in diaries) / (span[1] - span[0])


def _longest_gap(diary: Diary, span: tuple[float, float]) -> float:
    moments = [span[0], *(line["at"] for line in _within(diary, "commit", span)), span[1]]
    return max(after - at for at, after in pairwise(moments))


def _traffic(diary: Diary, span: tuple[float, float]) -> tuple[float, float]:
    """Bytes sent and received for each outer step."""
    steps, num_commits = _within(diary, "step", span), len(_within(diary, "commit", span))
    first, last = steps[0], steps[-1]
    return tuple((last[key] - first[key]) / max(1, num_commits) for key in ("sent", "received"))
