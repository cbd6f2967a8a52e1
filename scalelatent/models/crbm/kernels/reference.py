"""Inference in RBMs in numpy and float64, one graph at a time; tests compare numba and CuPy kernels with it.

Messages are log odds, m = log r. A sweep sends all messages of the hidden units, then all messages of the
visible units (Ping and Ihler, 2017, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .inference import Inference, check_graphs, check_pairs

# Function of W, of the senders' log odds without the opposite messages (the cavity), and of all their log
# odds (the belief); it returns the log odds of the messages.
_SendMessages = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class PlainCoupling:
    """Couplings W (v, h) in float64."""

    w: np.ndarray


@dataclass(frozen=True)
class _Graph:
    """A graph after its sweeps; ``to_v`` are the log odds of the messages to the visible units, (v, h)."""

    w: np.ndarray
    to_v: np.ndarray
    lv: np.ndarray
    lh: np.ndarray
    sweeps: int
    change: float


def make_coupling(w: np.ndarray) -> PlainCoupling:
    """Return the couplings W in the form that the kernels take; batches with the same W share the result."""
    return PlainCoupling(np.array(w, dtype=np.float64))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def sum_product(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Approximate the marginals of all units by sum-product belief propagation; exact if the graph is a tree.

    Parameters
    ----------
    coupling : result of ``make_coupling``
    bv, bh : ndarray, shape (rows, v) and (rows, h)
        Biases of each row's graph.
    n_sweeps : int
        Upper bound of the number of sweeps.
    tol : float or None
        A row stops sweeping as soon as no belief has changed by more than ``tol``.

    Returns
    -------
    Inference
    """
    return _collect(_infer_graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, _sum_message), coupling)


def sum_product_pairs(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    pairs: np.ndarray,
) -> Inference:  # fmt: skip
    """Run :func:`sum_product`, add the pair beliefs of all rows to ``pairs``, (v, h), and estimate log Z.

    A row that has met ``tol`` takes one more sweep, which computes its pair beliefs.
    """
    check_pairs(pairs.shape, coupling.w.shape)
    graphs = _infer_graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, _sum_message, one_more=True)
    for graph in graphs:
        # The pair belief is P(v_i = 1 | h_j = 1) P(h_j = 1).
        pairs += sigmoid(graph.w + graph.lv[:, None] - graph.to_v) * sigmoid(graph.lh)
    return _collect(
        graphs, coupling, np.array([_estimate_log_z(graph) for graph in graphs], dtype=np.float64)
    )


def mixed_product(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Find the most probable visible state, ``lv > 0``, with the hidden units summed out (marginal MAP).

    Mixed-product belief propagation of Liu and Ihler (2013). Parameters as in :func:`sum_product`.
    """

    def decide(w: np.ndarray, cavity: np.ndarray, belief: np.ndarray) -> np.ndarray:
        return w * (belief > 0)

    return _collect(_infer_graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, decide), coupling)


def max_product(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Find the most probable joint state of all units, ``lv > 0`` and ``lh > 0``, by max-product.

    The log odds are those of max-marginals. Parameters as in :func:`sum_product`.
    """
    return _collect(_infer_graphs(coupling, bv, bh, n_sweeps, tol, _max_message, _max_message), coupling)


def mean_field(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Approximate the marginals of all units by mean field; the first sweep starts from sigmoid(bh).

    Parameters as in :func:`sum_product`.
    """
    check_graphs(coupling.w.shape, bv.shape, bh.shape, n_sweeps, tol)
    w, graphs = coupling.w, []
    for first, second in zip(bv.astype(np.float64), bh.astype(np.float64), strict=True):
        lv, lh = first, second
        for sweep in range(1, n_sweeps + 1):  # noqa: B007  it is returned
            old = np.concatenate([lv, lh])
            lv = first + w @ sigmoid(lh)
            lh = second + w.T @ sigmoid(lv)
            change = _largest_change(old, lv, lh)
            if tol is not None and change <= tol:
                break
        graphs.append(_Graph(w, w, lv, lh, sweep, change))
    return _collect(graphs, coupling)


# -- one graph --------------------------------------------------------------------------------------------


def _sum_message(w: np.ndarray, cavity: np.ndarray, belief: np.ndarray) -> np.ndarray:
    return np.logaddexp(w + cavity, 0.0) - np.logaddexp(cavity, 0.0)


def _max_message(w: np.ndarray, cavity: np.ndarray, belief: np.ndarray) -> np.ndarray:
    return np.maximum(w + cavity, 0.0) - np.maximum(cavity, 0.0)


def _largest_change(old: np.ndarray, lv: np.ndarray, lh: np.ndarray) -> float:
    return float(np.abs(sigmoid(np.concatenate([lv, lh])) - sigmoid(old)).max(initial=0.0))


def _infer_graphs(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    from_hidden: _SendMessages, from_visible: _SendMessages, one_more: bool = False,
) -> list[_Graph]:  # fmt: skip
    check_graphs(coupling.w.shape, bv.shape, bh.shape, n_sweeps, tol)
    biases = zip(np.asarray(bv, dtype=np.float64), np.asarray(bh, dtype=np.float64), strict=True)
    return [
        _propagate(coupling.w, *both, n_sweeps, tol, from_hidden, from_visible, one_more) for both in biases
    ]


def _propagate(
    w: np.ndarray, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    from_hidden: _SendMessages, from_visible: _SendMessages, one_more: bool,
) -> _Graph:  # fmt: skip
    to_h, lv, lh, met = np.zeros_like(w), bv, bh, False
    for sweep in range(1, n_sweeps + 1):  # noqa: B007  it is returned
        old = np.concatenate([lv, lh])
        to_v = from_hidden(w, lh - to_h, lh)
        lv = bv + to_v.sum(axis=1)
        to_h = from_visible(w, lv[:, None] - to_v, lv[:, None])
        lh = bh + to_h.sum(axis=0)
        if met:
            break
        change = _largest_change(old, lv, lh)
        met = tol is not None and change <= tol
        if met and not one_more:
            break
    return _Graph(w, to_v, lv, lh, sweep, change)


def _estimate_log_z(graph: _Graph) -> float:
    """Return the Bethe estimate: log Z = sum_i log Z_i + sum_j log Z_j + sum_ij log (Z_ij / (Z_i Z_j)).

    The estimate is a stationary value of the Bethe free energy if the messages are a fixed point (Yedidia et
    al., 2005), and exact on a tree. With the cavity's log odds c of the message to j, Z_ij = (1 + e^c) Z_j.
    """
    zv, zh = np.logaddexp(0.0, graph.lv), np.logaddexp(0.0, graph.lh)
    pairs = np.logaddexp(0.0, graph.lv[:, None] - graph.to_v) - zv[:, None]
    return float(zv.sum() + zh.sum() + pairs.sum())


def _collect(graphs: list[_Graph], coupling: PlainCoupling, log_z: np.ndarray | None = None) -> Inference:
    rows, (v, h) = len(graphs), coupling.w.shape
    return Inference(
        np.array([g.lv for g in graphs]).reshape(rows, v),
        np.array([g.lh for g in graphs]).reshape(rows, h),
        np.array([g.sweeps for g in graphs], dtype=np.int64),
        np.array([g.change for g in graphs], dtype=np.float64),
        log_z,
    )
