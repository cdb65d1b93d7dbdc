"""`diloco chat`: a run's model goes on from each line that one types, and remembers what was before."""

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from diloco.cli._command import Run, call, train_command
from diloco.cli._serving import check_serving, serve_page
from diloco.cli._writing import Writing, as_utf8, show

HELP = "talk to a run's model, here or on a page: diloco chat RUN [--serve]"
ORDER = 4


def run(arguments: list[str]) -> None:
    """Talk to the run that a command line names."""
    call(_chat, arguments, prog="diloco chat")


def _chat(
    run: Run,
    serve: bool = False,
    port: int = 0,
    address: str = "",
    writing: Annotated[Writing, tyro.conf.arg(name="")] = Writing(),  # noqa: B008
) -> None:
    """Read a line, let the model go on until an empty line, and so on; the end of the input (Ctrl-D) ends it.

    A model that was trained on plain text does not answer: it goes on with the text that you have begun.

    Args:
        run: Directory of the run, over or not, or the URL of the store in which its replicas meet.
        serve: Serve the live page of the run, with the chat at its top, to this machine's browsers, and print its
            address. Each answer is of the newest checkpoint.
        port: Port of the page; 0 takes a free one.
        address: Address of this machine on which the page is served to other devices, too, as by `diloco watch`.
        writing: How the text is written; the page takes it to begin with.
    """
    check_serving(serve, port=port, address=address)
    if not serve:
        return _talk(run, writing)
    from diloco.report.chat import Chat
    from diloco.report.sources import Sources

    sources, chat = Sources([run], command_of=train_command), Chat(run, **vars(writing))
    return serve_page(sources, f"diloco: {Path(run).name or run}", port=port, address=address, chat=chat)


def _talk(run: str, writing: Writing) -> None:
    from diloco.report.chat import answer

    writer, tokenizer = writing.load(run)
    while line := _line():
        with as_utf8():
            line.encode()
        text = ""
        for piece in show(answer(writer, tokenizer, line, max_tokens=writing.max_tokens)):
            text += piece
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
