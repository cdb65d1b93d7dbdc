"""Trackers as two replicas of one run use them, and what their own libraries read back."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from http.client import HTTPException
from pathlib import Path

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.ports import free_port
from tests.processes import run_replicas
from tests.training.runs import command

import diloco
from diloco.integrations import trackers
from diloco.integrations.trackers import TrackerName, tracker

HPARAMS = {"model.width": 64, "optimizer.learning_rate": 1e-3, "method": "streaming", "compile": False}


def log_steps(name: TrackerName, directory: Path, steps: range, replica: int) -> None:
    """Log two curves, as a run that goes on from the step before."""
    kept = tracker(
        name, run="run", replica=replica, hparams=HPARAMS, directory=directory, after_step=steps.start - 1
    )
    for step in steps:
        kept.log({"loss": 1 / step, "engine/codec_error": 0.25}, step)
    kept.close()


def test_tensorboard_has_the_settings_and_the_curves_of_a_resumed_run(tmp_path):
    log_steps("tensorboard", tmp_path, range(1, 6), 1)
    log_steps("tensorboard", tmp_path, range(4, 8), 1)
    curves = EventAccumulator(str(tmp_path / "tensorboard" / "replica-1")).Reload()
    points = [(point.step, point.value) for point in curves.Scalars("loss")]
    assert points == [(step, pytest.approx(1 / step)) for step in range(1, 8)]
    assert len(curves.Scalars("engine/codec_error")) == 7
    settings = curves.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert all(name.encode() in settings for name in HPARAMS)


def log_two_parts(name: TrackerName, directory: Path) -> None:
    """A run that is interrupted after step 5, and goes on from step 3."""
    warnings.simplefilter("default")  # the libraries use some that are deprecated
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true"}
    log_steps(name, directory, range(1, 6), dist.get_rank())
    log_steps(name, directory, range(4, 8), dist.get_rank())


@pytest.mark.slow
def test_mlflow_has_one_run_a_replica_under_one_tag(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run_replicas(log_two_parts, 2, "mlflow", tmp_path, timeout_seconds=150)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        (experiment,) = client.search_experiments(filter_string="name = 'diloco'")
        runs = client.search_runs([experiment.experiment_id], "tags.`diloco.run` = 'run'")
        assert sorted(run.info.run_name for run in runs) == ["run-replica-0", "run-replica-1"]
        for run in runs:
            assert run.info.status == "FINISHED"
            assert run.data.params == {name: str(value) for name, value in HPARAMS.items()}
            points = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "loss")}
            assert points == {step: pytest.approx(1 / step) for step in range(1, 8)}


@pytest.mark.slow
def test_wandb_has_one_run_a_replica_in_one_group(tmp_path):
    pytest.importorskip("wandb")
    run_replicas(log_two_parts, 2, "wandb", tmp_path, timeout_seconds=150)
    for replica in (0, 1):
        run_id = (tmp_path / "trackers" / f"wandb-replica-{replica}").read_text()
        first, second = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
        for part in (first, second):
            content = part.read_bytes()
            assert f"run-replica-{replica}".encode() in content, "the run's name, which begins with its group's"
            assert b"engine/codec_error" in content and b"model.width" in content


@pytest.mark.slow
def test_wandb_without_a_key_is_refused_with_the_way_out(tmp_path):
    pytest.importorskip("wandb")
    code = (
        "from pathlib import Path\nfrom diloco.errors import UserError\n"
        "from diloco.integrations.trackers import tracker\n"
        "try: tracker('wandb', run='r', replica=0, hparams={}, directory=Path('.'))\n"
        "except UserError as error: print(error)"
    )
    hidden = {"HOME": str(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": "", "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | hidden,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "set WANDB_MODE=offline" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_trainer_fills_trackers_and_answers_prometheus(tmp_path, small_corpus):
    pytest.importorskip("wandb")
    (tmp_path / "text.jsonl").symlink_to(small_corpus)
    port = free_port()
    flags = ["--name", "tracked", "--num-tokens", "61440", "--prometheus-port", str(port), "--trackers", "wandb"]
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    pages = {}
    with subprocess.Popen(command(*flags), cwd=tmp_path, env=os.environ | offline) as process:
        while process.poll() is None:
            for replica in (0, 1):
                with contextlib.suppress(OSError, HTTPException):  # nobody listens, or a connection to itself
                    url = f"http://127.0.0.1:{port + replica}/metrics"
                    pages[replica] = urllib.request.urlopen(url, timeout=10).read().decode()
            time.sleep(0.05)
    assert process.returncode == 0
    run = tmp_path / "runs" / "tracked"
    for replica, page in pages.items():
        assert f'diloco_last_step{{replica="{replica}"}}' in page
        assert f'diloco_last_heard_seconds{{other_replica="{1 - replica}",replica="{replica}"}}' in page
        run_id = (run / "trackers" / f"wandb-replica-{replica}").read_text()
        (file,) = run.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
        names = ("tokens_per_second", "mean_loss", "engine/distance_to_outer", "engine/encode_seconds")
        assert all(name.encode() in file.read_bytes() for name in (*names, "diloco.sync_every"))
    assert set(pages) == {0, 1} and not (run / "tensorboard").exists()


def test_no_library_is_imported_before_its_tracker_is_made():
    code = "import sys, diloco.integrations.trackers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert not {"wandb", "mlflow", "prometheus_client", "tensorboard", "torch"} & set(done.stdout.split())


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(diloco.UserError, match="take tensorboard, wandb, mlflow"):
        tracker("aim", run="run", replica=0, hparams={}, directory=tmp_path)


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(diloco.UserError, match=r"wandb is not installed: run pip install '\.\[wandb\]'"):
        tracker("wandb", run="run", replica=0, hparams={}, directory=tmp_path)


@pytest.mark.slow
def test_a_server_of_mlflow_that_stops_answering_is_not_awaited_for_ever(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    silence = threading.Event()
    run = tracker("mlflow", run="run", replica=0, hparams={}, directory=tmp_path, after_step=0)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", lambda *_, **__: silence.wait(60))
    monkeypatch.setattr(trackers, "_SECONDS_TO_FINISH", 0.2)
    run.log({"loss": 1.0}, 1)
    with pytest.warns(UserWarning, match="its server does not answer"):
        run.close()
    silence.set()
