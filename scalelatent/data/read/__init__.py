"""Row sources: classes that read the rows of a dataset from memory, files or other libraries."""
