"""A run's outer parameters, as other programs read them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from diloco.data.config import DataConfig
from diloco.data.prepare import resolve as resolve_data
from diloco.data.tokenizers import SentencePieceTokenizer, load_tokenizer, train_bpe
from diloco.errors import UserError
from diloco.models.writer import Writer, generate
from diloco.training.config.recipes import recipe
from diloco.training.config.resolve import resolve
from diloco.training.records import export
from diloco.training.records.export import export_run
from diloco.training.records.finished import run_parameters
from diloco.training.records.runs import claim, read_config
from diloco.training.records.summary import OUTER_FILE


def test_the_export_has_our_names(finished_run, tmp_path):
    export_run(finished_run, "safetensors", tmp_path / "out")
    config = read_config(finished_run)
    model = config.model.build(seed=1)
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"))
    outer = run_parameters(finished_run, "outer")[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), outer.parameters(), strict=True))
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["width"] == config.model.width and described["tokenizer"] == "bytes"
    for taken in (tmp_path / "out", tmp_path / "out" / "config.json"):
        with pytest.raises(UserError, match=f"{taken} is no empty directory: set output to a new one"):
            export_run(finished_run, "hf", taken)


HARD = [
    "the cat  sees salt, né",
    " two\n\n lines\t",
    "漢字 🙂 e\u0301 ﬁ",
    "<s> </s> <bos> <|endoftext|> <own>",
    "",
    "aaaaaaaaaaaaaaaaa",
]


def sentencepiece_model(path: Path, texts: list[str], kind: str) -> str:
    sentencepiece = pytest.importorskip("sentencepiece")
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=file,
            model_type=kind,
            vocab_size=400,
            hard_vocab_limit=False,
            byte_fallback=True,
            user_defined_symbols=["<own>"],
            minloglevel=2,
        )
    return str(path)


@pytest.fixture(params=["bytes", "bpe", "tokenizer.json", "unigram", "sentencepiece bpe"])
def run(request, tmp_path, small_corpus) -> Path:
    """The directory of a run with each kind of tokenizer, whose model nobody has trained."""
    texts = [json.loads(line)["text"] for line in small_corpus.read_text().splitlines()]
    match request.param:
        case "bytes":
            tokenizer = "bytes"
        case "bpe":
            tokenizer = "bpe:300"
        case "tokenizer.json":
            tokenizer = str(tmp_path / "tokenizer.json")
            train_bpe(texts, 290, Path(tokenizer))
            own = json.loads(Path(tokenizer).read_text())
            own["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "direction": "Right", "stride": 0}
            Path(tokenizer).write_text(json.dumps(own))
        case kind:
            tokenizer = sentencepiece_model(tmp_path / "own.model", texts, kind.removeprefix("sentencepiece "))
    data = DataConfig(train=(str(small_corpus),), held_out_fraction=0.1, tokenizer=tokenizer, cache=tmp_path)
    prepared = resolve_data(data)
    asked = replace(recipe("tiny"), name="run", runs=tmp_path, data=data)
    config = resolve(asked, vocab_size=load_tokenizer(prepared).vocab_size, prepared=prepared)
    claim(config)
    model = config.model.build(seed=3)
    safetensors.torch.save_file(dict(model.named_parameters()), config.directory / OUTER_FILE)
    return config.directory


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of transformers
def test_transformers_cuts_texts_as_training_did_and_writes_as_the_run(run, tmp_path, small_corpus):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "hf"
    export_run(run, "hf", out)
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert modes == {(tmp_path / "any").stat().st_mode}, "as the user's own files"
    texts = [json.loads(line)["text"] for line in small_corpus.read_text().splitlines()] + HARD
    tokenizer = load_tokenizer(read_config(run).data.prepared)
    expected = [[tokenizer.bos_id, *ids.tolist()] for ids in tokenizer.encode(texts)]
    theirs = [transformers.AutoTokenizer.from_pretrained(out)]
    if isinstance(tokenizer, SentencePieceTokenizer):
        theirs.append(transformers.SentencePieceBackend.from_pretrained(out))
    for one in theirs:
        assert [one(text)["input_ids"] for text in texts] == expected
        decoded = one.decode(expected[0], skip_special_tokens=True)
        assert decoded == tokenizer.decode(expected[0])
    ours, model = run_parameters(run, "outer")[0], transformers.AutoModelForCausalLM.from_pretrained(out)
    prompt = torch.tensor([expected[0][:5]])
    with torch.no_grad():
        torch.testing.assert_close(model(prompt).logits, ours(prompt), atol=2e-5, rtol=1e-4)
    written = model.generate(prompt, max_new_tokens=50, do_sample=False, pad_token_id=tokenizer.bos_id)[0, 5:]
    writer = Writer(ours, context=64, vocab_size=tokenizer.vocab_size, temperature=0)
    writer.read(prompt[0].tolist())
    assert written.tolist() == [*generate(writer, 50)][: len(written)] and len(written) > 3


def test_a_sentencepiece_model_that_transformers_cannot_compute_is_refused(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(sentencepiece_model(tmp_path / "own.model", ["one two three"] * 9, "char"))
    config = replace(recipe("tiny"), data=DataConfig(prepared=tmp_path))
    config = replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))
    monkeypatch.setattr(export, "finished_config", lambda *_: config)
    monkeypatch.setattr(export, "run_parameters", lambda *_: (config.model.build(seed=0), 1))
    monkeypatch.setattr(export, "load_tokenizer", lambda _: tokenizer)
    with pytest.raises(UserError, match=r"own\.model is a SentencePiece model of words, .*: take to=safetensors"):
        export_run("run", "hf", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir()), "the same directory takes the other format"
