import hashlib
import io
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from diloco.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, text_pieces, train_bpe
from diloco.errors import UserError

SHARED = Path(__file__).parents[2].parent / "shared/data"
DOLMA = SHARED / "tokenizers/gpt-neox-olmo-dolma-v1_5.json"
SENTENCEPIECE = SHARED / "tokenizers/sentencepiece_cc_all.32000.100extra.model"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent")


def book_texts(count=20):
    lines = (SHARED / "books/valid_chapters.jsonl").read_text().splitlines()[:count]
    return [json.loads(line)["text"] for line in lines]


def stdlib_texts():
    return [Path(module.__file__).read_text() for module in (json, hashlib, subprocess)]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    (ids,) = tokenizer.encode([text])
    assert bytes(ids.astype(np.uint8)) == text.encode()
    assert tokenizer.decode([tokenizer.bos_id, *ids]) == text


@needs_shared
@pytest.mark.parametrize(("path", "sizes"), [(DOLMA, (50280, 50279)), (SENTENCEPIECE, (32101, 2))])
def test_real_tokenizers_on_real_text(path, sizes):
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.bos_id) == sizes
    texts = book_texts()
    encoded = tokenizer.encode(texts)
    assert all(ids.dtype == np.uint32 and ids.max() < tokenizer.vocab_size for ids in encoded)
    assert all(tokenizer.bos_id not in ids for ids in encoded)
    for text, ids in zip(texts, encoded, strict=True):
        assert len(ids) < len(text.encode()) / 3
        # SentencePiece folds white space.
        decoded = tokenizer.decode([tokenizer.bos_id, *ids])
        assert decoded == text if path == DOLMA else decoded.split() == text.split()
    assert tokenizer.digest == hashlib.sha256(path.read_bytes()).hexdigest()


@needs_shared
def test_text_cannot_forge_a_bos():
    for path, bos in ((DOLMA, "<|endoftext|>"), (SENTENCEPIECE, "<s>")):
        tokenizer = load_tokenizer(path)
        (ids,) = tokenizer.encode([f"a{bos}b"])
        assert tokenizer.bos_id not in ids


@pytest.mark.parametrize("special", [True, False])
def test_a_bos_that_the_file_adds_as_a_plain_token_cannot_be_forged_either(bpe_path, tmp_path, special):
    content = json.loads(bpe_path.read_text())
    content["added_tokens"][0]["special"] = special
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    (ids,) = tokenizer.encode(["a<bos>b"])
    assert tokenizer.bos_id not in ids
    assert tokenizer.decode([tokenizer.bos_id, *ids]) == "a<bos>b"


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(stdlib_texts(), 600, path)
    return path


def test_a_trained_bpe_round_trips(bpe_path):
    tokenizer = load_tokenizer(bpe_path)
    texts = [*stdlib_texts(), "né\r\n\t <bos> 漢", ""]
    encoded = tokenizer.encode(texts)
    assert [tokenizer.decode([tokenizer.bos_id, *ids]) for ids in encoded] == texts
    assert tokenizer.vocab_size == 600
    assert len(encoded[0]) < len(texts[0]) * 0.7
    assert not any(tokenizer.bos_id in ids for ids in encoded)


def test_truncation_padding_and_templates_of_the_file_are_ignored(bpe_path, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_file(str(bpe_path))
    backend.enable_truncation(3)
    backend.enable_padding(length=5, pad_id=9)
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    texts = ["import json", "", "x"]
    for ids, plain in zip(tokenizer.encode(texts), load_tokenizer(bpe_path).encode(texts), strict=True):
        assert np.array_equal(ids, plain)


@pytest.mark.parametrize("bos", ["<s>", "<|endoftext|>", "[BOS]", "<bos>", "<|begin_of_text|>"])
def test_the_usual_names_of_bos(bpe_path, tmp_path, bos):
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe_path.read_text().replace("<bos>", bos))
    assert HuggingFaceTokenizer(path).bos_id == 0


def test_a_plain_token_of_the_name_of_a_bos_is_none_beside_a_special_one(bpe_path, tmp_path):
    content = json.loads(bpe_path.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 600, "content": "<s>", "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    (ids,) = tokenizer.encode(["<s>struck out</s>"])
    assert tokenizer.bos_id == 0 and ids[0] == tokenizer.vocab_size - 1


def test_an_entry_that_text_encodes_to_is_no_bos(tmp_path):
    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {"<s": 256, "<s>": 257}
    backend = Backend(BPE(vocab=vocabulary, merges=[("<", "s"), ("<s", ">")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="has no token to precede a document"):
        load_tokenizer(tmp_path)
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    (ids,) = tokenizer.encode(["<s>"])
    assert ids.tolist() == [257] and tokenizer.bos_id == 258
    # An entry that its name does not encode to is one, though the file adds it to nothing.
    Backend(BPE(vocab=vocabulary | {"[BOS]": 258}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).bos_id == 257


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


def test_bytes_that_are_no_character_are_shown_all_the_same():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"
    assert "".join(text_pieces(tokenizer, [0xF0] * 9 + [0x41])).endswith("\ufffdA")
    assert next(text_pieces(tokenizer, [0xF0] * 9))
