"""Scaling laws of DiLoCo (arXiv 2503.09799). NumPy, no torch."""
