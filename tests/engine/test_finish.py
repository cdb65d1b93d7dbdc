"""The end of a run: fragments that were never sent are named, or flushed."""

import gc
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.engine.cases import Case, inner_step, outer_of, theta_of, train
from tests.processes import run_replicas

import diloco

CASE = Case(P=3, H=10, tau=2, wire="int4")
"""The fragments are sent after steps 10, 13 and 16."""


def advanced(steps: int) -> tuple:
    model = CASE.model()
    engine = CASE.engine(model)
    for t in range(1, steps + 1):
        inner_step(model, engine.exchange.replica, t)
        engine.step()
    return engine, model


def test_fragments_that_were_never_sent_are_named():
    engine, _ = advanced(14)
    with pytest.warns(
        UserWarning, match=r"after 14 inner steps fragment 2 \(blocks.2.weight, …\) was never"
    ) as own:
        engine.finish()
    assert own[0].filename == __file__
    engine, _ = advanced(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.finish()


class SharpnessAware(torch.optim.SGD):
    """An optimizer with two steps of its own, neither of them `step()`."""

    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(0.1)


def test_a_loop_whose_inner_steps_were_never_counted_is_told_so():
    model = CASE.model()
    engine, optimizer = CASE.engine(model), SharpnessAware(model.parameters())
    engine.attach(optimizer)
    for _ in range(16):
        optimizer.second_step()
    with pytest.warns(UserWarning, match=r"counted.*: step\(\) of the attached .* call engine.step\(\)") as own:
        engine.finish()
    assert own[0].filename == __file__


LOST = r"an engine ends after 3 inner steps without finish\(\): .* add engine.finish\(\) after the loop, unless .*"
UNCOUNTED = "an engine ends whose model has changed, and no inner step was counted: add engine.attach.*"


def evaluate(engine: diloco.StreamingDiLoCo) -> None:
    with engine.outer_parameters_applied():
        pass


@pytest.mark.parametrize(
    ("num_steps", "counted", "end", "warning"),
    [
        (3, "by step()", None, LOST),
        (3, "by attach()", None, LOST),
        (3, "never", None, UNCOUNTED),
        (3, "never", evaluate, UNCOUNTED),
        (0, "never", None, None),
        (0, "never", evaluate, None),
        (3, "by step()", evaluate, LOST),
        (3, "by step()", diloco.StreamingDiLoCo.finish, None),
        (3, "by step()", diloco.StreamingDiLoCo.state_dict, None),
        (3, "never", lambda engine: engine.load_state_dict(engine.state_dict()), None),
    ],
)
@pytest.mark.filterwarnings("ignore:after 3 inner steps fragment")
def test_an_engine_that_ends_with_work_that_is_lost_says_which_line_the_loop_lacks(
    num_steps, counted, end, warning, caplog
):
    def loop() -> None:
        model = torch.nn.Linear(3, 1)
        engine = diloco.StreamingDiLoCo(model, fragments="whole", exchange=diloco.LoopbackExchange())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if counted == "by attach()":
            engine.attach(optimizer)
        for _ in range(num_steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if counted == "by step()":
                engine.step()
        if end is not None:
            end(engine)

    gc.collect()
    caplog.clear()
    loop()
    gc.collect()
    assert [re.fullmatch(warning, line) is not None for line in caplog.messages] == ([True] if warning else [])


SCRIPT = """
import os, sys, torch, diloco, diloco.engine.streaming
if child := os.fork():  # two programs, which import torch once
    os.waitpid(child, 0)
else:
    os.dup2(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), 2)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = diloco.StreamingDiLoCo(model, fragments="whole", exchange=diloco.LoopbackExchange())
engine.attach(optimizer)
for _ in range(3):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_program_that_ends_says_so_once_and_not_after_an_error_nor_in_a_fork(tmp_path):
    command = [sys.executable, "-c", f"{SCRIPT}os.fork() if child else 1 / 0", str(tmp_path / "failed")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert re.fullmatch(f"{LOST}\n", done.stderr), done.stderr
    failed = (tmp_path / "failed").read_text()
    assert re.fullmatch(r"Traceback .*ZeroDivisionError[^\n]*\n", failed, re.DOTALL), failed


def flush() -> dict:
    engine, model = advanced(14)
    initial, bytes_before = theta_of(CASE.model()), engine.bytes_sent
    merged = engine.finish(flush=True)
    syncs = [tuple(step.sync) for step in merged]
    moved = [
        bool(np.any(after != before))
        for after, before in zip(np.split(outer_of(engine), [4, 6]), np.split(initial, [4, 6]), strict=True)
    ]
    again = engine.finish(flush=True)
    state = engine.state_dict()
    resumed_model = CASE.model()
    resumed = CASE.engine(resumed_model)
    resumed_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    one, other = list(train(engine, model, 40)), list(train(resumed, resumed_model, 40))
    return {
        "syncs": syncs,
        "moved": moved,
        "again": again,
        "in_flight": state["in_flight"],
        "bytes": engine.bytes_sent > bytes_before,
        "same": all(a.Theta.tobytes() == b.Theta.tobytes() for a, b in zip(one, other, strict=True)),
        "hash": engine.outer_hash(),
    }


def test_a_flush_merges_the_last_work_of_every_fragment_and_the_run_may_go_on():
    results = run_replicas(flush, 2)
    for result in results:
        assert result["syncs"] == [(1, 1, 13), (0, 2, 14), (1, 2, 14), (2, 1, 14)]
        assert result["moved"] == [True] * 3
        assert result["again"] == () and result["in_flight"] == [] and result["bytes"] and result["same"]
    assert results[0]["hash"] == results[1]["hash"]


def flush_alone() -> str:
    engine, _ = advanced(14)
    with pytest.raises(diloco.DisagreementError) as caught:
        engine.finish(flush=dist.get_rank() == 0)
    return str(caught.value)


def test_all_replicas_flush_or_none():
    for message in run_replicas(flush_alone, 2):
        assert "fragments that finish() flushes: replica 0 has [0, 1, 2], replica 1 has []" in message
