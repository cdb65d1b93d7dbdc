"""Our tokenizers as Hugging Face's `tokenizer.json`, which gives every text the ids that training gave it."""

from typing import Any

from diloco.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer


def hugging_face_json(tokenizer: ByteTokenizer | HuggingFaceTokenizer) -> tuple[str, str]:
    """A `tokenizer.json` that puts BOS before every text, as training does, and the name of BOS in it."""
    from tokenizers.processors import TemplateProcessing

    backend = _bytewise() if isinstance(tokenizer, ByteTokenizer) else tokenizer.backend
    bos = backend.id_to_token(tokenizer.bos_id)
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
    )
    return backend.to_str(pretty=True), bos


def _bytewise() -> Any:
    """`ByteTokenizer` as the library's tokenizer: a token a byte, its value the id."""
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
