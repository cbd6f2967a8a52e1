"""Passes over a dataset in one process or on Dask, with bitwise identical results."""
