"""Libraries that only some kinds of file need."""

import importlib
from typing import Any


def require(module: str, *, extra: str) -> Any:
    """Import `module`, a part of a library that the extra `extra` of diloco installs.

    Raises:
        ValueError: if the library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if error.name != library:
            raise
        raise ValueError(
            f"{library} is needed here; install it: pip install '.[{extra}]' in diloco's clone"
        ) from error
