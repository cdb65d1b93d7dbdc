"""Train one language model on computers joined by slow links: Streaming DiLoCo for PyTorch.

The public names and their modules stand in `__init__.pyi`, which type checkers read as well. A name is loaded from
its module when it is first used, so that importing `diloco`, or its schedule, costs nothing.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from diloco.errors import nearest


def names_of_stub(module: str, file: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """The `__all__`, `__getattr__` and `__dir__` of a module: the names that the stub beside its file imports."""
    modules = {
        name.name: statement.module
        for statement in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for name in statement.names
    }

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {module!r} has no attribute {name!r}{nearest(name, modules)}")
        return getattr(import_module(modules[name]), name)

    return [*modules], load, lambda: [*modules]


__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
