"""Capsule predictions as an ONNX graph: the computation of `CapsuleRows` in ONNX operators."""

from __future__ import annotations

import numpy as np

from scalelatent.estimators.onnx_graph import OnnxGraph
from scalelatent.models.capsule.kernels.squash import squash_table
from scalelatent.models.capsule.model.predict import CapsuleRows


def add_scores(graph: OnnxGraph, rows: CapsuleRows) -> str:
    """Add the class scores to the graph; return the name of the tensor, double (rows, classes).

    Products of rows and weights are float32, and all other numbers are double, as in Python.
    """
    members = rows.members
    m, k, d = members.n_members, members.dims.shape[1], int(members.dims[0].sum())
    z, w, intercept, projection = graph.x, rows.w, rows.frame.intercept, rows.frame.projection
    if intercept is not None:
        z, w = graph.node("Sub", z, graph.constant(intercept.mean)), rows.w[:, :-1]
    if projection is not None:
        z = graph.node("MatMul", z, graph.constant(projection.astype(np.float32)))
    h = graph.node("MatMul", z, graph.constant(w.T.astype(np.float32)))
    if intercept is not None:
        h = graph.node("Add", h, graph.constant((rows.w[:, -1] * intercept.constant).astype(np.float32)))
    h = graph.cast(h, np.float64)
    capsules = np.repeat(np.eye(m * k), members.dims.ravel(), axis=0)
    squares = graph.node("MatMul", graph.node("Mul", h, h), graph.constant(capsules))
    q = graph.node("Reshape", squares, graph.constant(np.array([-1, m, k])))
    total = graph.sum(q, 2)
    f = graph.node("Div", q, graph.node("Max", total, graph.constant(np.finfo(float).tiny)))
    lam = _add_table_lookup(graph, graph.node("Mul", total, graph.constant(0.5)), d)
    rest = graph.node("Sub", graph.constant(1.0), lam)
    shares = graph.constant(members.dims / d)
    p = graph.node("Add", graph.node("Mul", lam, f), graph.node("Mul", rest, shares))
    if members.architecture == "multiclass":
        return graph.node("Reshape", p, graph.constant(np.array([-1, k])))
    first, second = (graph.node("Gather", p, graph.constant(np.array(i)), axis=2) for i in (0, 1))
    if members.architecture == "one_vs_all":
        scores = first
    else:
        won = graph.cast(graph.node("GreaterOrEqual", first, second), np.float64)
        lost = graph.node("Sub", graph.constant(1.0), won)
        few = graph.constant(1.0 / members.n_classes)
        votes = [
            graph.node("Add", vote, graph.node("Mul", share, few))
            for vote, share in ((won, first), (lost, second))
        ]
        scores = graph.node(
            "Add",
            *(
                graph.node("MatMul", vote, graph.constant((members.labels == i).astype(np.float64)))
                for i, vote in enumerate(votes)
            ),
        )
    return graph.node("Div", scores, graph.sum(scores, 1))


def add_temperature(graph: OnnxGraph, p: str, temperature: float) -> str:
    """Add probabilities raised to 1 / temperature and normalised; return the name of the tensor."""
    logs = graph.node("Log", graph.node("Max", p, graph.constant(np.finfo(float).tiny)))
    best = graph.node("ReduceMax", logs, graph.constant(np.array([1])), keepdims=1)
    out = graph.node("Exp", graph.node("Mul", graph.node("Sub", logs, best), graph.constant(1 / temperature)))
    return graph.node("Div", out, graph.sum(out, 1))


def _add_table_lookup(graph: OnnxGraph, beta: str, dimension: int) -> str:
    """Add the look-up of lambda0 in the table of the kernels; return the name of the tensor."""
    table = squash_table(dimension)
    cells = len(table.coefficients)
    share = graph.node("Div", beta, graph.node("Add", beta, graph.constant(table.scale)))
    t = graph.node("Mul", share, graph.constant(float(cells)))
    cell = graph.node("Min", graph.node("Floor", t), graph.constant(cells - 1.0))
    u, index = graph.node("Sub", t, cell), graph.cast(cell, np.int64)
    out = ""
    for power in (3, 2, 1, 0):
        c = graph.node("Gather", graph.constant(table.coefficients[:, power]), index, axis=0)
        out = graph.node("Add", graph.node("Mul", out, u), c) if out else c
    return out
