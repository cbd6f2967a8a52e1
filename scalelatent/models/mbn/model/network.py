"""Maps from rows to the codes of a layer, and from rows to the output of a network.

The code of a row in a clustering is the number of its nearest centroid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.kernels.arrays import Array, HostRows, check_same_width
from scalelatent.kernels.sparse_rows import CsrRows

from .layers import CentroidSets, CodesBelow, Layer
from .pca import CodeProjection, GatherSum


@dataclass(frozen=True)
class LayerCoder:
    """Map rows to codes of some clusterings of a layer, a :class:`~scalelatent.contract.learners.RowMap`."""

    layer: Layer
    centroids: CentroidSets
    # Range of the clusterings whose codes are computed: first to stop - 1
    first: int
    stop: int

    last = None

    def stages(self) -> tuple[LayerCoder]:
        return (self,)

    @property
    def requirements(self) -> BlockRequirements:
        """Form in which rows are read, CSR or dense: the form that the layer needs."""
        return self.layer.requirements

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.stop - self.first,), self.layer.code_dtype

    def select_columns(self, first: int, stop: int) -> LayerCoder:
        return replace(self, first=self.first + first, stop=self.first + stop)

    def row_bytes(self) -> int:
        """Return the bytes of one code."""
        return np.dtype(self.layer.code_dtype).itemsize

    def flops_per_row(self) -> float:
        """Return the time to compute one code of one row, in floating point operations."""
        return self.layer.flops_per_row()

    @property
    def column_group(self) -> int:
        """Number of clusterings that share a pool (one draw of rows and columns)."""
        return self.layer.share

    def column_flops(self) -> float:
        """Return the time to prepare the centroids of one clustering, in floating point operations."""
        return self.layer.preparation_flops()

    def prepare(self, backend: Backend) -> Backend:
        """Return the backend; :meth:`fill` prepares the centroids of each clustering."""
        return backend

    def fill(self, prepared: Backend, block: Block, out: np.ndarray) -> Iterator[None]:
        """Write the codes of the block to ``out``; yield after each group of clusterings."""
        self.layer.check(block.x, block.start)
        x = convert_rows(self.layer, prepared, block.x)
        centroids, source = self.centroids, self.centroids.source_rows()
        if self.layer.number > 1 and source is not None:
            assert not isinstance(source, CsrRows)
            on_host = prepared.xp is np
            codes = source if on_host else prepared.asarray(source, source.dtype)
            centroids = CodesBelow(self.layer, codes, prepared)
        first, size = self.first, self.layer.group_size
        while first < self.stop:
            stop = min(first - first % self.layer.share + size, self.stop)
            out[:, first - self.first : stop - self.first] = self.layer.compute_codes(
                prepared, x, centroids, first, stop
            )
            yield
            first = stop

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        """Return the codes of the block, (rows, clusterings)."""
        out = np.empty((len(block.x), self.stop - self.first), dtype=self.layer.code_dtype)
        for _ in self.fill(prepared, block, out):
            pass
        return out


def convert_rows(layer: Layer, backend: Backend, x: HostRows) -> Array | CsrRows:
    """Return rows in the types that the kernels of a layer accept, on the device of the backend."""
    check_same_width(x.shape[1], layer.width)
    on_host = backend.xp is np
    if layer.csr:
        x = x if isinstance(x, CsrRows) else _to_csr(x)
        if backend.name == "reference":  # the reference kernel accepts any types
            return x
        return CsrRows(
            backend.asarray(x.data, np.float32),
            backend.asarray(x.indices, np.int32),
            backend.asarray(x.indptr, np.int64 if on_host else np.int32),
            x.shape,
        )
    assert not isinstance(x, CsrRows)
    if layer.number > 1:
        return x if on_host else _move(backend, x, np.int32)
    return _move(backend, x, np.uint8 if x.dtype == np.uint8 else np.float32)


def _move(backend: Backend, x: np.ndarray, dtype: npt.DTypeLike) -> Array:
    """Copy rows to the device in their own type, and convert them there, so that fewer bytes are copied."""
    return backend.asarray(backend.asarray(x, x.dtype), dtype)


def _to_csr(x: np.ndarray) -> CsrRows:
    """Return dense rows as CSR rows, because the centroids of the layer are CSR rows."""
    row, column = np.nonzero(x)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(x)), dtype=np.int64)])
    return CsrRows(x[row, column], column, pointers, (len(x), x.shape[1]))


class PreparedNetwork(NamedTuple):
    """Backend, and the kernel that computes components from codes (None without a projection)."""

    backend: Backend
    gather: GatherSum | None


@dataclass(frozen=True)
class Network:
    """Map rows to the codes of the last layer, or to their principal components with ``projection``."""

    layers: tuple[Layer, ...]
    centroids: tuple[CentroidSets, ...]
    projection: CodeProjection | None = None

    @property
    def last(self) -> CodeProjection | None:
        return self.projection

    def stages(self) -> tuple[LayerCoder, ...]:
        return tuple(
            LayerCoder(layer, centroids, 0, layer.n_clusterings)
            for layer, centroids in zip(self.layers, self.centroids, strict=True)
        )

    @property
    def output_name(self) -> str:
        """Name of the output in task names: "transform" for principal components, else "codes"."""
        return "transform" if self.projection is not None else "codes"

    @property
    def requirements(self) -> BlockRequirements:
        """Form in which rows are read, CSR or dense: the form that the first layer needs."""
        return self.layers[0].requirements

    def output(self) -> tuple[tuple[int, ...], str]:
        if self.projection is not None:
            return self.projection.output()
        return (self.layers[-1].n_clusterings,), self.layers[-1].code_dtype

    def row_bytes(self) -> int:
        """Return the bytes of the codes of one row in two layers, because a layer reads and writes codes."""
        return 2 * max(layer.n_clusterings * np.dtype(layer.code_dtype).itemsize for layer in self.layers)

    def flops_per_row(self) -> float:
        return sum(layer.n_clusterings * layer.flops_per_row() for layer in self.layers)

    def prepare(self, backend: Backend) -> PreparedNetwork:
        return PreparedNetwork(backend, None if self.projection is None else self.projection.prepare(backend))

    def fill(self, prepared: PreparedNetwork, block: Block, out: np.ndarray) -> Iterator[None]:
        """Write the output of the block to ``out``; yield after each group of clusterings."""
        backend, gather = prepared
        for coder in self.stages():
            last = coder.layer is self.layers[-1] and self.projection is None
            codes = out if last else np.empty((len(block.x), coder.stop), dtype=coder.layer.code_dtype)
            yield from coder.fill(backend, block, codes)
            block = Block(codes, None, None, block.start)
        if self.projection is not None:
            assert gather is not None
            out[:] = self.projection.apply(gather, block)

    def apply(self, prepared: PreparedNetwork, block: Block) -> np.ndarray:
        (width,), dtype = self.output()
        out = np.empty((len(block.x), width), dtype=dtype)
        for _ in self.fill(prepared, block, out):
            pass
        return out
