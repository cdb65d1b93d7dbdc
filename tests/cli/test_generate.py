"""`diloco generate` and `diloco chat` on a finished run: the outer parameters' own text, token by token."""

import io
import sys

import pytest
from tests.cli.commands import refusal

from diloco.cli.main import main
from diloco.data.tokenizers import ByteTokenizer
from diloco.models.writer import Writer, generate
from diloco.training.records.finished import run_parameters

BOS = ByteTokenizer.bos_id


def likeliest(run, *texts: str, num_tokens: int, parameters="outer") -> list[str]:
    """The likeliest text after each of several that are read one after another."""
    writer = Writer(run_parameters(run, parameters)[0], context=64, vocab_size=257, temperature=0)
    writer.read([BOS])
    answers = []
    for text in texts:
        writer.read([*text.encode()])
        answers.append(bytes(generate(writer, num_tokens, stop=BOS)).decode(errors="replace"))
    return answers


@pytest.mark.parametrize("parameters", ["outer", "replica"])
def test_the_text_goes_on_after_the_prompt(finished_run, capsys, parameters):
    flags = ["--max-tokens", "40", "--temperature", "0", "--parameters", parameters]
    main(["generate", str(finished_run), "--prompt", "the cat ", *flags])
    (expected,) = likeliest(finished_run, "the cat ", num_tokens=40, parameters=parameters)
    assert capsys.readouterr().out == f"the cat {expected}\n" and len(expected) > 5


def test_a_chat_remembers_what_was_before(finished_run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("my aunt\na ship\n"))
    main(["chat", str(finished_run), "--max-tokens", "12", "--temperature", "0"])
    expected = likeliest(finished_run, "my aunt\n", "a ship\n", num_tokens=12)
    assert capsys.readouterr().out.replace("\n", "") == "".join(expected).replace("\n", "")
    assert likeliest(finished_run, "a ship\n", num_tokens=12) != expected[1:], "the first line counts"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_text_that_is_not_utf8_is_refused(finished_run, capsys, monkeypatch, errors):
    """A byte of Latin-1, as Python reads it in locales of two kinds."""
    sentence = "the text to go on from is not UTF-8: convert it, for example with iconv -t UTF-8"
    stdin = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert refusal(capsys, "chat", str(finished_run)) == sentence
    assert refusal(capsys, "generate", str(finished_run), "--prompt", "caf\udce9") == sentence
