"""Inference in RBMs in plain numpy and float64, one graph after the other: the oracle.

Messages are log odds, m = log r. A sweep sends all messages of the hidden units, then all of the visible
ones, so that it is sequential although each half is parallel (Ping and Ihler, 2017, algorithm 1). Damping
mixes the log odds of the messages to the hidden units with those of the sweep before: all messages follow
from these, so it is the damping of the whole sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .inference import Inference, check_graphs

_Send = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class PlainCoupling:
    """W (v, h) in float64."""

    w: np.ndarray


@dataclass(frozen=True)
class _Graph:
    """A graph after its sweeps: messages to the visible units, (v, h), as log odds."""

    w: np.ndarray
    to_v: np.ndarray
    lv: np.ndarray
    lh: np.ndarray
    sweeps: int
    change: float


def make_coupling(w: np.ndarray) -> PlainCoupling:
    """What every inference needs of the couplings; made once and used for many batches."""
    return PlainCoupling(np.array(w, dtype=np.float64))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def sum_product(
    coupling: PlainCoupling,
    bv: np.ndarray,
    bh: np.ndarray,
    n_sweeps: int,
    tol: float | None = None,
    damping: float = 1.0,
) -> Inference:
    """Sum-product belief propagation: approximate marginals of all units, exact where the graph is a tree."""
    graphs = _graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, _sum_message, damping=damping)
    return _collect(graphs, coupling)


def sum_product_pairs(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    pairs: np.ndarray, damping: float = 1.0,
) -> Inference:  # fmt: skip
    """:func:`sum_product` that adds up the pairwise beliefs as well."""
    graphs = _graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, _sum_message, True, damping)
    for graph in graphs:
        pairs += _pair_beliefs(graph)
    return _collect(graphs, coupling, np.array([_bethe(graph) for graph in graphs], dtype=np.float64))


def pairwise(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> np.ndarray:
    """Pairwise beliefs P(v_i = 1, h_j = 1) of each row, (rows, v, h): for tests and small graphs."""
    graphs = _graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, _sum_message, one_more=True)
    return np.array([_pair_beliefs(graph) for graph in graphs]).reshape(len(bv), *coupling.w.shape)


def bethe(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> np.ndarray:
    """Bethe estimate of log Z of each row from its last messages, (rows,); exact on trees."""
    graphs = _graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, _sum_message, one_more=True)
    return np.array([_bethe(graph) for graph in graphs], dtype=np.float64)


def mixed_product(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Mixed-product belief propagation: the visible units that are likeliest when the hidden ones are summed
    out (marginal MAP), ``lv > 0`` (Liu and Ihler, 2013). See :func:`sum_product`.
    """

    def decide(w: np.ndarray, cavity: np.ndarray, belief: np.ndarray) -> np.ndarray:
        return w * (belief > 0)

    return _collect(_graphs(coupling, bv, bh, n_sweeps, tol, _sum_message, decide), coupling)


def max_product(
    coupling: PlainCoupling,
    bv: np.ndarray,
    bh: np.ndarray,
    n_sweeps: int,
    tol: float | None = None,
    damping: float = 1.0,
) -> Inference:
    """Max-product belief propagation: the likeliest state of all units together is ``lv > 0, lh > 0``. See
    :func:`sum_product`; log odds are those of max-marginals.
    """
    graphs = _graphs(coupling, bv, bh, n_sweeps, tol, _max_message, _max_message, damping=damping)
    return _collect(graphs, coupling)


def mean_field(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Mean field: beliefs of the hidden units give those of the visible ones, and back. See
    :func:`sum_product`; the first sweep starts from sigmoid(bh).
    """
    check_graphs(coupling.w.shape, bv.shape, bh.shape, n_sweeps, tol)
    w, graphs = coupling.w, []
    for first, second in zip(bv.astype(np.float64), bh.astype(np.float64), strict=True):
        lv, lh = first, second
        for sweep in range(1, n_sweeps + 1):  # noqa: B007  it is returned
            old = np.concatenate([lv, lh])
            lv = first + w @ sigmoid(lh)
            lh = second + w.T @ sigmoid(lv)
            change = _change(old, lv, lh)
            if tol is not None and change <= tol:
                break
        graphs.append(_Graph(w, w, lv, lh, sweep, change))
    return _collect(graphs, coupling)


def matrix_form(
    w: np.ndarray, bv: np.ndarray, bh: np.ndarray, n_sweeps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sum-product of one graph by the paper's matrices of probabilities (equations 13, 14, 16 and 17), in the
    precision of ``w``: what benchmarks compare with. Good up to |W| = 10.
    """

    def sigma(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    a = np.exp(w)
    to_h, tau_h = np.full_like(w, 0.5), sigma(bh)
    for _ in range(n_sweeps):
        one, two = (1 - to_h) * tau_h, to_h * (1 - tau_h)
        to_v = sigma(np.log((a * one + two) / (one + two)))
        tau_v = sigma(bv + np.log(to_v / (1 - to_v)).sum(axis=1))
        one, two = (1 - to_v) * tau_v[:, None], to_v * (1 - tau_v)[:, None]
        to_h = sigma(np.log((a * one + two) / (one + two)))
        tau_h = sigma(bh + np.log(to_h / (1 - to_h)).sum(axis=0))
    return tau_v, tau_h


# -- one graph --------------------------------------------------------------------------------------------


def _sum_message(w: np.ndarray, cavity: np.ndarray, belief: np.ndarray) -> np.ndarray:
    return np.logaddexp(w + cavity, 0.0) - np.logaddexp(cavity, 0.0)


def _max_message(w: np.ndarray, cavity: np.ndarray, belief: np.ndarray) -> np.ndarray:
    return np.maximum(w + cavity, 0.0) - np.maximum(cavity, 0.0)


def _change(old: np.ndarray, lv: np.ndarray, lh: np.ndarray) -> float:
    return float(np.abs(sigmoid(np.concatenate([lv, lh])) - sigmoid(old)).max(initial=0.0))


def _graphs(
    coupling: PlainCoupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    from_hidden: _Send, from_visible: _Send, one_more: bool = False, damping: float = 1.0,
) -> list[_Graph]:  # fmt: skip
    check_graphs(coupling.w.shape, bv.shape, bh.shape, n_sweeps, tol, damping)
    first, second = (np.asarray(b, dtype=np.float64) for b in (bv, bh))
    return [
        _propagate(
            coupling.w, first[n], second[n], n_sweeps, tol, from_hidden, from_visible, one_more, damping
        )
        for n in range(len(first))
    ]


def _propagate(
    w: np.ndarray, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None, from_hidden: _Send,
    from_visible: _Send, one_more: bool, damping: float,
) -> _Graph:  # fmt: skip
    to_h, lv, lh, met = np.zeros_like(w), bv, bh, False
    for sweep in range(1, n_sweeps + 1):  # noqa: B007  it is returned
        old = np.concatenate([lv, lh])
        to_v = from_hidden(w, lh - to_h, lh)
        lv = bv + to_v.sum(axis=1)
        to_h = (1 - damping) * to_h + damping * from_visible(w, lv[:, None] - to_v, lv[:, None])
        lh = bh + to_h.sum(axis=0)
        if met:
            break
        change = _change(old, lv, lh) / damping
        met = tol is not None and change <= tol
        if met and not one_more:
            break
    return _Graph(w, to_v, lv, lh, sweep, change)


def _pair_beliefs(graph: _Graph) -> np.ndarray:
    """P(v_i = 1 | h_j = 1) P(h_j = 1): (v, h)."""
    return sigmoid(graph.w + graph.lv[:, None] - graph.to_v) * sigmoid(graph.lh)


def _bethe(graph: _Graph) -> float:
    """log Z = sum_i log Z_i + sum_j log Z_j + sum_ij log (Z_ij / (Z_i Z_j)): a stationary value of the Bethe
    free energy where the messages are a fixed point, whatever their scale (Yedidia et al., 2005). With the
    cavity's log odds c of the message to j, Z_ij = (1 + e^c) Z_j.
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
