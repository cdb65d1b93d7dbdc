"""Tiny runs, and machines that train nothing, for the tests of grids."""

import math
import random
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.data.config import DataConfig
from diloco.experiments.runner.grid import LabelledRun
from diloco.experiments.runner.job import Job, _be_job
from diloco.training.config.config import CheckpointConfig, TrainConfig
from diloco.training.config.engine_settings import outer_rate
from diloco.training.config.recipes import recipe

HALF = 10
"""Half of the steps."""


def tiny_config(corpus: Path, cache: Path, **changes: Any) -> TrainConfig:
    """A run of one replica and 20 steps, with changes."""
    tiny = recipe("tiny")
    data = DataConfig(train=(str(corpus),), held_out_fraction=0.1, cache=cache)
    fields = {"num_replicas": 1, "model": replace(tiny.model, num_layers=2), "data": data}
    return replace(tiny, **({"num_tokens": 20 * tiny.tokens_per_step} | fields | changes))


def labelled_runs(corpus: Path, cache: Path) -> list[LabelledRun]:
    """Two equal runs, one of two replicas that is evaluated halfway, and one that fails."""
    one = tiny_config(corpus, cache)
    configs = {
        "first": one,
        "same": replace(one, name="another"),
        "two": replace(one, num_replicas=2, checkpoint=CheckpointConfig(every_steps=HALF)),
        "wrong": replace(one, diloco=replace(one.diloco, layers_per_fragment=7)),
    }
    return [
        LabelledRun(labels={"kind": kind}, config=config, at_step=HALF if kind == "two" else None)
        for kind, config in configs.items()
    ]


def be_job_of_short_samples(job: Job) -> dict[str, Any]:
    """Be the process of a job; the samples of a tiny run take two fifths of its time."""
    from diloco.training.records import samples

    samples._NUM_TOKENS = 16
    return _be_job(job)


class FakeMachine:
    """A machine that answers at once with a made-up result, and remembers its jobs."""

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        self.jobs, self.answer = [], answer

    def submit(self, job):
        self.jobs.append(job)
        future: Future = Future()
        future.set_result(self._result(job) if self.answer is None else dict(self.answer))
        return future

    def _result(self, job) -> dict[str, Any]:
        outer_steps = [
            {"sent_step": step, "fragment": step // 9, "cosine": step / 10, "layer_cosine": {"blocks.1": 0.5}}
            for step in (1, 2, 5, 9)
        ]
        common = {"round": 1, "blocked_seconds": 0.0, "outer_gradient_norm": 1.0}
        losses = {"eval_loss": 2.0, "eval_standard_error": 0.1, "eval_bits_per_byte": 3.0}
        evaluated = {key: {"acc": 0.25} if ", " in key else losses for key in job.evaluated}
        return {
            "summary": summary(eval_loss=1.0, num_tokens=7, num_steps=9),
            "evaluated": evaluated,
            "outer_steps": [common | outer_step for outer_step in outer_steps],
        }

    def close(self) -> None:
        raise AssertionError("nothing was interrupted")


class Valley(FakeMachine):
    """A loss that is lowest at a learning rate of 0.01, a batch of 4096 tokens per replica, and η = 0.6.

    Runs of `failing` replicas fail.
    """

    def __init__(self, failing: int | None = None, noise: float = 0.0) -> None:
        super().__init__()
        self.failing, self.noise = failing, noise

    def _result(self, job):
        config = job.config
        if config.num_replicas == self.failing:
            return {"failed": "diverged", "is_final": True}
        octaves = math.log2(config.tokens_per_step / (4096 * config.num_replicas))
        distance = math.log(config.optimizer.learning_rate / 0.01)
        # Larger batches want larger rates: the valley is a diagonal one.
        loss = 3 + distance**2 + octaves**2 / 10 - 0.5 * octaves * distance
        loss += 0 if config.method == "data_parallel" else (outer_rate(config) - 0.6) ** 2
        loss += self.noise * random.Random(f"{config.seed} {config.optimizer.learning_rate}").gauss(0, 1)
        numbers = summary(eval_loss=loss, num_tokens=config.num_tokens, num_steps=config.num_steps)
        return {"summary": numbers, "evaluated": {}, "outer_steps": []}


def summary(**values: Any) -> dict[str, Any]:
    """A run's summary, as far as rows need it."""
    names = ("eval_standard_error", "eval_bits_per_byte", "num_params")
    numbers = dict.fromkeys((*names, "bytes_sent_per_replica", "data_parallel_bytes_per_replica"), 1)
    return {**numbers, "outer_hash": "1", "precision": "fp32"} | values
