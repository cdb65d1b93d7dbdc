"""The parameters that a run saved: read, evaluated, and refused in a sentence where there are none."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.training.runs import run, summary

from diloco.data.shards import open_split
from diloco.errors import CheckpointError, UserError
from diloco.training.records.checkpoints import finished_steps
from diloco.training.records.export import export_run
from diloco.training.records.finished import evaluate_run, load_model, run_parameters
from diloco.training.records.runs import read_config
from diloco.training.records.summary import open_held_out

WHICH = ("outer", "replica", "average")


@pytest.fixture
def unfinished(finished_run, tmp_path) -> Path:
    """The run as it was before it wrote its outer parameters."""
    path = tmp_path / finished_run.name
    shutil.copytree(finished_run, path)
    (path / "outer.safetensors").unlink()
    (path / "summary.json").unlink()
    return path


def test_the_loss_of_the_outer_parameters_is_that_of_the_summary(finished_run):
    evaluated = evaluate_run(finished_run)
    summary = json.loads((finished_run / "summary.json").read_text())
    for name in ("eval_loss", "eval_standard_error", "eval_bits_per_byte"):
        assert evaluated[name] == pytest.approx(summary[name], rel=1e-6)
    assert evaluated["eval_tokens"] == summary["eval_tokens"]


@pytest.mark.slow
def test_losses_are_those_of_the_parameters_that_are_named(finished_run):
    config = read_config(finished_run)
    models = {which: run_parameters(finished_run, which)[0] for which in WHICH}
    split = open_split(config.data.prepared, "held_out")
    means = set()
    for which, model in models.items():
        losses = []
        for window in open_held_out(config).windows:
            tokens = torch.from_numpy(split.window(window, config.sequence_length))[None]
            with torch.no_grad():
                losses.append(model.loss(model(tokens[:, :-1]), tokens[:, 1:])[0].item())
        mean = evaluate_run(finished_run, parameters=which)["eval_loss"]
        assert mean == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        means.add(round(mean, 6))
    assert len(means) == 3


def test_the_average_is_between_the_replicas(finished_run, tmp_path):
    """With a second replica that is a copy of the first, the average is either."""
    path = tmp_path / "twins"
    shutil.copytree(finished_run, path)
    shutil.rmtree(path / "checkpoints" / "replica-1")
    shutil.copytree(path / "checkpoints" / "replica-0", path / "checkpoints" / "replica-1")
    one, both = (run_parameters(path, which)[0].state_dict() for which in ("replica", "average"))
    assert all(torch.equal(one[name], both[name]) for name in one)
    apart = run_parameters(finished_run, "average")[0].state_dict()
    assert not all(torch.equal(one[name], apart[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diloco", "data_parallel"])
def test_parameters_that_were_trained_in_bfloat16_are_read(small_corpus, tmp_path, method):
    """Two replicas, which differ after their last outer step unless the method is Data-Parallel."""
    flags = ["--name", method, "--method", method, "--precision", "bf16-params", "--num-tokens", "5120"]
    flags += ["--evaluation.num-tokens", "2048"]
    shutil.copy(small_corpus, tmp_path / "text.jsonl")
    process = run(tmp_path, *flags, *([] if method == "data_parallel" else ["--diloco.sync-every", "4"]))
    assert process.returncode == 0, process.stderr
    path = tmp_path / "runs" / method
    files = sorted((path / "checkpoints").glob("replica-*/step-*/shard-0.safetensors"))
    own = [load_file(file) for file in files]
    assert len(own) == 2
    replica, average, outer = (
        run_parameters(path, which)[0].state_dict() for which in ("replica", "average", "outer")
    )
    saved = load_file(path / "outer.safetensors")
    for name, value in outer.items():
        one, other = (tensors[f"model.{name}"].float() for tensors in own)
        assert own[0][f"model.{name}"].dtype == torch.bfloat16
        assert torch.equal(replica[name], one) and torch.equal(average[name], (one + other) / 2)
        assert torch.equal(value, saved[name].float())
    assert evaluate_run(path)["eval_loss"] == pytest.approx(summary(path)["eval_loss"], rel=0.01)
    (path / "outer.safetensors").unlink()
    for name, value in run_parameters(path, "outer")[0].state_dict().items():
        assert torch.equal(value, outer[name]), "those of the last checkpoint"


def test_a_run_is_evaluated_at_an_earlier_checkpoint(finished_run):
    steps = finished_steps(read_config(finished_run).checkpoints, 0)
    for which in WHICH:
        (at_first, step), (at_end, _) = (
            run_parameters(finished_run, which, at_step=at_step) for at_step in (steps[0], None)
        )
        assert step == steps[0] < read_config(finished_run).num_steps
        assert not all(map(torch.equal, at_first.parameters(), at_end.parameters()))
        assert evaluate_run(finished_run, parameters=which, at_step=step)["step"] == step
        with pytest.raises(
            CheckpointError, match=rf"at_step=1: .*checkpoints holds the steps {steps[0]}, "
        ) as error:
            run_parameters(finished_run, which, at_step=1)
        assert error.value.fields == ("at_step",)


@pytest.mark.parametrize("every_steps", [0, 20])
def test_a_run_without_checkpoints_is_refused(unfinished, every_steps):
    shutil.rmtree(unfinished / "checkpoints")
    values = json.loads((unfinished / "config.json").read_text())
    values["checkpoint"]["every_steps"] = every_steps
    (unfinished / "config.json").write_text(json.dumps(values))
    remedy = "" if every_steps else r", or train with checkpoint.every_steps above 0 \(it was 0\)"
    for which in WHICH:
        with pytest.raises(
            CheckpointError, match=f"holds no checkpoint of replica 0: evaluate where that replica ran{remedy}$"
        ):
            evaluate_run(unfinished, parameters=which)


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b[:5000] + bytes([b[5000] ^ 1]) + b[5001:]])
def test_a_damaged_checkpoint_is_refused(unfinished, damage):
    for file in (unfinished / "checkpoints").rglob("shard-*.safetensors"):
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        CheckpointError, match=r"safetensors is damaged .*: to take an earlier one, if there is, delete"
    ):
        run_parameters(unfinished, "replica")


def test_damaged_outer_parameters_are_named_with_the_way_out(unfinished):
    (unfinished / "outer.safetensors").touch()
    with pytest.raises(
        CheckpointError, match=r"outer.safetensors can't be read \(.*: copy it again, or delete it"
    ):
        run_parameters(unfinished, "outer")
    (unfinished / "outer.safetensors").unlink()
    assert run_parameters(unfinished, "outer")[1] == 120


def test_a_run_whose_data_moved_is_told_where(finished_run, tmp_path):
    """The run's config names a directory that is gone."""
    moved = tmp_path / "moved"
    shutil.copytree(finished_run, moved)
    config = json.loads((moved / "config.json").read_text())
    prepared, config["data"]["prepared"] = config["data"]["prepared"], "/nowhere"
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"data of run moved is no longer in /nowhere: .* by prepared") as error:
        evaluate_run(moved)
    assert error.value.fields == ("prepared",)
    export_run(moved, "safetensors", tmp_path / "out", prepared=Path(prepared))
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_text_that_is_not_the_runs_is_refused(finished_run, tmp_path):
    """Losses, and the letters of tokens, would mean something else."""
    prepared = read_config(finished_run).data.prepared
    assert prepared is not None
    other = shutil.copytree(prepared, tmp_path / "other")
    index = json.loads((other / "index.json").read_text())
    assert evaluate_run(finished_run, prepared=other)["eval_loss"] > 0, "the same text at another place"
    (other / "index.json").write_text(json.dumps(index | {"digest": "0" * 64}))
    for use in (
        lambda: evaluate_run(finished_run, prepared=other),
        lambda: load_model(finished_run, prepared=other),
        lambda: export_run(finished_run, "safetensors", tmp_path / "out", prepared=other),
    ):
        with pytest.raises(UserError, match=r"other has 0+ .*: name the directory with the same text by") as error:
            use()
        assert error.value.fields == ("prepared",)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of lm-evaluation-harness
def test_accuracy_is_that_of_the_parameters_that_are_named(finished_run, tmp_path):
    pytest.importorskip("lm_eval")
    path = tmp_path / "cats.jsonl"
    questions = [
        {"query": f"the {noun}", "choices": ["sees rain", "xqzw", "forgets him"], "gold": n % 3}
        for n, noun in enumerate(("cat", "ship", "aunt"))
    ]
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    scores = evaluate_run(finished_run, tasks={"cats": path}, held_out=False)["tasks"]
    assert set(scores) == {"cats"} and 0 <= scores["cats"]["acc"] <= 1 and "acc_norm_stderr" in scores["cats"]
