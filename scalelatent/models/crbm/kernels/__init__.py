"""Inference in RBMs: reference, numba, CuPy."""
