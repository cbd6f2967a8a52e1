"""Reductions and linear algebra that several models use."""
