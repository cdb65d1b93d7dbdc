"""Files of a run and of a grid that were changed: refused by our own error, or read with a sound result."""

import json
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tests.hostile.mutations import generator, hostile_pickle, mutated_bytes, mutated_json

from diloco.errors import CheckpointError, DilocoError, FileError
from diloco.experiments.runner.rows import read_results, read_rows
from diloco.files import sha256
from diloco.report.sources import Sources
from diloco.schema import read_json
from diloco.training.records.export import export_run
from diloco.training.records.finished import run_parameters
from diloco.training.records.metrics import read_metrics
from diloco.training.records.runs import read_config
from diloco.training.records.summary import Summary

NUM_EXAMPLES = settings.get_profile("hostile").max_examples
DEEP = b'{"model": ' + b"[" * 100_000


@pytest.fixture
def run(finished_run, tmp_path) -> Path:
    """A copy of a run without its checkpoints."""
    shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    return tmp_path / "run"


def report(run: Path) -> bytes:
    """The content of the page about a run."""
    sources = Sources([str(run)])
    sources.read()
    return sources.page().as_json()


def read_parameters(run: Path) -> None:
    model, _ = run_parameters(run, "outer")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


READERS = {
    "config.json": lambda run: read_config(run),
    "summary.json": lambda run: read_json(run / "summary.json", Summary),
    "metrics-0.jsonl": lambda run: read_metrics(run, 0),
    "outer.safetensors": read_parameters,
    "result.json": read_results,
    "table.csv": lambda run: read_rows(run / "table.csv"),
}


def add_results(run: Path) -> None:
    """The files of a grid beside those of the run."""
    summary = json.loads((run / "summary.json").read_text())
    outer_steps = [line["outer_steps"][0] for line in lines(run) if "outer_steps" in line][:2]
    evaluated = {"outer at step 9": {"eval_loss": 2.0}, "outer, one": {"acc": 0.5}}
    result = {"summary": summary, "evaluated": evaluated, "outer_steps": outer_steps}
    (run / "result.json").write_text(json.dumps(result))
    (run / "table.csv").write_text("kind,run,eval_loss\none,run-1,2.5\ntwo,run-2,3\n")
    metrics = (run / "metrics-0.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics-0.jsonl").write_text("".join(metrics[:60]))


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics-0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", READERS)
def test_a_changed_file_is_refused_by_our_own_error_or_sound(run, name):
    add_results(run)
    whole, rng = (run / name).read_bytes(), generator()
    READERS[name](run)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for example in range(NUM_EXAMPLES):
        (run / name).write_bytes(changed(whole, name, example, rng))
        try:
            READERS[name](run)
        except DilocoError as error:
            assert len(str(error)) < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 128 << 10, "more than 128 MiB"


def changed(content: bytes, name: str, example: int, rng: random.Random) -> bytes:
    if example == 0:
        return DEEP
    if example % 2 or not name.endswith(("json", "jsonl")):
        return mutated_bytes(content, rng)
    if name.endswith("json"):
        return json.dumps(mutated_json(json.loads(content), rng)).encode()
    parts = content.splitlines()
    at = rng.randrange(len(parts))
    parts[at] = json.dumps(mutated_json(json.loads(parts[at]), rng)).encode()
    return b"\n".join(parts) + b"\n"


def test_a_report_of_changed_files_is_refused_or_drawn(run):
    add_results(run)
    rng, drawn = generator(), 0
    for example in range(NUM_EXAMPLES):
        name = rng.choice(("config.json", "summary.json", "metrics-0.jsonl"))
        whole = (run / name).read_bytes()
        (run / name).write_bytes(changed(whole, name, example + 2, rng))
        try:
            read_config(run), read_json(run / "summary.json", Summary), read_metrics(run, 0)
            if drawn < max(3, NUM_EXAMPLES // 100):
                assert json.loads(report(run))["sections"]
                drawn += 1
        except DilocoError:
            pass
        (run / name).write_bytes(whole)


@pytest.mark.parametrize("name", ["loss", "bytes_sent", "step_seconds", "step"])
def test_a_report_without_a_field_names_file_line_and_field(run, name):
    steps = lines(run)
    del steps[1][name]
    (run / "metrics-0.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    with pytest.raises(FileError, match=rf"metrics-0.jsonl, line 2, can't be read: .*required field {name}"):
        report(run)


def test_parameters_of_another_type_are_refused_by_name(run):
    import safetensors.torch

    file = run / "outer.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = min(tensors)
    safetensors.torch.save_file({**tensors, name: tensors[name].bfloat16()}, file)
    with pytest.raises(CheckpointError, match=rf"outer.safetensors has {name} as BF16 of shape"):
        run_parameters(run, "outer")


def test_sizes_beyond_the_memory_are_refused_before_they_are_allocated(run):
    config = json.loads((run / "config.json").read_text())
    config["model"]["width"] = 1 << 40
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(DilocoError, match=r"model.width=1099511627776, .* parameters alone take [\d,]+ bytes"):
        run_parameters(run, "outer")


@pytest.mark.parametrize(
    "name", ["config.json", "summary.json", "metrics-0.jsonl", "outer.safetensors", "data.json", ".metadata"]
)
def test_no_pickle_in_a_run_is_loaded(run, tmp_path, name):
    (run / name).write_bytes(hostile_pickle(tmp_path / "marker") + b"\n")
    reports = (report,) if name.endswith(("json", "jsonl")) and name != "data.json" else ()
    for use in (*reports, read_parameters, lambda run: export_run(run, "safetensors", tmp_path / "out")):
        try:
            use(run)
        except DilocoError:
            continue
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["index.json", "train-00000.bin", "train-00000.idx", "tokenizer.json"])
def test_no_pickle_in_the_data_is_loaded(run, tmp_path, name):
    prepared = tmp_path / "prepared"
    shutil.copytree(read_config(run).data.prepared, prepared)
    (prepared / name).write_bytes(hostile_pickle(tmp_path / "marker"))
    try:
        export_run(run, "safetensors", tmp_path / "out", prepared=prepared)
    except DilocoError:
        assert name == "index.json"
    assert not (tmp_path / "marker").exists()


def test_an_export_holds_no_pickle(run, tmp_path):
    export_run(run, "safetensors", tmp_path / "out")
    assert {path.suffix for path in (tmp_path / "out").iterdir()} <= {".json", ".md", ".safetensors"}
    assert sha256(tmp_path / "out" / "model.safetensors")
