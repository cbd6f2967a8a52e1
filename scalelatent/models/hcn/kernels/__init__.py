"""Max-product over AND-OR trees: reference, numba."""
