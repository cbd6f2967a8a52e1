"""Inference in RBMs in numpy and float64, one graph at a time; tests compare numba and CuPy kernels with it.

A message is a log odds that one unit sends to another along an edge. A sweep sends all messages of the hidden
units, then all messages of the visible units (Ping and Ihler, 2017, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .inference import Inference, check_graphs, check_pairs

# Function that computes messages from W, from the cavities (log odds of the senders minus the messages that
# they received along the same edges), and from the log odds of the senders.
_SendMessages = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class PlainCoupling:
    """Couplings W (v, h) in float64."""

    w: np.ndarray


@dataclass(frozen=True)
class _Graph:
    """A graph after its sweeps (rounds of messages); ``to_v`` are the messages to the visible units."""

    w: np.ndarray
    to_v: np.ndarray
    lv: np.ndarray
    lh: np.ndarray
    sweeps: int
    change: float


def make_coupling(w: np.ndarray) -> PlainCoupling:
    """Return the couplings W in the form that the kernels of this module read."""
    return PlainCoupling(np.array(w, dtype=np.float64))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def sum_product(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Approximate P(unit = 1) of all units by sum-product belief propagation; exact if the graph is a tree.

    Parameters
    ----------
    coupling : result of ``make_coupling``
    bv, bh : ndarray, shape (rows, v) and (rows, h)
        Biases of each row's graph.
    n_sweeps : int
        Upper bound of the number of sweeps (rounds of messages over all edges).
    tol : float or None
        The inference of a row stops after a sweep in which no P(unit = 1) changed by more than ``tol``.

    Returns
    -------
    Inference
    """
    return _collect(_infer_graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, _sum_message), coupling)


def sum_product_pairs(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    pairs: np.ndarray,
) -> Inference:  # fmt: skip
    """Run sum-product, add P(v_i = 1, h_j = 1) of all rows to ``pairs``, and estimate log Z of each row.

    A row that has met ``tol`` makes one more sweep, as in the kernels that compute pairs in the last sweep.
    """
    check_pairs(pairs.shape, coupling.w.shape)
    graphs = _infer_graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, _sum_message, one_more=True)
    for graph in graphs:
        # P(v_i = 1, h_j = 1) is P(v_i = 1 | h_j = 1) P(h_j = 1).
        pairs += sigmoid(graph.w + graph.lv[:, None] - graph.to_v) * sigmoid(graph.lh)
    return _collect(
        graphs, coupling, np.array([_estimate_log_z(graph) for graph in graphs], dtype=np.float64)
    )


def mixed_product(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Find the most probable state of the visible units alone (marginal MAP); a unit is 1 if ``lv`` > 0.

    Mixed-product belief propagation of Liu and Ihler (2013). Parameters as in :func:`sum_product`.
    """

    def send_decision(w: np.ndarray, cavity: np.ndarray, log_odds: np.ndarray) -> np.ndarray:
        return w * (log_odds > 0)

    return _collect(_infer_graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, send_decision), coupling)


def max_product(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Find the most probable joint state of all units by max-product; a unit is 1 if its log odds are > 0.

    Parameters as in :func:`sum_product`.
    """
    return _collect(_infer_graphs(coupling, bv, bh, n_sweeps, tol, _max_message, _max_message), coupling)


def mean_field(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Approximate P(unit = 1) of all units by mean field; hidden units start from sigmoid(``bh``).

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


def _sum_message(w: np.ndarray, cavity: np.ndarray, log_odds: np.ndarray) -> np.ndarray:
    return np.logaddexp(w + cavity, 0.0) - np.logaddexp(cavity, 0.0)


def _max_message(w: np.ndarray, cavity: np.ndarray, log_odds: np.ndarray) -> np.ndarray:
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

    Z_i is 1 + exp(log odds of i), and Z_ij is (1 + exp(c)) Z_j, where c is the log odds of i minus the
    message from j. The estimate is exact on a tree. It is a stationary value of the Bethe free energy if
    another sweep would not change the messages (Yedidia et al., 2005).
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
