"""Every library that the package imports is one that pyproject.toml declares."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEED_AN_EXTRA = ("integrations/", "evaluation/zero_shot.py")
"""Files that import the library of an extra at once: they are imported only where somebody has asked for it."""
NOT_FOR_USERS = ("dev", "docs", "peers")
WITH_TORCH = {"triton"}
"""Libraries that come with a PyTorch for GPUs, and are asked for nowhere else."""


def names(requirements: Iterable[str]) -> set[str]:
    return {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;]", text)[0]).lower() for text in requirements}


def libraries(path: Path) -> Iterator[tuple[str, bool]]:
    """The libraries that a file imports, in functions too, and whether it does so when it is itself imported."""
    module = ast.parse(path.read_text())
    branches = (node for node in ast.walk(module) if isinstance(node, ast.If))
    for_types = [node for node in branches if ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for node in for_types for inner in ast.walk(node)}
    for node in (node for node in ast.walk(module) if id(node) not in skipped):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("require", "import_module"):
            imported = [str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant)]
        else:
            continue
        roots = {name.partition(".")[0] for name in imported}
        yield from ((root, node in module.body) for root in roots - {"diloco", *sys.stdlib_module_names})


def test_each_library_is_a_dependency_or_comes_with_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always, distributions = names(project["dependencies"]), packages_distributions()
    extras = {name: extra for name, extra in project["optional-dependencies"].items() if name not in NOT_FOR_USERS}
    sometimes = always.union(*map(names, extras.values()))
    wrong = []
    for path in sorted((ROOT / "src" / "diloco").rglob("*.py")):
        place = path.relative_to(ROOT / "src" / "diloco").as_posix()
        for library, is_at_once in libraries(path):
            declared = always if is_at_once and not place.startswith(NEED_AN_EXTRA) else sometimes
            if not names(distributions.get(library, [library])) & (declared | WITH_TORCH):
                wrong.append(f"{place} imports {library}")
    assert not wrong, "\n".join(wrong)
