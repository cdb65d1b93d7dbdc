"""The pages that are made from the code, and the check of every command in the docs.

A hook of mkdocs, and an extension of the parser of docstrings.

A page asks for a table or a section with a comment: `<!-- generate: commands -->`. The title of a block of code is
the file that it is copied from, or a section of it: `title="examples/own_loop.py:loop"`. `python docs/generate.py`
copies them all anew.
"""

import ast
import contextlib
import csv
import dataclasses
import inspect
import io
import itertools
import logging
import os
import re
import shlex
import textwrap
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import griffe
from mkdocs.exceptions import PluginError

log = logging.getLogger("mkdocs.hooks.generate")  # a warning here fails a strict build

ROOMS = {
    "engine": "Engine",
    "fragments": "Fragments",
    "schedule": "Schedule",
    "outer": "Outer step",
    "wire": "Wire",
    "exchange": "Exchange",
    "publishing": "Published weights",
    "errors": "Errors",
}
"""The headings of the API page, in their order; a room that is not here follows under its own name."""


TRAITS = {
    "own_to_a_replica": "*Replicas may differ in it.*",
    "may_change_on_resume": "*A resume may change it.*",
}
"""The traits that a field declares in its metadata, as sentences."""


ROOT = Path(__file__).parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
"""Pages of the repository that the site does not have; their commands and links are checked, too."""

IMAGINED = ("extending.md", "reference/mistakes.md")
"""Pages that name commands which fail on purpose, or whose verb is only added there; tests run them."""


def on_pre_build(**_: Any) -> None:
    """Check the commands and the relative links of the pages outside the site."""
    for page in OUTSIDE:
        markdown = (ROOT / page).read_text()
        for command in shown_commands(markdown) + named_commands(markdown):
            if complaint := check_command(command):
                log.warning("%s: %s: %s", page, complaint, command)
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", markdown):
            if not (ROOT / page).parent.joinpath(target).exists():
                log.warning("%s: there is no %s", page, target)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the generated parts of the page, and check the commands that it shows."""
    makers = {
        "api": api,
        "commands": commands,
        "config": config_fields,
        "mistakes": mistakes,
        "papers": items_of_papers,
    }
    markdown = re.sub(r"<!-- generate: (\w+) -->", lambda match: makers[match[1]](), markdown)
    named = [] if page.file.src_path in IMAGINED else named_commands(markdown)
    for command in shown_commands(markdown) + named:
        if complaint := check_command(command):
            log.warning("%s: %s: %s", page.file.src_path, complaint, command)
    return markdown


def api() -> str:
    """One section per room, with an entry for each name that `diloco` exports, and one for `diloco.extend`."""
    import diloco
    from diloco import extend

    names: dict[str, list[str]] = {room: [] for room in ROOMS}
    for name in vars(diloco)["__all__"]:
        if name != "__version__":
            names.setdefault(getattr(diloco, name).__module__.split(".")[1], []).append(name)
    sections = []
    for room, exported in names.items():
        if exported:
            entries = "\n\n".join(f"::: diloco.{name}" for name in exported)
            sections.append(f"## {ROOMS.get(room, room.capitalize())}\n\n{entries}")
    kinds = {name: getattr(extend, name) for name in vars(extend)["__all__"]}
    classes = [name for name, kind in kinds.items() if getattr(kind, "__module__", "").startswith("diloco.")]
    sections.append("## Extensions\n\n" + "\n\n".join(f"::: diloco.extend.{name}" for name in classes))
    return "\n\n".join(sections)


def commands() -> str:
    """The help of every verb, and of every command below it."""
    texts = all_help()
    verbs = [
        f"- [`diloco {verb}`](#diloco-{'-'.join(verb.split())})" for verb in texts if verb and " " not in verb
    ]
    sections = [f"```text\n{texts['']}\n```\n\n" + "\n".join(verbs)]
    for verb, text in texts.items():
        if verb:
            heading = "##" if " " not in verb else "###"
            anchor = "diloco-" + "-".join(verb.split())
            sections.append(f"{heading} diloco {verb} {{ #{anchor} }}\n\n```text\n{text}\n```")
    return "\n\n".join(sections)


@cache
def all_help() -> dict[str, str]:
    """The text of `--help` by verb; "" is that of `diloco` itself, and of the recipes only `tiny` is shown."""
    top = help_of("")
    verbs = re.findall(r"^ {2,6}([a-z][a-z-]*)(?: {2,}\S|$)", top.partition("COMMAND\n")[2], re.MULTILINE)
    of_verbs = {verb: help_of(verb) for verb in verbs}
    below = [f"{verb} {name}" for verb, text in of_verbs.items() for name in subcommands(text)]
    of_all = of_verbs | {names: help_of(names) for names in below}
    return {"": top} | {name: of_all[name] for verb in verbs for name in sorted(of_all) if name.split()[0] == verb}


def subcommands(text: str) -> list[str]:
    """The names that a usage line offers, `tiny` standing for all recipes."""
    names = offered(text)
    return ["tiny"] if "tiny" in names else names


def offered(text: str) -> list[str]:
    """The names that a usage line offers in braces."""
    usage = text.partition("\n\n")[0]
    names = re.search(r"\[-h\](?: \[[^]]*\])* \{([\w.,-]+)\}", " ".join(usage.split()))
    return names[1].split(",") if names else []


def help_of(verb: str) -> str:
    """The output of `diloco VERB --help`, without the frames around its parts."""
    from diloco.cli.main import main

    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # by its encoding, frames have their characters
    environment = {"COLUMNS": "82", "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(output):
        try:
            main([*verb.split(), "--help"])
        except SystemExit as end:
            if end.code:
                raise PluginError(f"diloco {verb} --help failed") from end
    lines = []
    output.seek(0)
    for line in output.read().rstrip().splitlines():
        title = re.fullmatch(r"╭─ (.*?) ─*╮", line)
        if title:
            lines.append(f"\n{title[1]}:")
        elif not line.startswith("╰"):
            lines.append(re.sub(r"^│ ?(.*?) *│$", r"  \1", line).rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def config_fields() -> str:
    """A table of fields for a run's config, and one for each config inside it."""
    from diloco.training.config.recipes import laptop

    return "\n\n".join(config_tables(laptop(), ""))


def config_tables(config: Any, path: str) -> list[str]:
    """The table of a config's class, then those of the configs inside it."""
    cls = type(config)
    documented, hints = field_docstrings(cls), typing.get_type_hints(cls)
    rows, inner = [], []
    for field in dataclasses.fields(cls):
        name, value = f"{path}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            inner += config_tables(value, f"{name}.")
        elif field.name in documented:
            traits = " ".join(sentence for trait, sentence in TRAITS.items() if field.metadata.get(trait))
            sentences = f"{documented[field.name]} {traits}".strip()
            rows.append(f"| `{name}` | {type_text(hints[field.name])} | {default_of(field)} | {sentences} |")
    title = f"## {path.rstrip('.') or 'The run'}"
    table = "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows])
    return [f"{title}\n\n{(inspect.getdoc(cls) or '').partition(chr(10))[0]}\n\n{table}", *inner]


def default_of(field: dataclasses.Field) -> str:
    """The default as one writes it; nothing where the field has none."""
    if field.default is dataclasses.MISSING:
        return ""
    value = field.default
    return f"`{str(value)!r}`" if isinstance(value, Path) else f"`{value!r}`"


def type_text(hint: Any) -> str:
    """A type in words: the choices of a Literal, the alternatives of a union."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_text, arguments))
    if origin is tuple:
        return f"several {type_text(arguments[0])}"
    return "`None`" if hint is types.NoneType else f"`{getattr(hint, '__name__', hint)}`"


def field_docstrings(cls: type) -> dict[str, str]:
    """The sentence under each field of a class, in one line."""
    sentences = {}
    for base in [base for base in cls.__mro__ if dataclasses.is_dataclass(base)]:
        (statement,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(statement, ast.ClassDef)
        for node, after in itertools.pairwise(statement.body):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                sentences.setdefault(ast.unparse(node.target), " ".join(ast.literal_eval(after.value).split()))
    return {name: sentence.replace("|", "\\|") for name, sentence in sentences.items()}


class Doctests(griffe.Extension):
    """Shows doctests, which stand bare in the docstrings, as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put fences around each run of lines from `>>>` to the next empty line."""
        if obj.docstring:
            blocks = re.sub(r"(?m)^>>>.*(?:\n(?!\n).+)*", r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = blocks


def mistakes() -> str:
    """A table of typed commands, and of the sentences that end them."""
    rows = csv.DictReader((ROOT / "docs" / "reference" / "mistakes.csv").read_text().splitlines())
    lines = ["| typed | said |", "|---|---|"]
    for row in rows:
        where = f"<br>{row['where']}" if row["where"] else ""
        lines.append(f"| `{row['typed']}`{where} | `` {row['said']} `` |")
    return "\n".join(lines)


def items_of_papers() -> str:
    """A table for each paper: its items, what is measured here, the verdict, and how to see it."""
    items = list(csv.DictReader((ROOT / "docs" / "results" / "papers.csv").read_text().splitlines()))
    tables = []
    for paper in dict.fromkeys(row["paper"] for row in items):
        lines = ["| item | the paper | here | verdict | command, file |", "|---|---|---|---|---|"]
        for row in items:
            if row["paper"] == paper:
                ways = "<br>".join(f"`{row[name]}`" for name in ("command", "file") if row[name])
                lines.append(f"| {row['item']} | {row['shows']} | {row['measured']} | {row['verdict']} | {ways} |")
        tables.append("\n".join([f"### arXiv {paper}\n", *lines]))
    return "\n\n".join(tables)


def with_code(markdown: str) -> str:
    """The page, each block of code that names a file with what now stands there."""
    block = r'^```(\w+) title="([\w/.]+)(?::(\w+))?"\n.*?^```$'

    def copied(match: re.Match[str]) -> str:
        return f"{match[0].partition(chr(10))[0]}\n{section_of(match[2], match[3])}\n```"

    return re.sub(block, copied, markdown, flags=re.DOTALL | re.MULTILINE)


def section_of(file: str, name: str | None) -> str:
    """The text of a file, or of the section between its marks `--8<-- [start:NAME]` and `[end:NAME]`."""
    lines = (ROOT / file).read_text().splitlines()
    if name is not None:
        first, last = (
            [mark in line for line in lines].index(True)
            for mark in (f"--8<-- [start:{name}]", f"--8<-- [end:{name}]")
        )
        lines = lines[first + 1 : last]
    return textwrap.dedent("\n".join(line for line in lines if "--8<-- [" not in line)).strip("\n")


def shown_commands(markdown: str) -> list[str]:
    """The `diloco …` commands in the page's code blocks, each in one line."""
    fenced = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", markdown, re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced if language not in ("text", "python")]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"^.*-m diloco\b", "diloco", line) for line in lines if re.search(r"^diloco |-m diloco ", line)]


def named_commands(markdown: str) -> list[str]:
    """The `diloco …` commands in the page's sentences and tables."""
    return re.findall(r"`(diloco [^`\n]+)`", re.sub(r"(?ms)^ *```.*?^ *```", "", markdown))


def check_command(command: str) -> str | None:
    """The verb or flags of a command line that `--help` does not know, in a sentence; None where it knows all."""
    words = shlex.split(command.replace("…", " ").replace("[", " ").replace("]", " "), comments=True)[1:]
    texts = all_help()
    verb = next((word for word in words if not word.startswith("-")), "")
    if verb not in texts:
        return None if words and words[0].startswith("--") else f"there is no verb {verb!r}"
    names, following = offered(texts[verb]), words[words.index(verb) + 1 :] if verb else []
    if names and following and re.fullmatch(r"[a-z][a-z-]*", following[0]) and following[0] not in names:
        return f"diloco {verb} has no {following[0]!r}"
    below = [name for name in texts if name.startswith(f"{verb} ")]
    chosen = f"{verb} {words[1]}" if len(words) > 1 else verb
    known = texts[verb] + (texts[chosen] if chosen in texts else "".join(texts[name] for name in below))
    known += texts["train tiny"] if verb in ("plan", "sweep") else ""
    flags = set(re.findall(r"(?<![\w-])--[\w.-]*\w", known))
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags]
    return f"there is no {', '.join(unknown)}" if unknown else None


if __name__ == "__main__":
    for path in (ROOT / "docs").rglob("*.md"):
        path.write_text(with_code(path.read_text()))
