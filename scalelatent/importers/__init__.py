"""Importers: each converts files of one format to a dataset, one shard at a time, whatever their size."""
