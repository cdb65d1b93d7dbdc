"""The papers' experiments as grids."""
