"""Sizes, models of `transformers`, adapters and settings of a writer that are refused, each by one sentence."""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.models.gpt2 import write_config, write_model

from diloco.errors import FileError, UserError
from diloco.models.decoder_config import DecoderConfig, ladder
from diloco.models.families import load_family
from diloco.models.hugging_face_config import (
    HuggingFaceConfig,
    hugging_face_model,
    parse_lora,
    transformers_config,
)
from diloco.models.language_model import cross_entropy
from diloco.models.spec import ModelConfig
from diloco.models.writer import Writer

pytestmark = pytest.mark.filterwarnings("default")  # of transformers
needs_transformers = pytest.mark.usefixtures("transformers")
Act = Callable[[Path], object]


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


def decoder(**sizes: int) -> Act:
    return lambda _: DecoderConfig(**{"num_layers": 2, "num_heads": 2, "width": 16} | sizes)


def loss(target: torch.Tensor) -> Act:
    return lambda _: cross_entropy(torch.zeros(2, 4), target, 0.0)


def writer(**options: float) -> Act:
    model = DecoderConfig(num_layers=1, num_heads=1, width=2, vocab_size=3).build(seed=0)
    return lambda _: Writer(model, context=8, **options)


def stored(architecture: str, num_layers: int = 1) -> Act:
    return lambda _: HuggingFaceConfig(num_layers=num_layers, width=1, vocab_size=1, architecture=architecture)


NOT_ONE = "need one int64 target for each row, and not torch.int"
UNKNOWN = "is not known here: import it first"
REFUSALS: list[tuple[Act, str, str]] = [
    (
        decoder(num_heads=3),
        "model.width=16 must be a multiple of twice model.num_heads=3",
        "model.width model.num_heads",
    ),
    (decoder(num_layers=10**9), "model.num_layers=1000000000 must be at most 4096", "model.num_layers"),
    (decoder(num_layers=0), "model.num_layers=0 must be at least 1", "model.num_layers"),
    (decoder(vocab_size=-1), "model.vocab_size=-1 must be at least 0", "model.vocab_size"),
    (lambda _: ladder("7B"), r"'7B' is not a size.*35M.*10B", ""),
    (
        lambda _: ModelConfig.to_hugging_face(ladder("35M"), {}, context=8, bos_id=0),
        "has no class that computes DecoderConfig's model: take to=safetensors",
        "to",
    ),
    (loss(torch.zeros(3, dtype=torch.int64)), rf"logits \(2, 4\) {NOT_ONE}", ""),
    (loss(torch.zeros(2, dtype=torch.int32)), rf"logits \(2, 4\) {NOT_ONE}", ""),
    (writer(temperature=-1.0), "temperature=-1.0 must", "temperature"),
    (writer(temperature=math.nan), "temperature=nan must", "temperature"),
    (writer(top_k=0), "top_k=0 must", "top_k"),
    *(
        (stored(text), r"model\.architecture is no config\.json of transformers", "model.architecture")
        for text in ("", "[]", "{}", '{"model_type": 1}', "[" * 100_000)
    ),
    (stored('{"model_type": "gpt2"}', 4097), "model.num_layers=4097 must be at most 4096", "model.num_layers"),
    *(
        (lambda _, p=path: load_family(p), UNKNOWN, "model.family")
        for path in ("diloco.models.Nothing", "antigravity.geohash", "Nothing", "pathlib.Path")
    ),
    *(
        (lambda _, t=text: parse_lora(t), f"^model.lora={text}: {words}", "model.lora")
        for text, words in (
            ("8", r"'8' is not an option of it, or given twice \(it has: rank=INTEGER"),
            ("rank=8,rank=8", "'rank=8' is not an option of it, or given twice"),
            ("alpha=8", "it needs a rank"),
            ("rank=x", "it needs a rank, and numbers"),
            ("rank=0", "rank must be from 1 to 65535"),
            ("rank=8,alpha=inf", "rank must be .*, alpha above 0"),
            ("rank=8,targets=", "rank must be .*, and no target empty"),
        )
    ),
]


@pytest.mark.parametrize(("act", "words", "fields"), REFUSALS)
def test_a_mistake_is_refused_by_one_sentence(act, words, fields, tmp_path):
    with pytest.raises(UserError, match=words) as refusal:
        act(tmp_path)
    assert " ".join(refusal.value.fields) == fields and "antigravity" not in sys.modules


def looked_up(content: object = None, **values: object) -> Act:
    """Looking up a GPT-2 without weights, or another `config.json`."""

    def act(folder: Path) -> None:
        write_config(folder)
        if content is not None:
            (folder / "config.json").write_text(json.dumps(content))
        hugging_face_model(str(folder), **values)

    return act


def sharded(index: str | list[str] | None) -> Act:
    def act(folder: Path) -> None:
        write_config(folder)
        (folder / "pytorch_model.bin").touch()
        if index is not None:
            shards = index if isinstance(index, list) else {"a": index}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        hugging_face_model(str(folder))

    return act


def fitted(vocab_size: int, sequence_length: int) -> Act:
    def act(folder: Path) -> None:
        config = hugging_face_model(str(write_config(folder)))
        assert config.fitted(vocab_size=257, sequence_length=64) is config
        config.fitted(vocab_size=vocab_size, sequence_length=sequence_length)

    return act


NEITHER = "is neither a directory with a config.json, nor such a file, nor the name of a"
NO_MODEL = "is no causal language model: choose another"
LOOK_UPS: list[tuple[Act, str, str]] = [
    (lambda folder: hugging_face_model(str(folder)), NEITHER, "model.hf"),
    (lambda _: hugging_face_model("no model"), NEITHER, "model.hf"),
    (looked_up({"model_type": "t5"}), f"a model of type t5 {NO_MODEL}", "model.hf"),
    (looked_up({"model_type": "bert"}), f"a model of type bert {NO_MODEL}", "model.hf"),
    (looked_up({"model_type": "nothing"}), "transformers knows no model_type='nothing' here", "model.hf"),
    (looked_up({"n_layer": 2}), "transformers knows no model_type=None here", "model.hf"),
    (looked_up({"model_type": "gpt2", "n_layer": "two"}), "transformers refuses its config.json: ", "model.hf"),
    (looked_up(lora="rank=2"), "adapts weights, and .* has none: leave it out", "model.lora"),
    (sharded(None), "has its weights as a pickle: save them as model.safetensors", "model.hf"),
    (sharded("../a.safetensors"), "a shard lies outside of its directory", "model.hf"),
    (sharded("a.safetensors"), "has no a.safetensors", "model.hf"),
    (sharded(["a"]), "index.json can't be read: ", "model.hf"),
    (
        fitted(258, 64),
        "has vocab_size=257, fewer than the 258 entries of data.tokenizer: choose",
        "data.tokenizer",
    ),
    (fitted(257, 65), "has max_position_embeddings=64, fewer than the 65 tokens of seq", "sequence_length"),
    (fitted(100, 64), "has a vocabulary of 257, more than twice the tokenizer's 100", "model.hf"),
]


@needs_transformers
@pytest.mark.parametrize(("act", "words", "field"), LOOK_UPS)
def test_a_model_that_is_none_is_refused_by_one_sentence(act, words, field, tmp_path):
    with pytest.raises(UserError, match=words) as refusal:
        act(tmp_path)
    assert refusal.value.field == field and "\n" not in str(refusal.value)


@needs_transformers
def test_a_damaged_config_names_its_file_and_a_missing_library_how_to_install_it(tmp_path, monkeypatch):
    write_config(tmp_path)
    transformers_config.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UserError, match=r"transformers is not installed: run pip install 'diloco\[transformers\]'"
    ):
        hugging_face_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileError, match=r"config\.json can't be read: "):
        hugging_face_model(str(tmp_path))


@needs_transformers
@pytest.mark.timeout(40)  # the libraries' own attempts take a minute
def test_a_hub_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"the Hugging Face Hub does not answer at http://127\.0\.0\.1:9"):
        hugging_face_model("nowhere/gpt2")


@pytest.mark.slow
@needs_transformers
def test_weights_that_changed_are_gone_or_make_no_model_are_refused(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "gpt2")
    config = hugging_face_model(str(folder))
    gone = hugging_face_model(str(write_model(tmp_path / "gone")))
    (tmp_path / "gone").rename(tmp_path / "moved")
    write_model(folder, initializer_range=0.5)
    config.build(seed=0)  # evaluates a run, whose own parameters take the place of these
    drawn = hugging_face_model(str(write_config(tmp_path, n_head=5)))
    damaged = write_model(tmp_path / "damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4])
    untied = write_model(tmp_path / "untied") / "model.safetensors"
    head = {"lm_head.weight": torch.ones(257, 32)}
    safetensors.torch.save_file(safetensors.torch.load_file(untied) | head, untied, metadata={"format": "pt"})
    for one, words in (
        (config, r"has other weights than those that the run began with .*: bring them"),
        (gone, "its weights can't be read: the directory is gone"),
        (hugging_face_model(str(tmp_path / "damaged")), r"damaged/model\.safetensors can't be read: Error while"),
        (hugging_face_model(str(tmp_path / "untied")), r"own in lm_head\.weight, which its config\.json ties"),
        (drawn, r"can't build it .ValueError: `embed_dim` must"),
        (lambda: hugging_face_model(str(write_config(folder, n_layer=5))), r"lack 12 .*such as transformer\.h\.4"),
        (lambda: hugging_face_model(str(write_config(folder, n_embd=16))), "its weights can't be read: "),
    ):
        with pytest.raises(UserError, match=words):
            (one() if callable(one) else one).initial(seed=0)
    pytest.importorskip("peft")
    other = hugging_face_model(str(tmp_path / "moved"), lora="rank=2,targets=q_proj")
    for targets, words in (("c_attn+q_proj", ", which has no 'q_proj'"), ("drop", ": Target module Dropout")):
        with pytest.raises(UserError, match=rf"targets={re.escape(targets)} does not suit the model{words}"):
            hugging_face_model(str(tmp_path / "moved"), lora=f"rank=2,targets={targets}").build(seed=0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"peft is not installed: run pip install 'diloco\[lora\]'"):
        other.build(seed=0)
