"""Bodies of the inference kernels in numba, float32."""
