"""Passes on a Dask cluster."""
