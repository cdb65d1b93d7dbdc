"""Train one language model on computers joined by slow links: Streaming DiLoCo for PyTorch.

The names below are loaded when they are first used, so that importing `diloco`, or its schedule, costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from diloco.version import __version__

if TYPE_CHECKING:
    from diloco.engine.streaming import StreamingDiLoCo
    from diloco.errors import DisagreementError, ExchangeError, NonFiniteError, PayloadError
    from diloco.exchange.loopback import LoopbackExchange
    from diloco.exchange.process_group import ProcessGroupExchange
    from diloco.fragments import Fragment, sequential, strided, whole
    from diloco.outer.nesterov import Nesterov
    from diloco.outer.step import OuterStep
    from diloco.schedule import Schedule
    from diloco.wire import Codec, codec

__all__ = [
    "Codec",
    "DisagreementError",
    "ExchangeError",
    "Fragment",
    "LoopbackExchange",
    "Nesterov",
    "NonFiniteError",
    "OuterStep",
    "PayloadError",
    "ProcessGroupExchange",
    "Schedule",
    "StreamingDiLoCo",
    "__version__",
    "codec",
    "sequential",
    "strided",
    "whole",
]

_MODULES = {
    "Codec": "wire",
    "PayloadError": "errors",
    "codec": "wire",
    "DisagreementError": "errors",
    "ExchangeError": "errors",
    "Fragment": "fragments",
    "LoopbackExchange": "exchange.loopback",
    "Nesterov": "outer.nesterov",
    "NonFiniteError": "errors",
    "OuterStep": "outer.step",
    "ProcessGroupExchange": "exchange.process_group",
    "Schedule": "schedule",
    "StreamingDiLoCo": "engine.streaming",
    "sequential": "fragments",
    "strided": "fragments",
    "whole": "fragments",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    return getattr(import_module(f"diloco.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
