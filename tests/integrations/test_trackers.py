"""Trackers as two replicas of one run use them: what their own libraries read back, and Prometheus scrapes."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from tests.engine.cases import Case, inner_step
from tests.ports import free_port
from tests.processes import run_replicas
from tests.training.runs import run as run_program

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
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # imports boto3

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
    os.environ |= OFFLINE | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    log_steps(name, directory, range(1, 6), dist.get_rank())
    log_steps(name, directory, range(4, 8), dist.get_rank())


OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


def log_to_mlflow(directory: Path) -> None:
    """Both replicas log; the first reads what is kept, and then logs to a server that does not answer."""
    log_two_parts("mlflow", directory)
    dist.barrier()
    if dist.get_rank() == 0:
        warnings.simplefilter("ignore")
        with pytest.MonkeyPatch.context() as patch:
            read_back(directory)
            close_without_an_answer(directory, patch)


def read_back(directory: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'diloco'")
    runs = client.search_runs([experiment.experiment_id], "tags.`diloco.run` = 'run'")
    assert sorted(run.info.run_name for run in runs) == ["run-replica-0", "run-replica-1"]
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.params == {name: str(value) for name, value in HPARAMS.items()}
        points = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "loss")}
        assert points == {step: pytest.approx(1 / step) for step in range(1, 8)}


def close_without_an_answer(directory: Path, patch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    silence = threading.Event()
    run = tracker("mlflow", run="silent", replica=0, hparams={}, directory=directory)
    patch.setattr(MlflowClient, "log_batch", lambda *_, **__: silence.wait(60))
    patch.setattr(trackers, "_SECONDS_TO_FINISH", 0.2)
    run.log({"loss": 1.0}, 1)
    with pytest.warns(UserWarning, match="its server does not answer"):
        run.close()
    silence.set()


@pytest.mark.slow
def test_mlflow_has_one_run_a_replica_under_one_tag_and_its_silence_is_not_awaited_for_ever(tmp_path):
    pytest.importorskip("mlflow")
    imports = ["mlflow", "mlflow.store.tracking.sqlalchemy_store"]
    run_replicas(log_to_mlflow, 2, tmp_path, timeout_seconds=150, imports=imports)


@pytest.mark.slow
def test_wandb_has_one_run_a_replica_in_one_group(tmp_path):
    pytest.importorskip("wandb")
    run_replicas(log_two_parts, 2, "wandb", tmp_path, timeout_seconds=150, imports=["wandb"])
    for replica in (0, 1):
        run_id = (tmp_path / "trackers" / f"wandb-replica-{replica}").read_text()
        first, second = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
        for part in (first, second):
            content = part.read_bytes()
            assert f"run-replica-{replica}".encode() in content, "the run's name, which begins with its group's"
            assert b"engine/codec_error" in content and b"model.width" in content


def test_training_goes_on_where_wandbs_process_has_ended(monkeypatch, tmp_path):
    def ended(*_: object, **__: object) -> None:
        raise ConnectionResetError("Connection lost")

    run = SimpleNamespace(id="1", log=ended, finish=ended)
    wandb = SimpleNamespace(init=lambda **_: run, Settings=SimpleNamespace, Error=OSError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    kept = tracker("wandb", run="run", replica=0, hparams={}, directory=tmp_path)
    with pytest.warns(UserWarning, match="wandb has lost the rest of the curves: Connection lost"):
        kept.log({"loss": 1.0}, 1)
    kept.log({"loss": 0.5}, 2)  # a second warning would be an error
    kept.close()


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
    (tmp_path / "text.jsonl").symlink_to(small_corpus)
    port = free_port()
    flags = ["--name", "tracked", "--num-tokens", "40960", "--prometheus-port", str(port)]
    pages = {}
    with ThreadPoolExecutor() as pool:
        training = pool.submit(run_program, tmp_path, *flags)
        while not training.done():
            for replica in (0, 1):
                with contextlib.suppress(OSError, HTTPException):  # nobody listens, or a connection to itself
                    url = f"http://127.0.0.1:{port + replica}/metrics"
                    pages[replica] = urllib.request.urlopen(url, timeout=10).read().decode()
            time.sleep(0.05)
    assert training.result().returncode == 0
    directory = tmp_path / "runs" / "tracked"
    for replica, page in pages.items():
        assert f'diloco_last_step{{replica="{replica}"}}' in page
        assert f'diloco_last_heard_seconds{{other_replica="{1 - replica}",replica="{replica}"}}' in page
        content = b"".join(file.read_bytes() for file in (directory / "tensorboard").glob(f"replica-{replica}/*"))
        names = ("tokens_per_second", "mean_loss", "engine/distance_to_outer", "engine/encode_seconds")
        assert all(name.encode() in content for name in (*names, "diloco.sync_every"))
    assert set(pages) == {0, 1}


def test_no_library_is_imported_before_its_tracker_is_made():
    code = "import sys, diloco.integrations.trackers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert not {"wandb", "mlflow", "prometheus_client", "tensorboard", "torch"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("name", "words"),
    [("aim", "take tensorboard, wandb, mlflow"), ("wandb", r"pip install 'diloco\[wandb\]'")],
)
def test_a_tracker_that_is_unknown_or_not_installed_is_refused(name, words, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(diloco.UserError, match=words):
        tracker(name, run="run", replica=0, hparams={}, directory=tmp_path)


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def scraped(case: Case) -> tuple[dict[str, float], dict[str, float]]:
    from diloco.integrations.prometheus import MetricsServer

    model = case.model()
    engine = case.engine(model)
    replica = engine.exchange.replica
    server = MetricsServer(engine, 0, replica=replica)
    with ThreadPoolExecutor() as pool:  # in another thread, while training goes on
        first = pool.submit(scrape, server.port)
        for t in range(1, case.T + 1):
            inner_step(model, replica, t)
            engine.step()
        first = first.result()
    last = scrape(server.port)
    assert server._server.server_address[0] == "127.0.0.1", "nobody else reaches it"
    counters = engine.logs(computed=False)
    server.close()
    with pytest.raises(OSError):
        scrape(server.port)
    assert last[f'diloco_blocked_seconds_total{{replica="{replica}"}}'] == counters["blocked_seconds"]
    return first, last


def test_a_scrape_shows_steps_bytes_seconds_and_the_age_of_each_peer():
    pytest.importorskip("prometheus_client")
    case = Case(P=2, T=9, wire="bf16")
    for replica, (_, last) in enumerate(run_replicas(scraped, 2, case)):
        own, other = f'{{replica="{replica}"}}', f'{{other_replica="{1 - replica}",replica="{replica}"}}'
        assert last[f"diloco_last_step{own}"] == 9
        assert last[f"diloco_bytes_sent_total{own}"] > last[f"diloco_bytes_received_total{own}"] - 1 > 0
        assert last[f"diloco_encode_seconds_total{own}"] > 0 and last[f"diloco_merge_seconds_total{own}"] > 0
        assert 0 <= last[f"diloco_last_heard_seconds{other}"] < 30
        assert 0 <= last[f"diloco_lateness_seconds{other}"] < 30


def test_counters_begin_at_zero_so_that_a_resume_is_no_increase():
    pytest.importorskip("prometheus_client")
    from diloco.integrations.prometheus import MetricsServer

    counters = {"num_steps": 40.0, "bytes_sent": 900.0, "blocked_seconds": 5.0}
    server = MetricsServer(SimpleNamespace(logs=lambda **_: dict(counters)), 0, replica=1)
    counters |= {"num_steps": 41.0, "bytes_sent": 1000.0}
    own, page = '{replica="1"}', scrape(server.port)
    server.close()
    assert page[f"diloco_last_step{own}"] == 41
    assert page[f"diloco_bytes_sent_total{own}"] == 100 and page[f"diloco_blocked_seconds_total{own}"] == 0


def test_a_port_in_use_is_refused():
    pytest.importorskip("prometheus_client")
    from diloco.integrations.prometheus import MetricsServer

    case = Case(P=1)
    engine = case.engine(case.model())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(diloco.UserError, match=rf"127.0.0.1:{port} can't be used .*choose a free port"):
            MetricsServer(engine, port, replica=0)
