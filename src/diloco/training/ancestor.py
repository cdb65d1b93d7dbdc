"""Imported by the process that every local replica is a fork of: what all of them need is loaded once."""

import ctypes
import signal

import torch._dynamo  # which every torch optimizer imports  # noqa: F401  # pyright: ignore[reportUnusedImport]

import diloco.training.loop  # noqa: F401  # pyright: ignore[reportUnusedImport]

# It would go on as long as a replica does; torch lets each of these end with it.
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
