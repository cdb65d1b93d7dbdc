"""A replica that is killed and resumed, and a job whose processes are replicas, for tests of the frameworks."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco


def connect() -> Any:
    """The exchange of a replica in its environment; alone, loopback."""
    is_joined = "DILOCO_ADDRESS" in os.environ
    return diloco.connect(timeout_seconds=60, leader=True) if is_joined else diloco.LoopbackExchange()


def build(model: nn.Module) -> diloco.StreamingDiLoCo:
    schedule = diloco.Schedule(sync_every=4, num_fragments=1, overlap_steps=2)
    return diloco.StreamingDiLoCo(model, fragments=diloco.whole(model), schedule=schedule, exchange=connect())


def meet_at(port: int) -> None:
    os.environ["DILOCO_ADDRESS"] = f"127.0.0.1:{port}"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_killed(train: Callable[..., None], *args: Any, port: int) -> None:
    """Run a training that ends with `die()`, in a process of its own."""
    meet_at(port)
    killed = get_context("fork").Process(target=train, args=args)
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL


def assert_resumed(results: Sequence[dict[str, Any]], num_steps: int) -> None:
    """Two replicas that were killed end as undisturbed ones, and have saved Θ."""
    for result in results:
        assert result["num_steps"] == num_steps, "micro-steps do not count"
        assert result["hash"] == result["undisturbed"], "neither kill -9 nor evaluations change a bit"
        assert result["hash"] == result["shipped"], "the model that is saved last is Θ"
    assert results[0]["hash"] == results[1]["hash"]


@contextmanager
def refused_inside_a_job(folder: Path) -> Iterator[Callable[[nn.Module], diloco.StreamingDiLoCo]]:
    """The engine of one of two processes of a job, which a framework must refuse: it would average gradients."""

    def build_inside(model: nn.Module) -> diloco.StreamingDiLoCo:
        schedule, exchange = diloco.Schedule(sync_every=4, num_fragments=1), diloco.ProcessGroupExchange()
        return diloco.StreamingDiLoCo(model, fragments=diloco.whole(model), schedule=schedule, exchange=exchange)

    store = (folder / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with pytest.raises(diloco.UserError, match="the 2 processes of this job average their gradients"):
            yield build_inside
    finally:
        torch.distributed.destroy_process_group()
