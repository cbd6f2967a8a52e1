"""Execution of passes, online steps and maps on a Dask cluster."""
