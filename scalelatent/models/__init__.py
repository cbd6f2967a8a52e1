"""The mathematics: one folder per model, no Dask, no zarr, no files.

Every folder has the same files: ``model.py`` (parameters, statistics, E- and M-step), ``reference.py``
(kernels in plain numpy, the oracle), ``cpu.py`` (numba) and ``gpu.py`` (CuPy). The contract that the engine
runs is in :mod:`.base`.
"""
