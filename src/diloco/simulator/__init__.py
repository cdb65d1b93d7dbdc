"""The duration and compute utilization of a run, simulated with NumPy, without torch."""
