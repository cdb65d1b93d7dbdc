"""Imports that all local replicas need, made once by the process from which they are forked."""

import torch._dynamo  # which every torch optimizer imports  # pyright: ignore[reportUnusedImport]
import torch.utils.tensorboard  # the default tracker  # noqa: F401  # pyright: ignore[reportUnusedImport]

import diloco.training.loop  # noqa: F401  # pyright: ignore[reportUnusedImport]
from diloco.training.launcher import end_with_parent

# This process would live as long as any replica, and each replica ends with its parent.
end_with_parent()
