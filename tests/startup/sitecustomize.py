"""Every Python process of the tests imports this at its start, which spares it what no test uses.

Of the 2.5 processor seconds in which a process imports torch with its compiler, and ends, 1.1 go into collections
of garbage that free nothing. accelerate imports two libraries wherever they are installed, in another 1.2 seconds.
"""

import atexit
import gc
import importlib.util
import sys

gc.set_threshold(20_000, 20, 20)
atexit.register(gc.freeze)  # spares the collection at the end

_find = importlib.util.find_spec


def _find_for(name, package=None):
    asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
    is_hidden = name in ("deepspeed", "mlflow") and asks in ("accelerate", "transformers", "trl", "peft")
    return None if is_hidden else _find(name, package)


importlib.util.find_spec = _find_for
