"""Grids of runs: each run's identity, its process, and its row."""
