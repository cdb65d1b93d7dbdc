"""The names for one's own outer rule, merge rule, codec, transport, masters or model family.

They and their modules stand in `extend.pyi`, which type checkers read as well; each is loaded on its first use.
"""

from importlib import import_module

from diloco import modules_of

_MODULES = modules_of(__file__)

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll] - type checkers read the stub


def __getattr__(name: str) -> object:
    """Load a name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'diloco.extend' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The names."""
    return __all__
