"""accelerate without libraries that it imports where they are, and that no loop here uses; it takes seconds."""

import importlib.util

_find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name in ("deepspeed", "mlflow") else _find(name, package)
)
importlib.import_module("accelerate")
