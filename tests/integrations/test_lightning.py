"""Lightning: two replicas, each a Trainer of its own, on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.jobs import assert_resumed, refused_inside_a_job
from tests.ports import free_port
from tests.processes import run_replicas

import diloco
from diloco.outer.digest import parameters_hash

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),  # on a machine with Slurm
]


@pytest.fixture(scope="module")
def jobs() -> Any:
    """The jobs' module."""
    pytest.importorskip("lightning.pytorch")
    from tests.integrations import lightning_jobs

    return lightning_jobs


@pytest.fixture(scope="module")
def trained(jobs, tmp_path_factory) -> list[Any]:
    """The results of eight processes, which find Lightning imported."""
    arguments = (str(tmp_path_factory.mktemp("replicas")), [free_port() for _ in range(8)])
    return run_replicas(jobs.train, 8, *arguments, joined=False, timeout_seconds=120)


def test_two_replicas_are_killed_and_resume(jobs, trained):
    results = trained[:2]
    assert_resumed(results, jobs.STEPS)
    for result in results:
        assert len(result["validated"]) == 3, "after the check of a resumed run, two epochs"
        (tested,) = result["tested"]
        assert tested["test_loss"] == pytest.approx(min(result["validated"][1:])), "the best checkpoint holds Θ"
    first, second = results
    assert first["validated"] == second["validated"], "the replicas share Θ, and nothing else"
    assert first["weights_of_best"] == second["weights_of_best"]
    assert first["own_of_best"] != second["own_of_best"]
    assert first["validated"][-1] < first["validated"][0]


def test_two_replicas_of_two_processes_with_ddp_agree(trained):
    assert trained[2:6] == [(trained[2][0], trained[2][0], 6)] * 4


def test_the_snippet_trains_two_replicas(trained):
    """docs/snippets/lightning_autoencoder.py"""
    hashes, others = trained[6:]
    assert hashes == others and len(hashes) == 1


def test_trainers_that_would_lose_the_outer_parameters_are_refused(jobs, tmp_path):
    averaging = jobs.pl.callbacks.EMAWeightAveraging()
    with pytest.raises(
        diloco.UserError, match="EMAWeightAveraging would leave its own average in the model, not Θ"
    ):
        jobs.fit(jobs.trainer_of(str(tmp_path), averaging), jobs.Module())
    weights_only = jobs.pl.callbacks.ModelCheckpoint(save_weights_only=True, monitor="train_loss")
    with pytest.raises(diloco.UserError, match="save_weights_only=True would save one replica's own parameters"):
        jobs.fit(jobs.trainer_of(str(tmp_path), weights_only), jobs.Module())
    trainer = jobs.trainer_of(str(tmp_path))
    trainer.strategy.__class__ = type(
        "FSDPStrategy", (type(trainer.strategy),), {"restore_checkpoint_after_setup": True}
    )
    with pytest.raises(diloco.UserError, match="on one device or under DDP, not with FSDPStrategy"):
        jobs.fit(trainer, jobs.Module())


def test_one_trainer_whose_processes_are_replicas_is_refused(jobs, tmp_path, monkeypatch):
    trainer = jobs.trainer_of(str(tmp_path))
    monkeypatch.setattr(jobs.pl.Trainer, "world_size", 2)
    with refused_inside_a_job(tmp_path) as build_inside:
        jobs.DiLoCoCallback(build_inside).setup(trainer, jobs.Module(), "fit")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("steps_of_batch", "num_steps"), [((3,), 9), ((2, 1), 3)], ids=["one", "several"])
def test_the_steps_of_a_manual_optimization_count(jobs, tmp_path, steps_of_batch, num_steps):
    """In three of six batches; of several optimizers a batch counts once."""
    changes = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "limit_train_batches": 6, "max_epochs": 1}
    trainer = jobs.trainer_of(str(tmp_path), **changes)
    jobs.fit(trainer, jobs.StepsByHand(*steps_of_batch))
    assert jobs.engine_of(trainer).num_steps == num_steps


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_of_another_model_is_refused(jobs, tmp_path):
    changes = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    with pytest.raises(diloco.UserError, match="trains none of the parameters that the engine exchanges"):
        jobs.fit(jobs.trainer_of(str(tmp_path), **changes), jobs.StepsByHand(1, outside=jobs.Module()))


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_evaluates_other_parameters_than_theta_is_refused(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "eval", lambda optimizer: None, raising=False)
    with pytest.raises(diloco.UserError, match="a schedule-free optimizer evaluates parameters of its own"):
        jobs.fit(jobs.trainer_of(str(tmp_path)), jobs.Module())


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_another_kind_is_refused(jobs, tmp_path):
    trainer = jobs.trainer_of(str(tmp_path), max_epochs=1)
    with pytest.raises(diloco.UserError, match="the engine is built when trainer"):
        _ = jobs.engine_of(trainer)
    jobs.fit(trainer, jobs.Module())
    with pytest.raises(diloco.UserError, match="this engine has trained already: make a new Trainer"):
        jobs.fit(trainer, jobs.Module())
    plain = jobs.pl.Trainer(default_root_dir=f"{tmp_path}/plain", accelerator="cpu", max_steps=1, logger=False)
    plain.fit(jobs.Module(), jobs.data(0, 32))
    (foreign,) = Path(tmp_path, "plain").rglob("*.ckpt")
    with pytest.raises(diloco.UserError, match="was saved without DiLoCoCallback: load its weights"):
        jobs.fit(jobs.trainer_of(str(tmp_path)), jobs.Module(), ckpt_path=str(foreign))


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_inside_a_validation_is_as_one_after_it(jobs, tmp_path):
    """As where a scheduler's signal comes in a validation."""
    save = jobs.SaveInside(str(tmp_path))
    jobs.fit(jobs.trainer_of(f"{tmp_path}/run", save, max_epochs=1), jobs.Module())
    inside, after = (torch.load(tmp_path / name, weights_only=True) for name in ("inside.ckpt", "after.ckpt"))
    for part in (lambda saved: saved["state_dict"], lambda saved: saved["diloco"]["own"]):
        assert all(torch.equal(value, part(after)[name]) for name, value in part(inside).items())
    assert any(not torch.equal(value, inside["diloco"]["own"][n]) for n, value in inside["state_dict"].items())
    assert save.hashes[0] == save.hashes[1], "the validation goes on with Θ"


@pytest.mark.filterwarnings("ignore")
def test_a_fit_that_has_nothing_left_to_train_leaves_theta_in_a_module_with_checkpoints_of_its_own(jobs, tmp_path):
    """A script that is started again after its end."""
    trainer = jobs.trainer_of(str(tmp_path), max_epochs=3)
    jobs.fit(trainer, jobs.Head())
    (last,) = tmp_path.rglob("last.ckpt")
    saved = torch.load(last, weights_only=True)
    outer = saved["diloco"]["engine"]["outer"]
    assert saved["diloco"]["engine"]["in_flight"]
    assert all(torch.equal(saved["state_dict"][name], outer[name]) for name in outer)
    assert not all(torch.equal(saved["diloco"]["own"][name], outer[name]) for name in outer)
    module = jobs.Head()
    jobs.fit(jobs.trainer_of(str(tmp_path), max_epochs=3), module, ckpt_path=str(last))
    left = {name: module.get_parameter(name) for name in outer}
    assert parameters_hash(left) == jobs.engine_of(trainer).outer_hash()
