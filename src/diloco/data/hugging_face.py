"""Our tokenizers as Hugging Face's `tokenizer.json`, which puts BOS before every text, as training does."""

import re
from collections.abc import Callable
from typing import Any

from diloco.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from diloco.errors import UserError
from diloco.files import require, requiring


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
