import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.training.runs import lines

from diloco.errors import FileWriteError
from diloco.integrations.trackers import tracker
from diloco.training.records.metrics import MetricsLog, OuterStepMetrics, StepMetrics

OUTER = {
    "fragment": 2,
    "round": 1,
    "sent_step": 1,
    "blocked_seconds": 0.0,
    "outer_gradient_norm": 0.5,
    "cosine": None,
}


NUMBERS = {
    "loss": 2.0,
    "learning_rate": 1e-3,
    "grad_norm": 1.0,
    "step_seconds": 0.1,
    "blocked_seconds": 0.0,
    "bytes_sent": 0,
    "bytes_received": 0,
}


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step=step, tokens=10 * step, new_tokens=10, **NUMBERS)


def steps_in(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_line_a_step_with_the_names_of_the_fields(tmp_path):
    tensorboard = tracker("tensorboard", run="r", replica=1, hparams={}, directory=tmp_path)
    log = MetricsLog(tmp_path, 1, after_step=0, trackers=[tensorboard])
    log.write(replace(metrics(1), outer_steps=(OuterStepMetrics(**OUTER),)))
    log.close()
    written = json.loads((tmp_path / "metrics-1.jsonl").read_text())
    assert written == {"step": 1, "tokens": 10, "new_tokens": 10, **NUMBERS, "outer_steps": [OUTER]}
    assert list((tmp_path / "tensorboard" / "replica-1").iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_line_that_the_disk_can_not_take_names_its_file(tmp_path, buffering):
    log = MetricsLog(tmp_path, 0, after_step=0)
    log._file.close()
    refused = rf"can't write {tmp_path}/metrics-0.jsonl: no space left on device"
    log._file = Path("/dev/full").open("w", buffering=buffering)  # noqa: SIM115 to close it fails, too
    with pytest.raises(FileWriteError, match=refused):
        log.write(metrics(1))  # unless it is buffered
        log.close()
    with suppress(OSError):
        log._file.close()


def test_a_resume_drops_what_lies_beyond_its_step_and_half_a_line(tmp_path):
    log = MetricsLog(tmp_path, 0, after_step=0)
    for step in range(1, 8):
        log.write(metrics(step))
    log.close()
    path = tmp_path / "metrics-0.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "tok')
    log = MetricsLog(tmp_path, 0, after_step=5)
    log.write(metrics(6))
    log.close()
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]


class Recording:
    def __init__(self):
        self.logged, self.closed = [], False

    def log(self, values, step):
        self.logged.append((step, dict(values)))

    def close(self):
        self.closed = True


def test_trackers_get_the_curves_of_a_step(tmp_path):
    recording = Recording()
    log = MetricsLog(tmp_path, 0, after_step=2, trackers=[recording])
    outer = OuterStepMetrics(**OUTER)
    log.write(replace(metrics(3), outer_steps=(outer,), mean_loss=2.5, engine={"codec_error": 0.25}))
    log.close()
    assert recording.closed
    more = {"mean_loss": 2.5, "engine/codec_error": 0.25, "outer_gradient_norm/fragment_2": 0.5}
    assert recording.logged == [(3, {"tokens": 30, **NUMBERS, **more, "tokens_per_second": 100.0})]
    line = json.loads((tmp_path / "metrics-0.jsonl").read_text())
    assert line["engine"] == {"codec_error": 0.25} and line["mean_loss"] == 2.5


def test_a_run_logs_the_mean_loss_of_all_replicas_and_the_engine_once_a_round(streaming):
    both = [lines(streaming, replica) for replica in (0, 1)]
    sends = sorted({o["sent_step"] for line in both[0] for o in line.get("outer_steps", ())})
    expected = {
        end: sum(line["loss"] for own in both for line in own if start < line["step"] <= end) / (2 * (end - start))
        for start, end in zip([0, *sends], sends, strict=False)
    }
    for own in both:
        for line in own:
            sent = max((o["sent_step"] for o in line.get("outer_steps", ())), default=None)
            assert line.get("mean_loss") == (sent and pytest.approx(expected[sent]))
            is_round = any(o["fragment"] == 0 for o in line.get("outer_steps", ()))
            assert ("engine" in line) == is_round
            if is_round:
                assert line["engine"]["num_steps"] == line["step"]
                assert line["engine"]["distance_to_outer"] > 0 and 0 < line["engine"]["codec_error"] < 1
