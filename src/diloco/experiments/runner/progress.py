"""The progress of a grid: the runs that are over, that run now, and that are left."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.data.prepare import PrepareProgress
from diloco.experiments.runner.job import Job, running_jobs


@dataclass(frozen=True, kw_only=True)
class GridProgress:
    """A grid at one moment."""

    jobs: Mapping[Path, Job]
    """All jobs, by the directories of their runs."""
    labels: Mapping[Path, str]
    """The labels of each run that differ within the grid."""
    results: Mapping[Path, Mapping[str, Any]]
    """The results of the runs that are over."""
    preparing: PrepareProgress | None = None
    """The text that is being prepared."""

    @property
    def num_failed(self) -> int:
        """Runs that are over without a result."""
        return sum("failed" in result for result in self.results.values())

    @property
    def running(self) -> list[Path]:
        """The runs that this process runs now; those on a cluster's machines are not known."""
        return [path for path in running_jobs() if path in self.jobs and path not in self.results]

    def part(self, of_running: Mapping[Path, float] | None = None) -> float:
        """The share of the work that is done, counted in floating-point operations.

        Args:
            of_running: the share that is done of each run that is not over.
        """
        parts = {**(of_running or {}), **dict.fromkeys(self.results, 1.0)}
        work = {path: _work(job) for path, job in self.jobs.items()}
        return sum(work[path] * part for path, part in parts.items()) / sum(work.values())


def _work(job: Job) -> float:
    """Floating-point operations of a run, 6·N·tokens."""
    return 6.0 * job.config.model.num_matrix_params * job.config.num_tokens


def differing_labels(labels: Mapping[Path, Mapping[str, Any]]) -> dict[Path, str]:
    """The labels of each run as text, without those that all runs share.

    >>> differing_labels({Path("a"): {"seed": 0, "τ": 1}, Path("b"): {"seed": 0, "τ": 2}})
    {PosixPath('a'): 'τ=1', PosixPath('b'): 'τ=2'}
    """
    shared = set.intersection(*({(k, str(v)) for k, v in each.items()} for each in labels.values()))
    return {
        path: " ".join(
            f"{name}={_short(value)}" for name, value in each.items() if (name, str(value)) not in shared
        )
        for path, each in labels.items()
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
