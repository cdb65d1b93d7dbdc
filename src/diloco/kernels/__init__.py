"""C functions that pass over CPU memory once where PyTorch passes several times, and memory in huge pages."""
