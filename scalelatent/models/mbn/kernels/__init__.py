"""Clustering kernels: reference, numba, CuPy."""
