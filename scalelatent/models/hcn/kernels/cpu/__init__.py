"""Bodies of the sweeps in numba, float32."""
