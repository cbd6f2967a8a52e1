"""Kernels in numba, with whole numbers."""
