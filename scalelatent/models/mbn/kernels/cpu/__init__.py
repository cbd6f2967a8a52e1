"""Kernels of bootstrap networks on a CPU, compiled by numba."""
