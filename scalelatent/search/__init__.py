"""Hyperparameter search whose candidates share each pass over the rows."""
