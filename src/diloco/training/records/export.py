"""Write a run's outer parameters, config and tokenizer to a new directory, for other programs."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from diloco.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_file,
)
from diloco.errors import UserError
from diloco.files import copy, make_directory, require, requiring, write_atomically, write_json, write_tensors
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
        UserError: if there is no run, no checkpoint or no data, if `output` is no empty directory, or if
            transformers has no class for the model.
        FileWriteError: if a file can't be written, with its name and size.
    """
    if merged and to != "hf":
        raise UserError(f"merged with to={to} means nothing: take to=hf", "merged", "to")
    config = finished_config(source, prepared)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is no empty directory: set output to a new one", "output")
    model, step = run_parameters(source, "outer")
    assert config.data.prepared is not None, "a run's config is resolved"
    tokenizer = load_tokenizer(config.data.prepared)
    make_directory(output)
    sentence = ""
    if to == "safetensors":
        _write_safetensors(model, config, tokenizer, output)
    else:
        sizes = {"context": config.sequence_length, "bos_id": tokenizer.bos_id}
        converted = hugging_face_json(tokenizer)  # refused before anything is written
        sentence = config.model.export(model, output, **sizes, merged=merged)
        _write_tokenizer(tokenizer, converted, config.sequence_length, output)
    facts = {"run": config.name, "step": step, "num_steps": config.num_steps, "family": config.model.family}
    write_atomically(output / "README.md", [_ABOUT[to].format(**facts, sentence=sentence).encode()])


def files_of(config: TrainConfig) -> dict[str, bytes]:
    """The files with which `transformers` or peft reads a run's weights, by name; none for models of our own."""
    if not isinstance(config.model, HuggingFaceConfig):
        return {}
    assert config.data.prepared is not None, "a run's config is resolved"
    with TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(config.data.prepared)
        _write_tokenizer(tokenizer, hugging_face_json(tokenizer), config.sequence_length, Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files | config.model.published_files()


def _write_safetensors(model: LanguageModel, config: TrainConfig, tokenizer: Tokenizer, output: Path) -> None:
    write_tensors(output / "model.safetensors", model.state_dict())
    values = {**asdict(config.model), "sequence_length": config.sequence_length, "bos_id": tokenizer.bos_id}
    write_json(output / "config.json", values | {"tokenizer": tokenizer.name})
    if not isinstance(tokenizer, ByteTokenizer):
        assert config.data.prepared is not None, "a run's config is resolved"
        copy(tokenizer_file(config.data.prepared), output)


def _write_tokenizer(tokenizer: Tokenizer, converted: tuple[str, str], context: int, output: Path) -> None:
    """Write the tokenizer for transformers: BOS precedes each text, as in training."""
    text, bos = converted
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


def hugging_face_json(tokenizer: Tokenizer) -> tuple[str, str]:
    """A `tokenizer.json` with the ids of a tokenizer, and the name of BOS in it.

    It gives texts the same ids, but for those of a SentencePiece model of unigrams: where two ways to cut a text
    are equally likely, SentencePiece rounds their scores to 32 bits, and this library to 64.

    Raises:
        UserError: for a SentencePiece model that the library tokenizers can't compute.
    """
    with requiring("tokenizers", extra="train"):
        from tokenizers.processors import TemplateProcessing

    backend = _backend(tokenizer)
    bos = backend.id_to_token(tokenizer.bos_id)
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
    )
    return backend.to_str(pretty=True), bos


def _backend(tokenizer: Tokenizer) -> Any:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.backend()
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _pieces(tokenizer)
    assert isinstance(tokenizer, ByteTokenizer), f"a new kind of tokenizer: {tokenizer.name}"
    return _bytewise()


def _bytewise() -> Any:
    """`ByteTokenizer` as the library's tokenizer: one token per byte, whose value is the id."""
    with requiring("tokenizers", extra="train"):
        from tokenizers import Tokenizer as Backend
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

    # A printable character stands for each byte: its own, or the next free one from U+0100 on.
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in own)
    vocabulary = {chr(byte): byte for byte in own}
    vocabulary |= {chr(256 + index): byte for index, byte in enumerate(others)}
    backend = Backend(BPE(vocab=vocabulary | {"<bos>": ByteTokenizer.bos_id}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<bos>"])
    return backend


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""SentencePiece's types of pieces."""

_UNIGRAM, _BPE = 1, 2
"""SentencePiece's types of models that the library has, too."""

_SPACE = "▁"


def _pieces(tokenizer: SentencePieceTokenizer) -> Any:
    """A SentencePiece model as the library's tokenizer; transformers' own converter gives texts other ids."""
    with requiring("tokenizers", extra="train"):
        from tokenizers import Regex, decoders
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE, Unigram
        from tokenizers.pre_tokenizers import Split

    proto = require("sentencepiece.sentencepiece_model_pb2", extra="data").ModelProto.FromString(tokenizer.content)
    trainer = proto.trainer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE) or trainer.treat_whitespace_as_suffix:
        raise UserError(
            f"{tokenizer.name} is a SentencePiece model of words, characters or suffixes, not of transformers': "
            "take to=safetensors",
            "to",
        )
    unknown = next(index for index, piece in enumerate(proto.pieces) if piece.type == _UNKNOWN)
    in_bytes = any(piece.type == _BYTE for piece in proto.pieces)
    if trainer.model_type == _UNIGRAM:
        backend = Backend(Unigram(_scored(proto.pieces), unknown, in_bytes))
        backend.pre_tokenizer = Split(Regex(_spelled_out(proto.pieces)), "merged_with_previous")
    else:
        ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
        own: list[str] = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]
        options = {"unk_token": proto.pieces[unknown].piece, "fuse_unk": True, "byte_fallback": in_bytes}
        backend = Backend(BPE(ids, _merges(proto.pieces), ignore_merges=bool(own), **options))
        if own:  # a user's own pieces are cut out before the others are merged
            longest_first = "|".join(map(re.escape, sorted(own, key=len, reverse=True)))
            backend.pre_tokenizer = Split(Regex(longest_first), "isolated")
    backend.normalizer = _normalizer(proto.normalizer_spec)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([piece.piece for piece in proto.pieces if piece.type == _CONTROL])
    return backend


def _scored(pieces: Any) -> list[tuple[str, float]]:
    """The pieces of a unigram model with scores; those of a user's own pieces have them always taken."""
    normal = [piece.score for piece in pieces if piece.type == _NORMAL]
    scores: dict[int, Callable[[Any], float]] = {
        _USER_DEFINED: lambda piece: len(piece.piece.encode()) * max(normal) - 0.1,
        _NORMAL: lambda piece: piece.score,
    }
    return [(piece.piece, scores.get(piece.type, lambda _: min(normal))(piece)) for piece in pieces]


def _spelled_out(pieces: Any) -> str:
    """A pattern of the first character where a text spells out a piece that no text is cut into."""
    rests: dict[str, list[str]] = {}
    for piece in pieces:
        if piece.type not in (_NORMAL, _USER_DEFINED):
            rests.setdefault(piece.piece[0], []).append(re.escape(piece.piece[1:]))
    return "|".join(f"{re.escape(first)}(?={'|'.join(ends)})" for first, ends in rests.items())


def _merges(pieces: Any) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, the pieces of the highest scores first."""
    kinds = (_NORMAL, _USER_DEFINED)
    scores = {piece.piece: piece.score for piece in pieces if piece.type in (*kinds, _UNUSED)}
    merged = sorted((piece for piece in pieces if piece.type in kinds), key=lambda piece: -piece.score)
    return [
        (text[:cut], text[cut:])
        for text in (piece.piece for piece in merged)
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]


def _normalizer(spec: Any) -> Any:
    """SentencePiece's normalisation of a text, spaces at its ends and in its middle included."""
    with requiring("tokenizers", extra="train"):
        from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A "), "")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", _SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"[ {_SPACE}]+\z"), ""))
    return normalizers.Sequence(steps)
