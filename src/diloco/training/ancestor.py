"""Imports that all local replicas need, made once by the process from which they are forked."""

import ctypes
import signal

import torch._dynamo  # which every torch optimizer imports  # noqa: F401  # pyright: ignore[reportUnusedImport]

import diloco.training.loop  # noqa: F401  # pyright: ignore[reportUnusedImport]

# This process would live as long as any replica; torch ends each replica with its parent.
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
