"""Grids of runs: their identity, their processes, their rows."""
