"""Train one language model on computers joined by slow links: Streaming DiLoCo for PyTorch.

The public names and their modules stand in `__init__.pyi`, which type checkers read as well. A name is loaded from
its module when it is first used, so that importing `diloco`, or its schedule, costs nothing.
"""

import ast
from importlib import import_module
from pathlib import Path


def modules_of(file: str) -> dict[str, str]:
    """The modules of the names that the stub beside a file exports."""
    return {
        name.name: statement.module
        for statement in ast.parse(Path(file).with_suffix(".pyi").read_text()).body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for name in statement.names
    }


_MODULES = modules_of(__file__)

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll] - type checkers read the stub


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
