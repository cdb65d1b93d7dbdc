"""Imported by the process that every local replica is a fork of: what all of them need is loaded once."""

import torch._dynamo  # which every torch optimizer imports  # noqa: F401  # pyright: ignore[reportUnusedImport]

import diloco.training.loop  # noqa: F401  # pyright: ignore[reportUnusedImport]
from diloco.training.launcher import end_with_parent

# It would go on as long as a replica does; torch lets each of these end with it.
end_with_parent()
