"""Numba kernels that compute with integers, so that results do not depend on the order of sums."""
