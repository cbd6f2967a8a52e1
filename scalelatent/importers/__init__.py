"""Importers: files of other programs become datasets, a shard at a time, whatever their size."""
