"""Text of tokens as they come: the pieces of any text are its text, and no character is cut."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.streaming import text_pieces
from diloco.data.tokenizers import ByteTokenizer, load_tokenizer, train_bpe

TEXTS = ["Hello wörld, 漢字 🙂!\n", "  two  spaces ", "né" * 20]


@pytest.fixture(scope="module", params=["bytes", "bpe", "sentencepiece"])
def tokenizer(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "bpe":
        train_bpe(TEXTS * 9, 270, folder / "tokenizer.json")
        return load_tokenizer(folder / "tokenizer.json")
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 9),
        model_writer=model,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return load_tokenizer(folder / "tokenizer.model")


@given(st.text(max_size=30))
def test_the_pieces_are_the_text(tokenizer, text):
    for one in (text, *TEXTS):
        ids = tokenizer.encode([one])[0].tolist()
        pieces = [*text_pieces(tokenizer, ids)]
        assert "".join(pieces) == tokenizer.decode(ids)
        assert "" not in pieces
        if "\ufffd" not in one:
            assert not any("\ufffd" in piece for piece in pieces)


def test_a_piece_after_others_keeps_the_space_before_it(tokenizer):
    ids = tokenizer.encode(["two words"])[0].tolist()
    for cut in range(len(ids)):
        after = "".join(text_pieces(tokenizer, ids[cut:], after=ids[:cut]))
        assert tokenizer.decode(ids[:cut]) + after == tokenizer.decode(ids)


def test_bytes_that_are_no_character_are_shown_all_the_same(tokenizer):
    if not isinstance(tokenizer, ByteTokenizer):
        pytest.skip("only here every token is a byte")
    assert "".join(text_pieces(tokenizer, [0xF0] * 9 + [0x41])).endswith("\ufffdA")
    assert next(text_pieces(tokenizer, [0xF0] * 9))
