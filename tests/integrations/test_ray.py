"""Ray: Ray Train, a launch, and a grid, in one cluster.

One replica is in a TorchTrainer, and another in a process that does without Ray, which costs less.
"""

import importlib.util
import os
import re
import shutil
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.experiments.runner.machines import labelled_runs
from tests.experiments.runner.test_grid import start
from tests.fleets.cases import num_steps, wait, write_fleet
from tests.integrations.jobs import meet_at
from tests.ports import free_port
from tests.processes import run_replicas, wait_for_end
from tests.training.runs import lines, summary

import diloco
from diloco.cli.main import main
from diloco.experiments.runner.grid import make_job, run_grid
from diloco.experiments.runner.machines import RayCluster
from diloco.experiments.runner.rows import read_rows
from diloco.fleets.launch import states
from diloco.outer.digest import parameters_hash
from diloco.rendezvous.replay import replayed
from diloco.training.records.runs import LOCK_FILE
from diloco.training.records.store_runs import initial_parameters

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KILLED_AT = 11
IMPORTS = ["ray.train.torch"]


def example() -> Any:
    """examples/ray_train.py as a module."""
    spec = importlib.util.spec_from_file_location("ray_train", ROOT / "examples" / "ray_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def killing(folder: str) -> Any:
    """The example's loop, which dies once, after the step KILLED_AT."""

    def train_loop_per_worker(config: dict[str, Any]) -> None:
        module = example()
        batch_of = module.batch_of

        def batch_or_death(replica: int, step: int) -> Any:
            died = Path(folder, "died")
            if step == KILLED_AT + 1 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return batch_of(replica, step)

        module.batch_of = batch_or_death
        module.train_loop_per_worker(config)

    return train_loop_per_worker


CONFIG = {"lr": 0.1, "num_replicas": 2, "num_steps": 14, "save_every": 3}


def train_without_ray(folder: str, address: str) -> dict[str, Any]:
    """The last metrics of replica 1: the example's loop, which is started again, as Ray does, when it fails."""
    import ray.train.torch

    reported: list[Any] = []

    def report(metrics: dict[str, Any], checkpoint: Any) -> None:
        kept = shutil.copytree(checkpoint.path, Path(folder, str(len(reported))))
        reported.append(SimpleNamespace(metrics=metrics, checkpoint=ray.train.Checkpoint(kept)))

    ray.train.report, ray.train.torch.prepare_model = report, lambda model: model
    ray.train.get_context = lambda: SimpleNamespace(get_world_rank=lambda: 0)
    ray.train.get_all_reported_checkpoints = lambda: reported
    for _ in range(3):
        with suppress(diloco.ExchangeError):
            example().train_loop_per_worker({**CONFIG, "replica": 1, "address": address})
            break
    return reported[-1].metrics


def take_the_common_one() -> list[Any]:
    """The checkpoints that this replica takes, where replica 0 has reported one more than replica 1."""
    warnings.simplefilter("default")
    import ray.train

    from diloco.integrations.ray import common_checkpoint

    replica, exchange = int(os.environ["DILOCO_REPLICA"]), diloco.connect(timeout_seconds=30)

    def taken(*steps: int) -> Any:
        reported = [SimpleNamespace(checkpoint=f"at {step}", metrics={"num_steps": step}) for step in steps]
        ray.train.get_all_reported_checkpoints = lambda: reported
        return common_checkpoint(exchange)

    results = [taken(*((3, 6, 9), (3, 6))[replica]), taken(*((3,), ())[replica]), taken()]
    with pytest.raises(
        diloco.UserError, match=r"kept no .* same step: theirs are of \[\[6\], \[3\]\]; raise num_to"
    ):
        taken(*((6,), (3,))[replica])
    ray.train.get_all_reported_checkpoints = lambda: [SimpleNamespace(checkpoint="at 3", metrics={"loss": 1.0})]
    with pytest.raises(diloco.UserError, match=r"report .*num_steps.* with each checkpoint"):
        common_checkpoint(exchange)
    return results


def train_undisturbed() -> str:
    """The hash of Θ after the example's training without Ray."""
    module, replica = example(), int(os.environ["DILOCO_REPLICA"])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = diloco.StreamingDiLoCo(
        model,
        fragments=diloco.whole(model),
        schedule=diloco.Schedule(sync_every=4, num_fragments=1, overlap_steps=2),
        exchange=diloco.connect(timeout_seconds=30),
    )
    engine.attach(optimizer)
    for step in range(1, 15):
        inputs, targets = module.batch_of(replica, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    engine.finish()
    return engine.outer_hash()


def both(port: int) -> tuple[list[Any], str]:
    results = take_the_common_one()
    meet_at(port)
    return results, train_undisturbed()


@pytest.fixture(scope="module")
def without_ray() -> list[tuple[list[Any], str]]:
    """The checkpoints that each of two replicas takes, and the hash of an undisturbed training."""
    pytest.importorskip("ray")
    return run_replicas(both, 2, free_port(), joined=False, imports=IMPORTS)


def test_all_replicas_take_the_newest_checkpoint_that_all_have(without_ray):
    assert [taken for taken, _ in without_ray] == [["at 6", None, None]] * 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray on this machine."""
    ray = pytest.importorskip("ray")
    options = {"include_dashboard": False, "log_to_driver": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}", prepend=":")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process for each attempt
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # how often Ray looks for reports and deaths
        ray.init(num_cpus=1, **options, _system_config={"prestart_worker_first_driver": False})
        try:
            yield ray
        finally:
            ray.shutdown()


@pytest.mark.timeout(600)  # Ray starts nine processes, most of which import torch
@pytest.mark.filterwarnings("default")  # of ray
def test_a_replica_under_ray_is_killed_and_both_resume(cluster, without_ray, tmp_path, monkeypatch):
    from ray.train.v2.api import data_parallel_trainer as trainer

    # Without datasets of Ray's, and in a cluster that ends with its driver, three processes would do nothing.
    for callback in ("DatasetsCallback", "PlacementGroupCleanerCallback"):
        monkeypatch.setattr(trainer, callback, lambda **_: trainer.RayTrainCallback())
    module = example()
    module.train_loop_per_worker = killing(str(tmp_path))
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as sites:
        other = (train_without_ray, 1, str(tmp_path), address)
        joined = sites.submit(run_replicas, *other, joined=False, timeout_seconds=500, imports=IMPORTS)
        result = module.fit({"replica": 0, "address": address}, str(tmp_path / "results"))
    assert (tmp_path / "died").exists()
    (others,) = joined.result()
    hashes = [metrics["outer_hash"] for metrics in (result.metrics, others)]
    assert hashes == [outer_hash for _, outer_hash in without_ray], "kill -9 changes no bit"
    assert result.metrics["num_steps"] == others["num_steps"] == 14
    with result.checkpoint.as_directory() as folder:
        shipped = torch.load(Path(folder, "state.pt"), weights_only=True)["model"]
    assert parameters_hash(shipped) == hashes[0], "the last checkpoint holds Θ"


def process_of(run: Path) -> int:
    """The number of the process that trains in a run's directory."""
    return int((run / LOCK_FILE).read_text().split()[1])


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # of ray
def test_a_launch_on_ray_survives_the_death_of_an_actor(cluster, small_corpus, tmp_path, capsys):
    small = "launch.ray = { resources = { CPU = 0.1 } }"
    fleet = write_fleet(tmp_path, small_corpus, counts={"a": 1}, machine=small)
    fleet.write_text(
        fleet.read_text()
        .replace("--num-tokens 20000", "--num-tokens 60000")
        .replace("--num-replicas 2", "--num-replicas 1")
    )
    launch, run = tmp_path / "launch", tmp_path / "runs" / "a-0"
    main(["launch", str(fleet), "--on", "ray", "--output", str(launch)])
    with pytest.raises(SystemExit):
        main(["launch", str(fleet), "--on", "ray", "--output", str(tmp_path / "another" / "launch")])
    assert "ray runs a launch of this name, launch, from another directory" in capsys.readouterr().err
    wait(lambda: num_steps(tmp_path, "a-0") >= 10)
    killed = process_of(run)
    os.kill(killed, signal.SIGSTOP)  # it is not to end before
    (actor,) = re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{killed}/status").read_text())
    os.kill(int(actor), signal.SIGKILL)
    wait_for_end(killed)  # with its actor
    wait(lambda: process_of(run) != killed)
    assert set(states(launch).values()) == {"running"}
    wait(lambda: set(states(launch).values()) == {"finished"}, explain=lambda: states(launch))
    steps = [line["step"] for line in lines(run, 0)]
    assert steps == list(range(1, len(steps) + 1)), "it goes on from its checkpoint"
    replay = replayed(str(tmp_path / "store"), initial=initial_parameters)
    assert replay.state.finished and summary(run)["outer_hash"] == parameters_hash(replay.parameters())
    assert {group["state"] for group in cluster.util.placement_group_table().values()} == {"REMOVED"}


@pytest.mark.filterwarnings("default")  # of ray
def test_a_grid_on_ray_has_the_rows_of_this_machine(cluster, small_corpus, tmp_path):
    with pytest.raises(diloco.UserError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        RayCluster("127.0.0.1:1")
    with start(small_corpus, tmp_path, "first") as here:
        assert here.wait(100).returncode == 0
    (run, *_) = labelled_runs(small_corpus, tmp_path)
    name = make_job(run.config, tmp_path).config.name
    shutil.copytree(tmp_path / "runs" / name, tmp_path / "there" / name)
    (tmp_path / "there" / name / "result.json").unlink()
    machine = RayCluster(cluster.get_runtime_context().gcs_address)
    *_, rows = run_grid([run], tmp_path / "there", machine)
    assert rows == read_rows(tmp_path / "grid.csv") and (tmp_path / "there" / name / "result.json").exists()
