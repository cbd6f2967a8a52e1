"""Searches over parameters whose candidates share each pass over the rows."""
