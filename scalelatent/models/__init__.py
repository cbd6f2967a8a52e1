"""The models: one folder each, with everything that is its own.

``model/`` is the mathematics (no Dask, no zarr, no files), ``kernels/`` its bodies (`reference`, the oracle;
numba; CuPy), the files beside them are the shell. The contract that the engine runs is in
:mod:`scalelatent.contract.learners`.
"""
