"""Runs of a model of `transformers`, whole and with adapters: resumed, evaluated, exported, refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.cli.commands import refusal
from tests.models.gpt2 import write_config, write_model
from tests.processes import run_mains
from tests.training.runs import DILOCO, TIMEOUT_SECONDS, command, complaints, lines, summary

from diloco.cli.main import main
from diloco.cli.train import _parsed
from diloco.data.config import DataConfig
from diloco.data.tokenizers import train_bpe
from diloco.errors import UserError
from diloco.models.hugging_face_config import HuggingFaceConfig
from diloco.training.config.engine_settings import check
from diloco.training.config.forecast import forecast
from diloco.training.config.joined import config_of
from diloco.training.config.recipes import recipe, with_hugging_face
from diloco.training.config.resolve import facts_with_rendezvous, read_config_file, resolve, shared_facts
from diloco.training.records.export import export_run
from diloco.training.records.finished import evaluate_run, run_parameters
from diloco.training.records.runs import read_config

pytestmark = pytest.mark.filterwarnings("default")  # of transformers and peft


@pytest.fixture(autouse=True)
def transformers():
    return pytest.importorskip("transformers")


PROMPT = "the cat "
SHORT = ["--num-tokens", "10240", "--diloco.sync-every", "5", "--checkpoint.every-steps", "10"]
SHORT += ["--evaluation.num-tokens", "2048"]


IMPORTS = ("transformers.models.gpt2.modeling_gpt2", "peft", "torch.utils.tensorboard", "diloco.training.loop")


def train_all(folder: Path, calls: list[tuple]) -> None:
    for done in run_mains(calls, folder=folder, timeout_seconds=TIMEOUT_SECONDS, imports=IMPORTS):
        assert not complaints(done), done.stderr


def train_call(*flags: str) -> tuple:
    return main, command(*flags)[len(DILOCO) :]


def copy_without_its_end(name: str) -> None:
    """Copy a finished run as it was at its first checkpoint."""
    copied = shutil.copytree(Path("runs", name), Path("runs", f"{name}-resumed"))
    for path in copied.glob("checkpoints/*/step-00000020*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (copied / "summary.json").unlink()


@pytest.fixture(scope="session")
def runs(once, small_corpus) -> Path:
    """A folder with `gpt2`, the run `whole`, which trains it, and the run `adapters`, which trains adapters.

    Beside the latter lies one that was resumed at its first checkpoint: importing the models takes longer than
    the steps, so that all runs are forked from one process.
    """

    def make(folder: Path) -> None:
        shutil.copy(small_corpus, folder / "text.jsonl")
        write_model(folder / "gpt2")
        flags = ["--model.hf", "gpt2", "--data.cache", str(folder / "data"), *SHORT]
        lora = ["--model.lora", "rank=2", *flags]
        few = ["--num-tokens", "1024", "--method", "data_parallel"]
        calls = [train_call("--name", "whole", *flags), train_call("--name", "adapters", *lora)]
        calls += [train_call("--name", "baseline", *lora[: -len(SHORT)], *few)]
        calls += [(copy_without_its_end, "adapters"), train_call("--resume", "runs/adapters-resumed")]
        train_all(folder, calls)

    return once("hugging_face_runs", make)


def checkpoint(directory: Path, replica: int, step: int = 20) -> dict[str, torch.Tensor]:
    path = directory / "checkpoints" / f"replica-{replica}" / f"step-{step:08}" / "shard-0.safetensors"
    return safetensors.torch.load_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "adapters"])
def test_a_run_learns_and_its_replicas_agree(runs, name):
    directory = runs / "runs" / name
    begun, ended = (lines(directory, 0)[step]["loss"] for step in (0, -1))
    assert ended < begun - (0.5 if name == "whole" else 0.01)
    one, other = (checkpoint(directory, replica) for replica in (0, 1))
    outer = [key for key in one if key.startswith("sync.outer.")]
    assert outer and all(torch.equal(one[key], other[key]) for key in outer)
    assert not all(torch.equal(one[key], other[key]) for key in one)
    assert evaluate_run(directory)["eval_loss"] == pytest.approx(summary(directory)["eval_loss"], abs=1e-6)


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not(runs):
    before, resumed = runs / "runs" / "adapters", runs / "runs" / "adapters-resumed"
    assert [line["step"] for line in lines(resumed, 0)] == [*range(1, 21)]
    assert summary(resumed)["outer_hash"] == summary(before)["outer_hash"]
    for replica in (0, 1):
        one, other = checkpoint(before, replica), checkpoint(resumed, replica)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_adapters_alone_are_trained_stored_and_sent(runs):
    config = read_config(runs / "runs" / "adapters")
    tensors = checkpoint(runs / "runs" / "adapters", 0)
    assert all("lora_" in key for key in tensors), "no weight of the model is in a checkpoint"
    num_adapters = sum(v.numel() for k, v in tensors.items() if k.startswith("model."))
    assert num_adapters == 4 * 2 * (4 * 32 + 2 * 32 + 5 * 32 + 5 * 32)
    counted = summary(runs / "runs" / "adapters")
    assert counted["num_trained_params"] == num_adapters < counted["num_params"] / 10
    assert counted["bytes_sent_per_replica"] == forecast(config).bytes_sent
    # Half a byte an adapter, a scale for 256 of them, and headers; three or four syncs of each fragment.
    assert forecast(config).bytes_sent < 4 * (num_adapters / 2 * 1.01 + 2 * 64)
    assert counted["data_parallel_bytes_per_replica"] == 20 * 4 * num_adapters
    baseline = summary(runs / "runs" / "baseline")
    assert baseline["bytes_sent_per_replica"] == 2 * 4 * num_adapters


def exported(directory: Path, output: Path, **options) -> torch.nn.Module:
    import transformers

    export_run(directory, "hf", output, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(output)


@pytest.mark.slow
def test_the_export_computes_the_runs_logits_and_writes_its_text(runs, tmp_path, capsys, transformers):
    directory = runs / "runs" / "whole"
    theirs, ours = exported(directory, tmp_path / "out"), run_parameters(directory, "outer")[0]
    assert type(theirs).__name__ == "GPT2LMHeadModel" and theirs.config.eos_token_id == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    assert prompt[0, 0] == 256
    with torch.no_grad():
        assert torch.equal(theirs(prompt).logits, ours(prompt))
    capsys.readouterr()  # of libraries that transformers imports
    main(["generate", str(directory), "--prompt", PROMPT, "--max-tokens", "30", "--temperature", "0"])
    ids = theirs.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=256)[0]
    assert capsys.readouterr().out == tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "as the user's own files"


@pytest.mark.slow
def test_adapters_are_exported_as_pefts_and_merged(runs, tmp_path, transformers):
    directory = runs / "runs" / "adapters"
    adapted, ours = exported(directory, tmp_path / "adapters"), run_parameters(directory, "outer")[0]
    files = {path.name for path in (tmp_path / "adapters").glob("*") if "tokenizer" not in path.name}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    described = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["r"]) == (str(runs / "gpt2"), 2)
    merged = exported(directory, tmp_path / "merged", merged=True)
    prompt = torch.tensor([[256, *PROMPT.encode()]])
    base = transformers.AutoModelForCausalLM.from_pretrained(runs / "gpt2")
    with torch.no_grad():
        expected = ours(prompt)
        assert torch.equal(adapted(prompt).logits, expected)
        torch.testing.assert_close(merged(prompt).logits, expected, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(base(prompt).logits, expected, atol=1e-3)
    with pytest.raises(UserError, match="merged means nothing to a model that has no adapters"):
        export_run(runs / "runs" / "whole", "hf", tmp_path / "none", merged=True)
    with pytest.raises(UserError, match="merged with to=safetensors means nothing"):
        export_run(directory, "safetensors", tmp_path / "none", merged=True)


@pytest.mark.slow
def test_the_models_own_tokenizer_is_the_default(tmp_path):
    folder = write_config(tmp_path / "gpt2", vocab_size=270)
    asked = with_hugging_face(recipe("tiny"), str(folder))
    assert asked.data.tokenizer == "bytes" and asked.model.vocab_size == 270
    train_bpe(["one two three é"] * 9, 260, folder / "tokenizer.json")
    assert with_hugging_face(recipe("tiny"), str(folder)).data.tokenizer == str(folder)
    parsed = _parsed(["tiny", "--model.hf", str(folder), "--data.tokenizer", "bytes", "--seed", "3"])[0].config
    assert parsed.data.tokenizer == "bytes" and parsed.seed == 3 and parsed.model == asked.model
    prepared = _parsed(["tiny", "--model.hf", str(folder), "--data.prepared", "text"])[0].config.data
    assert prepared.tokenizer == "bytes", "the text has been read by a tokenizer, wherever that lies here"


def test_a_file_of_settings_names_a_model_too(tmp_path):
    write_model(tmp_path / "gpt2")
    file = tmp_path / "run.toml"
    file.write_text(f'recipe = "tiny"\n[model]\nhf = "{tmp_path}/gpt2"\nlora = "rank=2"\n')
    config, _ = read_config_file(file, None)
    assert isinstance(config.model, HuggingFaceConfig) and config.model.lora == "rank=2"
    assert replace(config.model, lora=None) == with_hugging_face(recipe("tiny"), f"{tmp_path}/gpt2").model


def test_replicas_may_have_the_model_at_different_places(tmp_path):
    config = with_hugging_face(recipe("tiny"), str(write_config(tmp_path / "here")))
    elsewhere = with_hugging_face(recipe("tiny"), str(write_config(tmp_path / "there")))
    assert shared_facts(config) == shared_facts(elsewhere)
    facts = facts_with_rendezvous(config)
    assert facts != facts_with_rendezvous(elsewhere), "a replay of the log must find the weights"
    assert config_of(facts).model == config.model
    other = with_hugging_face(recipe("tiny"), str(write_config(tmp_path / "there", n_inner=64)))
    assert shared_facts(config) != shared_facts(other)


def test_a_model_whose_blocks_are_not_found_is_trained_whole_alone(tmp_path):
    values = {"model_type": "xlm", "is_decoder": True, "causal": True, "emb_dim": 16, "n_layers": 2, "n_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_words": 257}))
    asked = with_hugging_face(replace(recipe("tiny"), data=DataConfig()), str(tmp_path))
    config = resolve(asked, vocab_size=257, prepared=Path())
    with pytest.raises(UserError, match=r"fragments=strided can't be made of this model .*: set it to whole"):
        check(config)
    check(resolve(replace(asked, method="diloco"), vocab_size=257, prepared=Path()))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--model.hf", "nowhere"],
            "--model.hf=nowhere is neither a directory with a config.json, nor such a",
        ),
        (["--model.hf", "small"], "--model.hf=HERE/small has vocab_size=200, fewer than the 257 entries of"),
        (
            ["--model.hf", "fits", "--sequence-length", "65"],
            "max_position_embeddings=64, fewer than the 65 to",
        ),
        (["--model.hf", "fits", "--model.lora", "rank=2"], "--model.lora=rank=2 adapts weights, and --model.hf="),
        (["--model.hf", "fits", "--depth=8"], "--depth with --model.hf: the size"),
        (["--model.lora", "rank=2"], "--model.lora=rank=2 adapts a model of transformers: name one by --model.hf"),
        (["--model.hf"], "--model.hf needs a value"),
    ],
)
def test_a_mistake_is_one_sentence(flags, sentence, tmp_path, small_corpus, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_config(tmp_path / "small", vocab_size=200)
    write_config(tmp_path / "fits")
    text = ["--data.train", str(small_corpus), "--data.cache", str(small_corpus.parent / "cache")]
    assert sentence.replace("HERE", str(tmp_path)) in refusal(capsys, "train", "tiny", *text, *flags)
