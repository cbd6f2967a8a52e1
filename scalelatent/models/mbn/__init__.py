"""Multilayer bootstrap networks (Zhang, 2018): layers of random clusterings whose outputs are integer codes.

So far the kernels of a clustering: :mod:`.reference`, and numba bodies in :mod:`.cpu`. They enter the
engine's backend table together with their bodies for GPUs.
"""
