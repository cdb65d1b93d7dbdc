"""Trackers as two replicas of one run use them, and what their own libraries read back."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.processes import run_replicas

import diloco
from diloco.integrations.trackers import tracker

HPARAMS = {"model.width": 64, "optimizer.learning_rate": 1e-3, "method": "streaming", "compile": False}


def log_steps(name: str, directory: Path, steps: range, replica: int) -> None:
    kept = tracker(
        name, run="run", replica=replica, hparams=HPARAMS, directory=directory, after_step=steps.start - 1
    )
    for step in steps:
        kept.log({"loss": 1 / step, "engine/codec_error": 0.25}, step)
    kept.close()


def test_tensorboard_has_the_settings_and_the_curves_a_resume_included(tmp_path):
    log_steps("tensorboard", tmp_path, range(1, 6), 1)
    log_steps("tensorboard", tmp_path, range(4, 8), 1)  # on from a checkpoint of step 3
    curves = EventAccumulator(str(tmp_path / "tensorboard" / "replica-1")).Reload()
    points = curves.Scalars("loss")
    assert [(point.step, point.value) for point in points] == [
        (step, pytest.approx(1 / step)) for step in range(1, 8)
    ]
    assert len(curves.Scalars("engine/codec_error")) == 7
    settings = b"".join(
        metadata.plugin_data.content
        for tag in curves.Tags()["tensors"] + curves.SummaryMetadata("_hparams_/session_start_info").display_name.split()
        for metadata in [curves.SummaryMetadata(tag)]
    )
    assert b"model.width" in settings


def test_nothing_is_imported_until_it_is_used():
    command = "import diloco.integrations.trackers, diloco.training.loop, sys; print(*sys.modules)"
    import subprocess

    modules = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert not {"wandb", "mlflow", "prometheus_client", "tensorboard"} & set(modules.split())


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(diloco.UserError, match="take tensorboard, wandb, mlflow"):
        tracker("aim", run="run", replica=0, hparams={}, directory=tmp_path)
