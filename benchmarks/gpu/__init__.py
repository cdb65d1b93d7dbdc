"""The parts of the proof on a GPU; see benchmarks/on_gpu.py."""
