"""Write a run's outer parameters, config and tokenizer to a new directory, for other programs."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import safetensors.torch
from torch import Tensor

from diloco.data.hugging_face import hugging_face_json
from diloco.data.tokenizers import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_file,
)
from diloco.errors import UserError
from diloco.files import copy, make_directory, write_atomically, write_json, writing
from diloco.models.language_model import LanguageModel
from diloco.training.config import TrainConfig
from diloco.training.finished import finished_config, run_parameters

Format = Literal["safetensors", "hf"]


def export_run(source: Path | str, to: Format, output: Path, *, prepared: Path | None = None) -> None:
    """Write the outer parameters of a run, over or not.

    Args:
        source: directory of the run, or the URL of its store.
        to: safetensors: `model.safetensors` with the model's own names; hf: a directory that
            `transformers.AutoModelForCausalLM.from_pretrained` loads, for the decoder as Persimmon.
        output: a new directory.
        prepared: directory of the run's data, if that was moved, or the run is in a store.

    Raises:
        UserError: if there is no run, no checkpoint or no data, if `output` is not empty, or if transformers has
            no class for the model.
        FileWriteError: if a file can't be written, with its name and size.
    """
    config = finished_config(source, prepared)
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty: set output to a new directory", "output")
    model, step = run_parameters(source, "outer")
    assert config.data.prepared is not None, "a run's config is resolved"
    tokenizer = load_tokenizer(config.data.prepared)
    make_directory(output)
    write = _write_safetensors if to == "safetensors" else _write_hugging_face
    write(model, config, tokenizer, output)
    about = _ABOUT[to].format(run=config.name, step=step, num_steps=config.num_steps, family=config.model.family)
    write_atomically(output / "README.md", [about.encode()])


def _write_safetensors(model: LanguageModel, config: TrainConfig, tokenizer: Tokenizer, output: Path) -> None:
    _write_tensors(output / "model.safetensors", model.state_dict(), {})
    values = {**asdict(config.model), "sequence_length": config.sequence_length, "bos_id": tokenizer.bos_id}
    write_json(output / "config.json", values | {"tokenizer": tokenizer.name})
    if not isinstance(tokenizer, ByteTokenizer):
        assert config.data.prepared is not None, "a run's config is resolved"
        copy(tokenizer_file(config.data.prepared), output)


def _write_hugging_face(model: LanguageModel, config: TrainConfig, tokenizer: Tokenizer, output: Path) -> None:
    values, state = config.model.to_hugging_face(
        model.state_dict(), context=config.sequence_length, bos_id=tokenizer.bos_id
    )
    text, bos = hugging_face_json(tokenizer)
    _write_tensors(output / "model.safetensors", state, {"format": "pt"})
    write_json(output / "config.json", values)
    write_atomically(output / "tokenizer.json", [text.encode()])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": bos}
    settings |= {"model_max_length": config.sequence_length, "clean_up_tokenization_spaces": False}
    settings["split_special_tokens"] = True  # a text that spells BOS out does not get one, as in training
    if isinstance(tokenizer, SentencePieceTokenizer):
        write_atomically(output / "tokenizer.model", [tokenizer.content])
        settings |= {"tokenizer_class": "SentencePieceBackend", "special_tokens_pattern": "bos"}
        settings["unk_token"] = tokenizer.unknown
    write_json(output / "tokenizer_config.json", settings)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    with writing(path, sum(tensor.nbytes for tensor in tensors.values())):
        path.touch()
        mode = path.stat().st_mode  # the library makes a file that nobody else may read
        safetensors.torch.save_file(dict(tensors), path, metadata or None)
        path.chmod(mode)


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

The class computes the same function as diloco's model; the decoder becomes Persimmon, with biases of zero. The
tokenizer puts BOS before every text, as in training.

If the tokenizer is a SentencePiece model, `tokenizer.model` is that, and `tokenizer.json` computes the same with
another library. Of a model of unigrams it may cut a text in another of several ways that are equally likely;
`transformers.SentencePieceBackend.from_pretrained(".")` gives the ids of the training always.
""",
}
