"""Tools for the kernels of all models: compilation, vectors, product tiles, random numbers, CUDA text."""
