"""Bodies of the inference kernels in numba: messages as odds, in float32.

With A = exp(W), r = m(1)/m(0) and the sender's belief t = sigmoid(l), u = sigmoid(-l), a message is
r_new = (A t + r u) / (t + r u), r the opposite message on the same edge: no log or exp per edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalelatent._numba import kernel

from . import reference
from .inference import Inference, check_graphs, check_weights


@dataclass(frozen=True)
class Coupling:
    """W and A = exp(W), float32, both (v, h)."""

    w: np.ndarray
    a: np.ndarray


def make_coupling(w):
    """See :func:`.reference.make_coupling`."""
    check_weights(float(np.abs(w).max(initial=0.0)))
    w = np.array(w, dtype=np.float32)
    return Coupling(w, np.exp(w))


def sum_product(coupling, bv, bh, n_sweeps, tol=None):
    """See :func:`.reference.sum_product`."""
    return _run(coupling, bv, bh, n_sweeps, tol, None)


def sum_product_pairs(coupling, bv, bh, n_sweeps, tol, pairs):
    """See :func:`.reference.sum_product_pairs`."""
    return _run(coupling, bv, bh, n_sweeps, tol, pairs)


def bethe(coupling, bv, bh, n_sweeps, tol=None):
    """See :func:`.reference.bethe`."""
    return _run(coupling, bv, bh, n_sweeps, tol, np.zeros(coupling.w.shape)).log_z


def _run(coupling, bv, bh, n_sweeps, tol, pairs):
    check_graphs(coupling.w.shape, bv.shape, bh.shape, n_sweeps, tol)
    bv, bh = (np.ascontiguousarray(b, dtype=np.float32) for b in (bv, bh))
    rows = len(bv)
    lv, lh, change, log_z = bv.copy(), bh.copy(), np.zeros(rows, np.float32), np.zeros(rows)
    sweeps = np.zeros(rows, np.int64)
    with_pairs = pairs is not None
    _sweep_all(
        coupling.a,
        bv,
        bh,
        n_sweeps,
        -1.0 if tol is None else tol,
        lv,
        lh,
        sweeps,
        change,
        log_z,
        pairs if with_pairs else np.zeros((0, 0)),
        with_pairs,
    )
    return Inference(lv, lh, sweeps, change, log_z if with_pairs else None)


def _f32(run):
    def call(coupling, bv, bh, n_sweeps, tol=None):
        found = run(reference.make_coupling(coupling.w), bv, bh, n_sweeps, tol)
        return Inference(
            *(np.asarray(a, np.float32) for a in (found.lv, found.lh)), found.sweeps, found.change
        )

    return call


mixed_product, max_product, mean_field = (
    _f32(run) for run in (reference.mixed_product, reference.max_product, reference.mean_field)
)


@kernel
def _sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


@kernel
def _sweep_all(a, bv, bh, n_sweeps, tol, lv, lh, sweeps, change, log_z, pairs, with_pairs):
    v, h = a.shape
    r, s = np.empty((v, h), np.float32), np.empty((v, h), np.float32)
    for n in range(len(bv)):
        r[:] = 1.0
        for sweep in range(n_sweeps):
            moved = 0.0
            for i in range(v):
                total, product = np.float64(bv[n, i]), 1.0
                for j in range(h):
                    t, u = _sigmoid(np.float64(lh[n, j])), _sigmoid(-np.float64(lh[n, j]))
                    s[i, j] = (a[i, j] * t + r[i, j] * u) / (t + r[i, j] * u)
                    product *= s[i, j]
                    if j % 8 == 7:
                        total, product = total + math.log(product), 1.0
                total += math.log(product)
                moved = max(moved, abs(_sigmoid(total) - _sigmoid(np.float64(lv[n, i]))))
                lv[n, i] = total
                t, u = _sigmoid(total), _sigmoid(-total)
                for j in range(h):
                    r[i, j] = (a[i, j] * t + s[i, j] * u) / (t + s[i, j] * u)
            for j in range(h):
                total = np.float64(bh[n, j])
                for i in range(v):
                    total += math.log(r[i, j])
                moved = max(moved, abs(_sigmoid(total) - _sigmoid(np.float64(lh[n, j]))))
                lh[n, j] = total
            sweeps[n], change[n] = sweep + 1, moved
            if moved <= tol:
                break
        if with_pairs:
            total = 0.0
            for i in range(v):
                total += np.logaddexp(0.0, lv[n, i])
                for j in range(h):
                    cv, ch = math.exp(lv[n, i]) / s[i, j], math.exp(lh[n, j]) / r[i, j]
                    z = 1 + cv + ch + a[i, j] * cv * ch
                    pairs[i, j] += a[i, j] * cv * ch / z
                    total += math.log(z) - np.logaddexp(0.0, lv[n, i]) - np.logaddexp(0.0, lh[n, j])
            for j in range(h):
                total += np.logaddexp(0.0, lh[n, j])
            log_z[n] = total
