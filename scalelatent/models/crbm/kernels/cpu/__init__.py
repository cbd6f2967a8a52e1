"""Kernels for inference in RBMs on a CPU in float32, compiled by numba."""
