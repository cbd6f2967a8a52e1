"""Row sources: where the rows of a dataset are read from."""
