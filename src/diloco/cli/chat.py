"""`diloco chat`: a run's model goes on from each line that one types, and remembers what was before."""

import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated

import tyro

from diloco.cli._command import Run, call
from diloco.cli._writing import Writing, as_utf8, read_text, show

HELP = "talk to a run's model: diloco chat RUN"
ORDER = 4


def run(arguments: list[str]) -> None:
    """Talk to the run that a command line names."""
    call(_chat, arguments, prog="diloco chat")


def _chat(run: Run, writing: Annotated[Writing, tyro.conf.arg(name="")] = Writing()) -> None:  # noqa: B008
    """Read a line, let the model go on until an empty line, and so on; the end of the input (Ctrl-D) ends it.

    A model that was trained on plain text does not answer: it goes on with the text that you have begun.

    Args:
        run: Directory of the run, over or not, or the URL of the store in which its replicas meet.
        writing: How the text is written.
    """
    from diloco.data.tokenizers import text_pieces
    from diloco.models.writer import generate

    writer, tokenizer = writing.load(run)
    while line := _line():
        tokens = read_text(writer, tokenizer, line)
        written = generate(writer, writing.max_tokens, stop=tokenizer.bos_id)
        text = ""
        for piece in show(text_pieces(tokenizer, written, after=tokens)):
            text += piece
            if "\n\n" in text:
                break
        print("\n" if not text.endswith("\n") else "", flush=True)
    print()


def _line() -> str:
    """The next line of the input with its end; empty at the end of the input."""
    if not sys.stdin.isatty():
        with as_utf8():
            return sys.stdin.readline()
    with suppress(ImportError):  # input() then edits the line, and remembers the ones before
        import_module("readline")
    try:
        with as_utf8():
            return input("> ") + "\n"
    except EOFError:
        return ""
