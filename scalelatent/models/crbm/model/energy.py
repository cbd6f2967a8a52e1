r"""Parameters, biases and free energies of conditional RBMs.

.. math::

    p(v, h \mid x) \propto \exp(v^T W h + v^T W_{vx} x + h^T W_{hx} x + b_v^T v + b_h^T h)

where v and h are binary (Ping and Ihler, 2017, equation 3). Given an observed row x, the model is an RBM with
the shared W and the biases :math:`b_1 = b_v + W_{vx} x` and :math:`b_2 = b_h + W_{hx} x`. Without x it is a
plain RBM. All computations are matrix products over numpy or CuPy arrays. One flat vector holds all
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import numpy as np

from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout
from scalelatent.kernels.arrays import Array, HostRows, check_same_width
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.crbm.kernels.cpu.units import log_loss
from scalelatent.models.crbm.kernels.inference import PRODUCT_UNITS, WeightError
from scalelatent.models.crbm.kernels.products import fits_few_rows, write_affine_map

# A batch of CSR rows becomes a dense matrix of the columns that it uses, or of all columns if it uses more
# than this share of them.
DENSE_SHARE = 0.5


@dataclass(frozen=True)
class Params:
    """The five arrays of parameters, as views of the parameter vector on the host or on a device.

    In the shapes below, v, h and x are the numbers of outputs, hidden units and observed columns.
    """

    W: Array  # (v, h): couplings of outputs and hidden units
    Wvx: Array  # (v, x): weights from the observed row to the outputs
    Whx: Array  # (h, x): weights from the observed row to the hidden units
    bv: Array  # (v,): biases of the outputs
    bh: Array  # (h,): biases of the hidden units


@dataclass(frozen=True)
class CrbmShape:
    """Numbers of units, and the layout of the parameter vector."""

    n_visible: int  # number of outputs v
    n_hidden: int  # number of hidden units h; without hidden units the model is logistic regression
    n_observed: int  # number of columns of the observed rows x; without columns the model is a plain RBM

    @cached_property
    def layout(self) -> Layout:
        """Fields of the parameter vector, weights before biases."""
        v, h, x = self.n_visible, self.n_hidden, self.n_observed
        return Layout((("W", (v, h)), ("Wvx", (v, x)), ("Whx", (h, x)), ("bv", (v,)), ("bh", (h,))))

    @property
    def n_parameters(self) -> int:
        return self.layout.size

    @property
    def n_weights(self) -> int:
        """Number of entries of the three matrices, which come before the biases."""
        return self.n_parameters - self.n_visible - self.n_hidden

    def split(self, flat: Array) -> Params:
        """Return the five arrays of parameters as views of the vector ``flat``, of any array library."""
        return Params(
            **{name: flat[place].reshape(shape) for name, (place, shape) in self.layout.slices.items()}
        )

    def start(self, rng: np.random.Generator, scale: float) -> np.ndarray:
        """Return initial parameters in float32: W and Whx Gaussian with deviation ``scale``, the others 0.

        Without random weights all hidden units would stay equal.
        """
        flat = np.zeros(self.n_parameters, dtype=np.float32)
        params = self.split(flat)
        for w in (params.W, params.Whx):
            w[...] = scale * rng.standard_normal(w.shape, dtype=np.float32)
        return flat


@dataclass(frozen=True)
class Observed:
    """Observed rows x on the backend as a dense array: all columns, or only those with a nonzero value."""

    x: Array  # float32 (rows, columns)
    columns: np.ndarray | None  # number of each column of ``x`` in the whole rows; None if ``x`` has all

    def select_columns(self, weights: Array) -> Array:
        """Return the columns of ``weights``, (units, all columns), that belong to the columns of ``x``."""
        # The result of take is C-contiguous; that of weights[:, columns] is not.
        return weights if self.columns is None else weights.take(self.columns, axis=1)

    def write_outer(self, left: Array, out: Array, xp: ModuleType) -> None:
        """Write the product left^T x to ``out``, (units, all columns); columns that ``x`` lacks get 0."""
        if self.columns is None:
            xp.matmul(left.T, self.x, out=out)
        else:
            out[...] = 0
            out[:, self.columns] = left.T @ self.x


def load_observed(x: HostRows, backend: Backend, name: str = "x") -> Observed:
    """Copy the rows x of a block to the buffer ``name`` of the backend, as a dense array."""
    columns = None
    if isinstance(x, CsrRows):
        used, places = np.unique(x.indices, return_inverse=True)
        if len(used) <= DENSE_SHARE * x.shape[1]:
            columns = used
            x = CsrRows(x.data, places.reshape(-1), x.indptr, (len(x), len(used)))
        x = x.to_dense()
    return Observed(backend.asarray(x, np.float32, name), columns)


def compute_biases(
    params: Params, seen: Observed | None, n_rows: int, backend: Backend
) -> tuple[Array, Array]:
    """Return the biases of each row's RBM: b1 (rows, outputs) and b2 (rows, hidden units).

    Both are in buffers of the backend, which the next call overwrites.
    """
    out = []
    for name, weights, bias in (("b1", params.Wvx, params.bv), ("b2", params.Whx, params.bh)):
        b = backend.buffer(name, (n_rows, len(bias)), bias.dtype)
        if seen is None or not seen.x.shape[1]:
            b[...] = bias
        else:
            write_affine_map(seen.x, seen.select_columns(weights), bias, b, backend.xp)
        out.append(b)
    return out[0], out[1]


def sigmoid(logits: Array, xp: ModuleType) -> Array:
    """Return 1 / (1 + exp(-logits)), without overflow."""
    return 0.5 * xp.tanh(0.5 * logits) + 0.5


def compute_hidden_logits(params: Params, v: Array, b2: Array) -> Array:
    """Return the log odds v W + b2 of the hidden units, given outputs v and biases b2 of hidden units."""
    return v @ params.W + b2


def compute_negative_free_energy(v: Array, b1: Array, logits: Array, xp: ModuleType) -> Array:
    """Return minus the free energy of the outputs v of each row, equation 4 of Ping and Ihler (2017).

    ``b1`` are the biases of the outputs, and ``logits`` the log odds of the hidden units given v.
    """
    zero = logits.dtype.type(0)
    return (v * b1).sum(axis=1) + xp.logaddexp(zero, logits).sum(axis=1)


def compute_log_loss(lv: Array, beliefs: Array, v: Array, xp: ModuleType) -> Array:
    """Return the log-loss of the outputs v of each row, in nats; ``beliefs`` is the sigmoid of ``lv``."""
    if fits_few_rows(lv, beliefs, v):
        out = np.empty(len(lv), dtype=np.float32)
        log_loss(lv, beliefs, v, out)
        return out
    out = (xp.maximum(lv, lv.dtype.type(0)) - lv * v).sum(axis=1)
    # An output with log odds l and p = sigmoid(l) adds log(1 + e^l) = max(l, 0) - log max(p, 1 - p) to the
    # loss. One log serves PRODUCT_UNITS outputs: max(p, 1 - p) is at least 0.5, so the product is not 0.
    likelier = xp.maximum(beliefs, 1 - beliefs)
    for first in range(0, lv.shape[1], PRODUCT_UNITS):
        out -= xp.log(likelier[:, first : first + PRODUCT_UNITS].prod(axis=1, dtype=np.float64))
    return out


def compute_block_biases(
    shape: CrbmShape, params: Params, block: Block, backend: Backend
) -> tuple[Observed | None, Array, Array]:
    """Return the rows x of a block on the backend, and the biases b1 of outputs and b2 of hidden units.

    The rows are None for a plain RBM. Raise ValueError if a value of x is not finite or too large, and
    `WeightError` if a bias is not finite.
    """
    if not shape.n_observed:
        n_rows = len(block.x if block.y is None else block.y)
        return (None, *compute_biases(params, None, n_rows, backend))
    check_same_width(block.x.shape[1], shape.n_observed)
    # An overflow needs no warning here, because `find_too_large` reports the row and the feature.
    with np.errstate(over="ignore"):
        seen = load_observed(block.x, backend)
    if place := find_too_large(block):
        raise ValueError(place)
    with np.errstate(invalid="ignore", over="ignore"):
        b1, b2 = compute_biases(params, seen, len(seen.x), backend)
        total = float(b1.sum() + b2.sum())  # copy one number, because the host waits for the copy
    if not np.isfinite(total):
        if place := find_nonfinite(block):
            raise ValueError(place)
        _check_products(block, backend.to_host(b1), backend.to_host(b2))
    return seen, b1, b2


class ChainInputs(NamedTuple):
    """Observed rows of several chains (parts of a batch) on the backend, and the biases of their RBMs."""

    seen: Sequence[Observed | None]  # The rows x of each chain; None for a plain RBM, which has no x
    x: Array | None  # The rows x of all chains; None for a plain RBM, or if the rows are sparse
    b1: Array  # (rows of all chains, outputs): biases of the outputs
    b2: Array  # (rows of all chains, hidden units): biases of the hidden units

    def sum_biases(self) -> Array:
        """Return the sum of all biases, on the backend; it is not finite if a bias is not finite."""
        with np.errstate(invalid="ignore", over="ignore"):
            return self.b1.sum() + self.b2.sum()


def compute_chain_inputs(
    shape: CrbmShape, params: Params, blocks: Sequence[Block], backend: Backend
) -> ChainInputs:
    """Copy the rows x of several blocks to the backend, and compute biases; `are_usable` checks both."""
    starts = np.cumsum([0, *(len(block.x) for block in blocks)])
    b1, b2 = (
        backend.buffer(name, (int(starts[-1]), n), np.float32)
        for name, n in (("b1", shape.n_visible), ("b2", shape.n_hidden))
    )
    if not shape.n_observed:
        b1[...], b2[...] = params.bv, params.bh
        return ChainInputs([None] * len(blocks), None, b1, b2)
    for block in blocks:
        check_same_width(block.x.shape[1], shape.n_observed)
    x: Array | None = None
    if all(isinstance(block.x, np.ndarray) for block in blocks):
        x = backend.asarray(np.concatenate([block.x for block in blocks]), np.float32, "x")
        seen = [Observed(x[a:b], None) for a, b in pairwise(starts)]
    else:
        seen = [
            load_observed(block.x, backend, f"x of block {number}") for number, block in enumerate(blocks)
        ]
    with np.errstate(invalid="ignore", over="ignore"):
        for observed, (a, b) in zip(seen, pairwise(starts), strict=True):
            for out, weights, bias in ((b1, params.Wvx, params.bv), (b2, params.Whx, params.bh)):
                own = observed.select_columns(weights)
                write_affine_map(observed.x, own, bias, out[a:b], backend.xp)
    return ChainInputs(seen, x, b1, b2)


def are_usable(blocks: Sequence[Block], bias_sum: float) -> bool:
    """Return whether the values of the blocks are finite and not too large, and ``bias_sum`` is finite."""
    return bool(np.isfinite(bias_sum)) and not any(find_too_large(block) for block in blocks)


def _check_products(block: Block, *biases: np.ndarray) -> None:
    """Raise `WeightError` if ``biases`` of a row are not finite; the message names the first such row."""
    bad = ~np.all([np.isfinite(b).all(axis=1) for b in biases], axis=0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        x = block.x.to_dense() if isinstance(block.x, CsrRows) else block.x
        raise WeightError(
            f"the products of row {block.row_number(row)} with the parameters are beyond float32 (its "
            f"largest number is {np.abs(x[row]).max():.3g}: scale X)"
        )
