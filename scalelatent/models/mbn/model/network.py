"""Maps from rows to codes (numbers of nearest centroids) of a layer, and to the output of a network."""

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
    """A :class:`~scalelatent.contract.learners.RowMap` from rows to numbers of their nearest centroids."""

    layer: Layer
    centroids: CentroidSets
    first: int  # number of the first clustering of the layer that is computed
    stop: int  # number of the last clustering that is computed, plus 1

    last = None

    def stages(self) -> tuple[LayerCoder]:
        return (self,)

    @property
    def requirements(self) -> BlockRequirements:
        """Format in which rows are read, CSR or dense: the format of the layer's centroids."""
        return self.layer.requirements

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.stop - self.first,), self.layer.code_dtype

    def select_columns(self, first: int, stop: int) -> LayerCoder:
        return replace(self, first=self.first + first, stop=self.first + stop)

    def row_bytes(self) -> int:
        """Return the bytes of the result for one row and one clustering."""
        return np.dtype(self.layer.code_dtype).itemsize

    def flops_per_row(self) -> float:
        """Return the time to assign one row to a centroid of one clustering, in floating point operations."""
        return self.layer.flops_per_row()

    @property
    def column_group(self) -> int:
        """Number of clusterings that share one draw of rows and columns; one task computes all of them."""
        return self.layer.share

    def column_flops(self) -> float:
        """Return the time to prepare the centroids of one clustering, in floating point operations."""
        return self.layer.preparation_flops()

    def prepare(self, backend: Backend) -> Backend:
        """Return the backend; :meth:`fill` prepares the centroids, so that few are in memory at a time."""
        return backend

    def fill(self, prepared: Backend, block: Block, out: np.ndarray) -> Iterator[None]:
        """Write the numbers of the nearest centroids of the block's rows to ``out``, (rows, clusterings).

        Yield after some clusterings, so that the caller can stop.
        """
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
        """Return the numbers of the nearest centroids of the block's rows, (rows, clusterings)."""
        out = np.empty((len(block.x), self.stop - self.first), dtype=self.layer.code_dtype)
        for _ in self.fill(prepared, block, out):
            pass
        return out


def convert_rows(layer: Layer, backend: Backend, x: HostRows) -> Array | CsrRows:
    """Return rows in the types that the kernels of a layer accept, on the device of the backend."""
    check_same_width(x.shape[1], layer.width)
    on_host = backend.xp is np
    if layer.csr:
        x = x if isinstance(x, CsrRows) else _convert_to_csr(x)
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
        return x if on_host else _copy_to_device(backend, x, np.int32)
    return _copy_to_device(backend, x, np.uint8 if x.dtype == np.uint8 else np.float32)


def _copy_to_device(backend: Backend, x: np.ndarray, dtype: npt.DTypeLike) -> Array:
    """Copy rows to the device and convert them to ``dtype`` there; their own type often has fewer bytes."""
    return backend.asarray(backend.asarray(x, x.dtype), dtype)


def _convert_to_csr(x: np.ndarray) -> CsrRows:
    """Convert dense rows to CSR, because the kernels of a layer with CSR centroids accept only CSR rows."""
    row, column = np.nonzero(x)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(x)), dtype=np.int64)])
    return CsrRows(x[row, column], column, pointers, (len(x), x.shape[1]))


class PreparedNetwork(NamedTuple):
    """The functions that the layers and the projection of a network need on one device."""

    backend: Backend
    gather: GatherSum | None  # kernel that computes components of the output; None without a projection


@dataclass(frozen=True)
class Network:
    """Map rows to the codes of the last layer (numbers of nearest centroids), or to components of the codes.

    ``projection`` computes the components; without it, the codes are the output.
    """

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
        """Format in which rows are read, CSR or dense: the format of the first layer's centroids."""
        return self.layers[0].requirements

    def output(self) -> tuple[tuple[int, ...], str]:
        if self.projection is not None:
            return self.projection.output()
        return (self.layers[-1].n_clusterings,), self.layers[-1].code_dtype

    def row_bytes(self) -> int:
        """Return the bytes of the input and output of one row in the largest layer, to estimate memory."""
        return 2 * max(layer.n_clusterings * np.dtype(layer.code_dtype).itemsize for layer in self.layers)

    def flops_per_row(self) -> float:
        return sum(layer.n_clusterings * layer.flops_per_row() for layer in self.layers)

    def prepare(self, backend: Backend) -> PreparedNetwork:
        return PreparedNetwork(backend, None if self.projection is None else self.projection.prepare(backend))

    def fill(self, prepared: PreparedNetwork, block: Block, out: np.ndarray) -> Iterator[None]:
        """Write the output of the block's rows to ``out``; yield often, so that the caller can stop."""
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
