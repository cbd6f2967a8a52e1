"""Bodies of the kernels in numba."""
