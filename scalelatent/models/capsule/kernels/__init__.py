"""The E-step and the walk of capsule regression: reference, numba, CuPy."""
