r"""Conditional RBMs: parameters, what an observed row does to the biases, and free energies.

.. math::

    p(v, h \mid x) \propto \exp(v^T W h + v^T W_{vx} x + h^T W_{hx} x + b_v^T v + b_h^T h)

with v and h binary (Ping and Ihler, 2017, equation 3). An observed row x makes an RBM of its own, with the
shared W and the biases :math:`b_1 = b_v + W_{vx} x` and :math:`b_2 = b_h + W_{hx} x`. Without x it is a plain
RBM. All of it is matrix products over numpy or CuPy arrays; the parameters lie in one flat vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np

from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout
from scalelatent.kernels.arrays import Array, HostRows, check_same_width
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.crbm.kernels.cpu.units import log_loss
from scalelatent.models.crbm.kernels.inference import PRODUCT_UNITS, WeightError
from scalelatent.models.crbm.kernels.products import affine, few

# CSR rows are made dense over the columns that a batch uses, unless it uses more than this share of them.
DENSE_SHARE = 0.5


@dataclass(frozen=True)
class Params:
    """Parameters as views of one vector, on the host or on a device."""

    # (v, h)
    W: Array
    # (v, x)
    Wvx: Array
    # (h, x)
    Whx: Array
    # (v,)
    bv: Array
    # (h,)
    bh: Array


@dataclass(frozen=True)
class CrbmShape:
    """Numbers of units, and how the parameters lie in one vector."""

    # n_visible, n_hidden, n_observed: Units of v, of h (0: logistic regression) and of x (0: a plain RBM)
    n_visible: int
    n_hidden: int
    n_observed: int

    @cached_property
    def layout(self) -> Layout:
        """Fields of the vector: weights first."""
        v, h, x = self.n_visible, self.n_hidden, self.n_observed
        return Layout((("W", (v, h)), ("Wvx", (v, x)), ("Whx", (h, x)), ("bv", (v,)), ("bh", (h,))))

    @property
    def n_parameters(self) -> int:
        return self.layout.size

    @property
    def n_weights(self) -> int:
        """Numbers of the three matrices, which lie before the biases."""
        return self.n_parameters - self.n_visible - self.n_hidden

    def split(self, flat: Array) -> Params:
        """Views of a vector of any array library."""
        return Params(
            **{name: flat[place].reshape(shape) for name, (place, shape) in self.layout.slices.items()}
        )

    def start(self, rng: np.random.Generator, scale: float) -> np.ndarray:
        """First parameters, float32: W and Whx Gaussian (hidden units must differ), all else 0."""
        flat = np.zeros(self.n_parameters, dtype=np.float32)
        params = self.split(flat)
        for w in (params.W, params.Whx):
            w[...] = scale * rng.standard_normal(w.shape, dtype=np.float32)
        return flat


@dataclass(frozen=True)
class Observed:
    """Rows of x where the products are: all columns, or those that these rows use."""

    # float32 (rows, columns used)
    x: Array
    # ndarray of int or None: which ones; None for all
    columns: np.ndarray | None

    def of(self, weights: Array) -> Array:
        """The columns of a matrix that they meet."""
        # Not weights[:, columns], whose rows would not lie together.
        return weights if self.columns is None else weights.take(self.columns, axis=1)

    def add_outer(self, left: Array, out: Array, xp: ModuleType) -> None:
        """Write left^T x to ``out``, (units, x)."""
        if self.columns is None:
            xp.matmul(left.T, self.x, out=out)
        else:
            out[...] = 0
            out[:, self.columns] = left.T @ self.x


def observe(x: HostRows, backend: Backend) -> Observed:
    """Rows of a block where the products are."""
    columns = None
    if isinstance(x, CsrRows):
        used, places = np.unique(x.indices, return_inverse=True)
        if len(used) <= DENSE_SHARE * x.shape[1]:
            columns = used
            x = CsrRows(x.data, places.reshape(-1), x.indptr, (len(x), len(used)))
        x = x.to_dense()
    return Observed(backend.asarray(x, np.float32, "x"), columns)


def biases(params: Params, seen: Observed | None, n_rows: int, backend: Backend) -> tuple[Array, Array]:
    """b1 (rows, v) and b2 (rows, h) of the RBM of each row, valid until the next call with this backend."""
    out = []
    for name, weights, bias in (("b1", params.Wvx, params.bv), ("b2", params.Whx, params.bh)):
        b = backend.buffer(name, (n_rows, len(bias)), bias.dtype)
        if seen is None or not seen.x.shape[1]:
            b[...] = bias
        else:
            affine(seen.x, seen.of(weights), bias, b, backend.xp)
        out.append(b)
    return out[0], out[1]


def sigmoid(a: Array, xp: ModuleType) -> Array:
    """The logistic function, without overflow."""
    return 0.5 * xp.tanh(0.5 * a) + 0.5


def hidden_logits(params: Params, v: Array, b2: Array) -> Array:
    """W^T v + b2: log odds of each hidden unit given v, (rows, h)."""
    return v @ params.W + b2


def negative_free_energy(v: Array, b1: Array, logits: Array, xp: ModuleType) -> Array:
    """log of the sum over h of exp(-E(v, h)), (rows,): -F of the paper's equation 4."""
    zero = logits.dtype.type(0)
    return (v * b1).sum(axis=1) + xp.logaddexp(zero, logits).sum(axis=1)


def nll_of_units(lv: Array, beliefs: Array, v: Array, xp: ModuleType) -> Array:
    """Log-loss of the visible units' log odds and their sigmoid, summed over units, nats, (rows,)."""
    if few(lv, beliefs, v):
        out = np.empty(len(lv), dtype=np.float32)
        log_loss(lv, beliefs, v, out)
        return out
    out = (xp.maximum(lv, lv.dtype.type(0)) - lv * v).sum(axis=1)
    likelier = xp.maximum(beliefs, 1 - beliefs)  # at least a half: so many of them can be multiplied
    for first in range(0, lv.shape[1], PRODUCT_UNITS):
        out -= xp.log(likelier[:, first : first + PRODUCT_UNITS].prod(axis=1, dtype=np.float64))
    return out


def block_biases(
    shape: CrbmShape, params: Params, block: Block, backend: Backend
) -> tuple[Observed | None, Array, Array]:
    """(:func:`observe`, b1, b2) of a block."""
    if not shape.n_observed:
        n_rows = len(block.x if block.y is None else block.y)
        return (None, *biases(params, None, n_rows, backend))
    check_same_width(block.x.shape[1], shape.n_observed)
    with np.errstate(over="ignore"):  # told below, by row and feature
        seen = observe(block.x, backend)
    if place := find_too_large(block):
        raise ValueError(place)
    with np.errstate(invalid="ignore", over="ignore"):
        b1, b2 = biases(params, seen, len(seen.x), backend)
        total = float(b1.sum() + b2.sum())  # asked once: a device has to wait for the answer
    if not np.isfinite(total):
        if place := find_nonfinite(block):
            raise ValueError(place)
        _check_products(block, backend.to_host(b1), backend.to_host(b2))
    return seen, b1, b2


def _check_products(block: Block, *biases: np.ndarray) -> None:
    """Refuse biases that are not finite, of rows that are."""
    bad = ~np.all([np.isfinite(b).all(axis=1) for b in biases], axis=0)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        x = block.x.to_dense() if isinstance(block.x, CsrRows) else block.x
        raise WeightError(
            f"the products of row {block.row_number(row)} with the parameters are beyond float32 (its "
            f"largest number is {np.abs(x[row]).max():.3g}: scale X)"
        )
