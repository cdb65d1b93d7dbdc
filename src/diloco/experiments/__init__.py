"""Experiments: grids of training runs that test the papers' claims."""
