"""The `diloco` command: it finds the verb's module, imports that alone, and runs it."""

import argparse
import ast
import math
import shlex
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from diloco import cli
from diloco.cli._foreign import command
from diloco.cli._streams import explained, safe_streams
from diloco.errors import UserError, nearest
from diloco.files import requiring
from diloco.version import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; exits with 0, with 1 when a run fails, with 2 for a user's mistake."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    with safe_streams(), explained():
        if words and words[0] in verbs():
            with requiring("tyro", "rich", extra="train"):
                import_module(f"{cli.__name__}.{words[0]}").run(words[1:])
        else:
            _run_no_verb(words)


def verbs() -> list[str]:
    """The verbs: every module of this package but main and those that begin with an underscore."""
    return [m.name for m in iter_modules(cli.__path__) if m.name != "main" and not m.name.startswith("_")]


def _run_no_verb(words: Sequence[str]) -> None:
    """Print the help or the version, or refuse a command line that begins with no verb."""
    parser = argparse.ArgumentParser(
        prog="diloco",
        description="Train one language model on computers joined by slow links (Streaming DiLoCo).",
        epilog="To begin: diloco train tiny. To learn about a command: diloco COMMAND --help.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"diloco {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    constants = {verb: _constants(verb) for verb in verbs()}
    for verb, values in sorted(constants.items(), key=lambda item: item[1].get("ORDER", math.inf)):
        commands.add_parser(verb, help=values["HELP"], add_help=False)
    if words and words[0] not in ("-h", "--help", "-V", "--version"):
        if words[0].startswith("-"):
            meant = {"h": "--help", "help": "--help", "v": "--version"}.get(words[0].lstrip("-"))
            hint = f"did you mean {meant}?" if meant else "the command comes first, as in diloco train laptop"
            raise UserError(f"unknown flag {words[0]}: {hint}")
        raise UserError(f"there is no command {words[0]!r}{_meant(words, constants)} (diloco --help lists all)")
    if not words:
        parser.print_help()
        raise SystemExit(UserError.exit_code)
    parser.parse_args(words[:1])


def _meant(words: Sequence[str], verbs: Collection[str]) -> str:
    """The command that was meant; nothing where none is known."""
    from diloco.training.config.recipes import RECIPES  # which --help does not need

    word = words[0]
    if answer := command(words):
        return f": type {answer}"
    if word in RECIPES:
        return f": type diloco train {shlex.join(words)}"
    if " " in word and word.split()[0] in verbs:
        return f": type it without quotes, diloco {word}"
    if Path(word).exists():
        return f": a command comes before a file, as in diloco watch {shlex.join(words)}"
    return nearest(word, verbs)


def _constants(verb: str) -> dict[str, Any]:
    """A verb's HELP, and its ORDER if it has one, read from its source: importing all verbs takes seconds."""
    spec = find_spec(f"{cli.__name__}.{verb}")
    assert spec is not None and spec.origin is not None, f"verb {verb} has no source"
    constants: dict[str, Any] = {}
    for statement in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="HELP" | "ORDER" as name)], value=ast.Constant(value=value)):
                constants[name] = value
    assert "HELP" in constants, f"{spec.origin} assigns no constant to HELP"
    return constants
