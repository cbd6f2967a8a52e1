"""Bodies of the sweeps in numba, in whole numbers."""
