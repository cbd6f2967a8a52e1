"""What kernels of several models share: compilation, vectors, product tiles, random numbers, CUDA text."""
