"""Grids of runs, and the papers' experiments as such grids."""
