"""Passes over a dataset, in process or on Dask, with the same bits either way."""
