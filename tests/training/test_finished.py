"""What a run left: evaluated, exported, and refused in a sentence where there is nothing."""

import json
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from diloco.cli.main import main
from diloco.data.shards import open_split
from diloco.data.tokenizers import load_tokenizer
from diloco.models.decoder import Decoder
from diloco.models.language_model import next_token_loss
from diloco.training.finished import evaluate_run, run_parameters
from diloco.training.runs import read_config
from diloco.training.summary import held_out_windows


@pytest.fixture
def unfinished(finished_run, tmp_path):
    """The run as it was before it exported anything."""
    path = tmp_path / finished_run.name
    shutil.copytree(finished_run, path)
    (path / "outer.safetensors").unlink()
    (path / "summary.json").unlink()
    return path


def told(capsys, *arguments: str) -> dict:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_losses_are_those_of_the_parameters_that_are_named(finished_run, capsys):
    found = {which: told(capsys, "eval", str(finished_run), "--parameters", which) for which in WHICH}
    summary = json.loads((finished_run / "summary.json").read_text())
    for name in ("eval_loss", "eval_standard_error", "eval_bits_per_byte"):
        assert found["outer"][name] == pytest.approx(summary[name], rel=1e-6)
    assert found["outer"]["eval_tokens"] == summary["eval_tokens"]
    assert len({f"{found[which]['eval_loss']:.6f}" for which in WHICH}) == 3


WHICH = ("outer", "replica", "average")


def test_the_loss_of_a_replica_is_that_of_its_own_parameters(finished_run):
    config = read_config(finished_run)
    models = {which: run_parameters(finished_run, which)[0] for which in WHICH}
    split = open_split(config.data.prepared, "held_out")
    for which, model in models.items():
        losses = []
        for window in held_out_windows(split, config):
            tokens = torch.from_numpy(split.window(window, config.sequence_length))[None]
            with torch.no_grad():
                losses.append(next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])[0].item())
        found = evaluate_run(finished_run, parameters=which)["eval_loss"]
        assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)


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


def test_a_run_that_is_not_over_is_evaluated_at_its_newest_checkpoint(unfinished, finished_run):
    at_end = run_parameters(finished_run, "outer")[0].state_dict()
    from_checkpoint, step = run_parameters(unfinished, "outer")
    assert step == read_config(finished_run).num_steps
    assert all(torch.equal(value, at_end[name]) for name, value in from_checkpoint.state_dict().items())


def test_a_run_without_checkpoints_is_refused(unfinished, capsys):
    shutil.rmtree(unfinished / "checkpoints")
    for which in WHICH:
        with pytest.raises(SystemExit, match="2"):
            main(["eval", str(unfinished), "--parameters", which])
        assert "holds no checkpoint of replica 0: evaluate where that replica ran" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b[:5000] + bytes([b[5000] ^ 1]) + b[5001:]])
def test_a_damaged_checkpoint_is_refused(unfinished, damage):
    for file in (unfinished / "checkpoints").rglob("*.distcp"):
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"distcp is damaged .*: to take an earlier one, if there is, delete"):
        run_parameters(unfinished, "replica")


def test_damaged_outer_parameters_are_named_with_the_way_out(unfinished):
    (unfinished / "outer.safetensors").touch()
    with pytest.raises(ValueError, match=r"outer.safetensors can't be read \(.*: copy it again, or delete it"):
        run_parameters(unfinished, "outer")
    (unfinished / "outer.safetensors").unlink()
    assert run_parameters(unfinished, "outer")[1] == 60


def test_a_damaged_summary_is_named(unfinished, capsys):
    (unfinished / "summary.json").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(unfinished)])
    assert "summary.json is damaged: Expecting value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_replicas": "two"}, "num_replicas must be int, not 'two'"),
        ({"diloco": {"fragments": "foo"}}, "diloco.fragments must be 'strided' .* 'whole' or null, not 'foo'"),
        ({"method": "foo"}, "method must be 'streaming' or 'diloco' or 'data_parallel', not 'foo'"),
        ({"model": 3}, "model must be an object with fields, not 3"),
        ({"diloco": {"overlap_steps": [1, "x"]}}, "diloco.overlap_steps must be int, not 'x'"),
        ({"compile": 1}, "compile must be bool, not 1"),
    ],
)
def test_a_config_with_other_values_than_its_fields_take_is_refused(finished_run, tmp_path, change, sentence):
    values = json.loads((finished_run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=rf"config.json: .*{sentence}"):
        read_config(tmp_path)


def test_a_run_whose_data_moved_is_told_where(finished_run, tmp_path, capsys):
    """Its config names a place that is gone."""
    moved = tmp_path / "moved"
    shutil.copytree(finished_run, moved)
    config = json.loads((moved / "config.json").read_text())
    prepared, config["data"]["prepared"] = config["data"]["prepared"], "/nowhere"
    (moved / "config.json").write_text(json.dumps(config))
    export = ["export", str(moved), "--to", "safetensors", "--output", str(tmp_path / "out")]
    for command in (["eval", str(moved)], export):
        with pytest.raises(SystemExit, match="2"):
            main(command)
        assert (
            "data of run moved is no longer in /nowhere: name its directory by --prepared"
            in capsys.readouterr().err
        )
    main([*export, "--prepared", prepared])
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["eval", "nowhere"], "nowhere holds no run"),
        (["export", "nowhere", "--to", "hf", "--output", "x"], "nowhere holds no run"),
        (["report", "nowhere"], "nowhere holds no run"),
        (["report", "results.csv"], "results.csv is neither a run's directory nor an experiment's CSV"),
        (["report"], "name a run's directory, or an experiment's CSV"),
        (["experiment", "speed"], "'speed' is not an experiment: choose from scaling, overtraining"),
        (
            ["eval", "RUN", "--tasks", "piqa", "--data", "arc.jsonl"],
            "arc.jsonl begins with that of none of the tasks 'piqa'",
        ),
        (["eval", "RUN", "--data", "nowhere.jsonl"], "nowhere.jsonl can't be read as questions"),
    ],
)
def test_a_mistake_ends_in_one_sentence(arguments, sentence, finished_run, capsys):
    arguments = [str(finished_run) if argument == "RUN" else argument for argument in arguments]
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1


def test_accuracy_is_that_of_the_parameters_that_are_named(finished_run, tmp_path):
    pytest.importorskip("lm_eval")
    path = tmp_path / "cats_1.jsonl"
    asked = [
        {"query": f"the {noun}", "choices": ["sees rain", "xqzw", "forgets him"], "gold": n % 3}
        for n, noun in enumerate(("cat", "ship", "aunt"))
    ]
    path.write_text("".join(json.dumps(question) + "\n" for question in asked))
    command = [sys.executable, "-m", "diloco", "eval", str(finished_run), "--tasks", "cats", "--data", str(path)]
    process = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)["tasks"]
    assert set(found) == {"cats"} and 0 <= found["cats"]["acc"] <= 1 and "acc_norm_stderr" in found["cats"]


def test_the_export_has_our_names(finished_run, tmp_path):
    main(["export", str(finished_run), "--to", "safetensors", "--output", str(tmp_path / "out")])
    config = read_config(finished_run)
    model = Decoder(config.model, seed=1)
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    outer = run_parameters(finished_run, "outer")[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), outer.parameters(), strict=True))
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["width"] == config.model.width and described["tokenizer"] == "bytes"
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(finished_run), "--to", "hf", "--output", str(tmp_path / "out")])


@pytest.mark.filterwarnings("default")  # of transformers
def test_transformers_loads_the_export_and_generates(finished_run, tmp_path):
    transformers = pytest.importorskip("transformers")
    main(["export", str(finished_run), "--to", "hf", "--output", str(tmp_path / "hf")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours, _ = run_parameters(finished_run, "outer")
    text = "the cat sees salt, né"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = load_tokenizer("bytes").encode([text])[0].tolist()
    assert ids[0].tolist() == [256, *expected]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=2e-5, rtol=1e-4)
    written = theirs.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=256)[0]
    tokens = ids
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat([tokens, ours(tokens)[:, -1:].argmax(-1)], dim=1)
    assert written.tolist() == tokens[0].tolist()
    assert tokenizer.decode(written, skip_special_tokens=True).startswith(text)
