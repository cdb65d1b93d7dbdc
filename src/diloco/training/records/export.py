"""Write a run's outer parameters, config and tokenizer to a new directory, for other programs."""

from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from diloco.data.hugging_face import hugging_face_json
from diloco.data.tokenizers import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_file,
)
from diloco.errors import UserError
from diloco.files import copy, make_directory, write_atomically, write_json, write_tensors
from diloco.models.hugging_face_config import HuggingFaceConfig
from diloco.models.language_model import LanguageModel
from diloco.training.config.config import TrainConfig
from diloco.training.records.finished import finished_config, run_parameters

Format = Literal["safetensors", "hf"]


def export_run(
    source: Path | str, to: Format, output: Path, *, prepared: Path | None = None, merged: bool = False
) -> None:
    """Write the outer parameters of a run, over or not.

    Args:
        source: directory of the run, or the URL of its store.
        to: safetensors: `model.safetensors` with the model's own names; hf: a directory that
            `transformers.AutoModelForCausalLM.from_pretrained` loads: the decoder as Persimmon, a model of
            transformers as its own class, trained adapters as peft's.
        output: a new directory.
        prepared: directory of the run's data, if that was moved, or the run is in a store.
        merged: with hf, write the whole model where adapters of one were trained.

    Raises:
        UserError: if there is no run, no checkpoint or no data, if `output` is not empty, or if transformers has
            no class for the model.
        FileWriteError: if a file can't be written, with its name and size.
    """
    if merged and to != "hf":
        raise UserError(f"merged with to={to} means nothing: take to=hf", "merged", "to")
    config = finished_config(source, prepared)
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty: set output to a new directory", "output")
    model, step = run_parameters(source, "outer")
    assert config.data.prepared is not None, "a run's config is resolved"
    tokenizer = load_tokenizer(config.data.prepared)
    make_directory(output)
    sentence = ""
    if to == "safetensors":
        _write_safetensors(model, config, tokenizer, output)
    else:
        sizes = {"context": config.sequence_length, "bos_id": tokenizer.bos_id}
        sentence = config.model.export(model, output, **sizes, merged=merged)
        _write_tokenizer(tokenizer, config.sequence_length, output)
    facts = {"run": config.name, "step": step, "num_steps": config.num_steps, "family": config.model.family}
    write_atomically(output / "README.md", [_ABOUT[to].format(**facts, sentence=sentence).encode()])


def files_of(config: TrainConfig) -> dict[str, bytes]:
    """The files with which `transformers` or peft reads a run's weights, by name; none for models of our own."""
    if not isinstance(config.model, HuggingFaceConfig):
        return {}
    assert config.data.prepared is not None, "a run's config is resolved"
    with TemporaryDirectory() as folder:
        _write_tokenizer(load_tokenizer(config.data.prepared), config.sequence_length, Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files | config.model.published_files()


def _write_safetensors(model: LanguageModel, config: TrainConfig, tokenizer: Tokenizer, output: Path) -> None:
    write_tensors(output / "model.safetensors", model.state_dict())
    values = {**asdict(config.model), "sequence_length": config.sequence_length, "bos_id": tokenizer.bos_id}
    write_json(output / "config.json", values | {"tokenizer": tokenizer.name})
    if not isinstance(tokenizer, ByteTokenizer):
        assert config.data.prepared is not None, "a run's config is resolved"
        copy(tokenizer_file(config.data.prepared), output)


def _write_tokenizer(tokenizer: Tokenizer, context: int, output: Path) -> None:
    """Write the tokenizer for transformers: BOS precedes each text, as in training."""
    text, bos = hugging_face_json(tokenizer)
    write_atomically(output / "tokenizer.json", [text.encode()])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": bos}
    settings |= {"model_max_length": context, "clean_up_tokenization_spaces": False}
    settings["split_special_tokens"] = True  # a text that spells BOS out does not get one, as in training
    if isinstance(tokenizer, SentencePieceTokenizer):
        write_atomically(output / "tokenizer.model", [tokenizer.content])
        settings |= {"tokenizer_class": "SentencePieceBackend", "special_tokens_pattern": "bos"}
        settings["unk_token"] = tokenizer.unknown
    write_json(output / "tokenizer_config.json", settings)


_ABOUT = {
    "safetensors": """# {run}

Outer parameters of a run of diloco after step {step} of {num_steps}.

`model.safetensors` holds them by the names of the model that `{family}` builds, `config.json` its
sizes and the token that the tokenizer puts before each document. A tokenizer of bytes has no file: a token is a
byte of UTF-8.
""",
    "hf": """# {run}

Outer parameters of a run of diloco after step {step} of {num_steps}, for `transformers` 5, without custom code:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```

{sentence} The tokenizer puts BOS before every text, as in training.

If the tokenizer is a SentencePiece model, `tokenizer.model` is that, and `tokenizer.json` computes the same with
another library. Of a model of unigrams it may cut a text in another of several ways that are equally likely;
`transformers.SentencePieceBackend.from_pretrained(".")` gives the ids of the training always.
""",
}
