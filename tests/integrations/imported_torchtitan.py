"""torchtitan for the CPU, and its integration: imported once for all processes that are forked afterwards."""

import importlib

from tests.integrations.on_cpu import import_torchtitan

import_torchtitan()
importlib.import_module("diloco.integrations.torchtitan")
