"""The public names: one that is added is added to public_api.txt, and none is taken away without a deprecation."""

import ast
from collections.abc import Iterator
from pathlib import Path

import diloco
import diloco.extend

SOURCE = Path(diloco.__file__).parent


def exported() -> Iterator[str]:
    """The names of `diloco`, `diloco.extend` and each integration, and the verbs of the command line."""
    yield from (f"diloco.{name}" for name in diloco.__all__)
    yield from (f"diloco.extend.{name}" for name in diloco.extend.__all__)
    for path in (SOURCE / "integrations").glob("[a-z]*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_named = isinstance(node, ast.ClassDef | ast.FunctionDef)
            if is_named and not node.name.startswith("_"):
                yield f"diloco.integrations.{path.stem}.{node.name}"
    yield from (f"diloco {path.stem}" for path in (SOURCE / "cli").glob("[a-z]*.py") if path.stem != "main")


def test_the_public_names_are_those_that_are_listed():
    listed = Path(__file__).with_name("public_api.txt").read_text(encoding="utf-8").splitlines()
    names = sorted(exported())
    missing = sorted(set(listed) - set(names))
    assert not missing, (
        f"{missing} are gone: keep them for a minor version with a warning (docs/reference/versions.md)"
    )
    assert names == listed, (
        f"add {sorted(set(names) - set(listed))} to public_api.txt, in the order of the alphabet"
    )
