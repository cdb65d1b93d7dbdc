"""Accelerate: two replicas, each a job of its own, in Accelerate's own loop."""

import os
import warnings
from typing import Any

import pytest
import torch
from tests.integrations.jobs import assert_resumed, build, die, is_killed, meet_at, refused_inside_a_job
from tests.ports import free_port
from tests.processes import run_replicas
from torch import nn

import diloco
from diloco.outer.digest import parameters_hash

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

STEPS, SAVED_AT, KILLED_AT = 14, 9, 11
ACCUMULATED = 2


class Job:
    """A replica's model, optimizer and accelerator, built as in Accelerate's documentation."""

    def __init__(self) -> None:
        from diloco.integrations.accelerate import DiLoCo

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.diloco = DiLoCo(accelerator=self.accelerator, model=self.model, build=build)

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.model(inputs).squeeze(1) - inputs.sum(1)).square().mean()

    def train(self, first: int = 1, last: int = STEPS, save: str | None = None) -> None:
        replica = int(os.environ.get("DILOCO_REPLICA", "0"))
        with self.diloco as diloco_:
            for micro_step in range(ACCUMULATED * (first - 1), ACCUMULATED * last):
                data = torch.Generator().manual_seed(10_000 * replica + micro_step)
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.loss(torch.randn(16, 8, generator=data)))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    diloco_.step()
                if save is not None and micro_step + 1 == ACCUMULATED * SAVED_AT:
                    self.accelerator.save_state(save)
                if save is not None and micro_step + 1 == ACCUMULATED * KILLED_AT:
                    die()


def train_and_be_killed(folder: str) -> None:
    Job().train(save=folder)


def train_replica(folder: str, ports: list[int]) -> dict[str, Any]:
    """A run that is killed and resumed, and then the same run undisturbed."""
    warnings.simplefilter("default")
    folder = f"{folder}/replica-{os.environ['DILOCO_REPLICA']}"
    is_killed(train_and_be_killed, folder, port=ports[0])

    meet_at(ports[1])
    job, held_out = Job(), torch.randn(64, 8, generator=torch.Generator().manual_seed(99))
    job.accelerator.load_state(folder)
    engine = job.diloco.engine
    assert engine.num_steps == SAVED_AT
    with engine.outer_parameters_applied():
        evaluated = job.loss(held_out).item()
    own = job.loss(held_out).item()
    job.train(first=SAVED_AT + 1)
    job.accelerator.save_model(job.model, f"{folder}/shipped")
    loaded = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    accelerate.load_checkpoint_in_model(loaded, f"{folder}/shipped")

    meet_at(ports[2])
    undisturbed = Job()
    undisturbed.train()
    return {
        "hash": engine.outer_hash(),
        "shipped": parameters_hash(dict(loaded.named_parameters())),
        "undisturbed": undisturbed.diloco.engine.outer_hash(),
        "num_steps": engine.num_steps,
        "loss": [evaluated, own, job.loss(held_out).item()],
    }


def test_two_replicas_are_killed_and_resume(tmp_path):
    ports = [free_port() for _ in range(3)]
    results = run_replicas(train_replica, 2, str(tmp_path), ports, joined=False)
    assert_resumed(results, STEPS)
    (evaluated, own, after), (evaluated_there, own_there, after_there) = (result["loss"] for result in results)
    assert evaluated == evaluated_there and own != own_there and after == after_there
    assert after < evaluated


@pytest.mark.filterwarnings("ignore:after")  # nothing was sent
def test_micro_steps_of_an_accumulation_by_hand_do_not_count():
    """As run_clm_no_trainer accumulates, with `step()` at the end of the body, where LocalSGD's stands."""
    job = Job()
    with job.diloco as diloco_:
        for micro_step in range(12):
            job.accelerator.backward(job.loss(torch.ones(2, 8)) / 4)
            if micro_step % 4 == 3:
                job.optimizer.step()
                job.optimizer.zero_grad()
            diloco_.step()
    job.optimizer.step()
    assert diloco_.engine.num_steps == 3


@pytest.mark.filterwarnings("ignore:after")
def test_the_optimizer_must_be_prepared_and_train_the_model():
    job = Job()
    job.accelerator._optimizers.clear()
    with pytest.raises(diloco.UserError, match=r"prepare the optimizer with accelerator\.prepare"), job.diloco:
        pass
    job = Job()
    other, _ = job.accelerator.prepare(nn.Linear(2, 2), torch.optim.SGD([torch.ones(1, requires_grad=True)]))
    with job.diloco:  # the last optimizer is that of another model
        job.optimizer.step()
    assert job.diloco.engine.num_steps == 1
    job = Job()
    job.accelerator._optimizers[:] = [torch.optim.SGD(other.parameters())]
    with pytest.raises(diloco.UserError, match="trains none of the parameters that the engine"), job.diloco:
        pass


@pytest.mark.filterwarnings("ignore:after")
def test_a_loop_over_epochs_enters_one_context_and_makes_no_other():
    from diloco.integrations.accelerate import DiLoCo

    job = Job()
    job.train(1, 4)
    job.train(5, 8)
    assert job.diloco.engine.num_steps == 8
    with pytest.raises(diloco.UserError, match="make one before the loop over epochs, and enter it"):
        DiLoCo(accelerator=job.accelerator, model=job.model, build=build)


def test_a_loop_without_a_step_is_refused_and_an_error_in_it_stays_what_it_is():
    with pytest.raises(diloco.UserError, match="the optimizer took no step"), Job().diloco:
        pass
    with pytest.raises(KeyError), Job().diloco:
        raise KeyError


def test_sharded_models_and_the_processes_of_one_job_are_refused(monkeypatch, tmp_path):
    from diloco.integrations.accelerate import DiLoCo

    accelerator = Job().accelerator
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    with pytest.raises(diloco.UserError, match="DiLoCo is for whole replicas, as LocalSGD is, not with FSDP"):
        DiLoCo(accelerator=accelerator, model=nn.Linear(1, 1), build=build)
    accelerator = Job().accelerator  # its wrapper is taken off before the engine sees the model
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
    with refused_inside_a_job(tmp_path) as build_inside:
        DiLoCo(accelerator=accelerator, model=nn.Linear(1, 1), build=build_inside)
