"""Class probabilities of mixtures as an ONNX graph."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from scalelatent.errors import DataError
from scalelatent.estimators.onnx_graph import OnnxGraph

from .output import MixtureRowMap


def draw_probabilities(graph: OnnxGraph, rows: MixtureRowMap) -> str:
    """Add nodes for the class probabilities, double (rows, classes); return the name of the last node.

    Raises
    ------
    DataError
        The model recognises rows by tangent distance.
    """
    fitted = rows.fitted
    if fitted.tangent_spec is not None:
        raise DataError(
            "to_onnx: this model recognises rows by tangent distance, for which ONNX has no operators: "
            "set_params(recognition='error') first"
        )
    s = fitted.recogniser().scores
    k, p, h = s.w.shape
    x = graph.x
    if fitted.matrix is not None:
        x = graph.node("MatMul", x, graph.constant(fitted.matrix.astype(np.float32)))
    z = graph.node("Sub", graph.cast(x, np.float64), graph.constant(s.centre))
    square, d = graph.node("Mul", z, z), np.broadcast_to(s.d.reshape(k, -1), (k, p))
    scores = graph.node("MatMul", square, graph.constant(np.ascontiguousarray(d.T)))
    scores = graph.node("Add", scores, graph.node("MatMul", z, graph.constant(s.b.T.copy())))
    scores = graph.node("Add", scores, graph.constant(s.c))
    if h:
        bases = s.w.transpose(1, 0, 2).reshape(p, k * h)
        codes = graph.node("MatMul", z, graph.constant(np.ascontiguousarray(bases, dtype=np.float64)))
        codes = graph.node("Reshape", codes, graph.constant(np.array([-1, k, h])))
        images = graph.node("ReduceSumSquare", codes, graph.constant(np.array([2])), keepdims=0)
        scores = graph.node("Sub", scores, images)
    best = [
        graph.node(
            "ReduceMin",
            graph.node("Gather", scores, graph.constant(np.arange(a, b)), axis=1),
            graph.constant(np.array([1])),
            keepdims=1,
        )
        for a, b in pairwise(fitted.starts.tolist())
    ]
    each = graph.node("Concat", *best, axis=1)
    return graph.node("Softmax", graph.node("Mul", each, graph.constant(-0.5 / fitted.temperature)), axis=1)
