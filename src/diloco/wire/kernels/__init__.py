"""Fast passes over memory: C on CPUs, Triton on GPUs, and the memory itself."""
