"""Forward pass of several layers as an ONNX graph: pools as maxima of shifted arrays, then convolutions."""

from __future__ import annotations

import math

import numpy as np

from scalelatent.estimators.onnx_graph import RowGraph
from scalelatent.models.hcn.model.convolution import ConvolutionalForm
from scalelatent.models.hcn.model.filters import SCALE, OrientedFilters
from scalelatent.models.hcn.model.layer import UNKNOWN, FeatureLayer


def draw_scores(
    graph: RowGraph, layer: FeatureLayer, form: ConvolutionalForm, template_codes: np.ndarray
) -> str:
    """Add nodes for the class scores in nats, float32 (rows, classes): the score of the best template.

    All values are multiples of 1/256, so float32 sums are exact up to 65,536 nats.
    """
    seen = graph.node("Reshape", graph.x, graph.constant(np.array([-1, *layer.seen])))
    values = _add_evidence(graph, layer, form, seen)
    for pool, weights in zip(form.pools, form.weights, strict=True):
        values = graph.node("Conv", _add_pools(graph, values, pool), graph.constant(weights))
    scores = graph.node("Reshape", values, graph.constant(np.array([-1, len(template_codes)])))
    best = [
        graph.node(
            "ReduceMax",
            graph.node("Gather", scores, graph.constant(np.flatnonzero(template_codes == code)), axis=1),
            graph.constant(np.array([1])),
            keepdims=1,
        )
        for code in range(int(template_codes.max()) + 1)
    ]
    return graph.node("Concat", *best, axis=1)


def _add_evidence(graph: RowGraph, layer: FeatureLayer, form: ConvolutionalForm, seen: str) -> str:
    """Add nodes for the evidence of pixels, or of filter edges: float32 (rows, channels, height, width)."""
    off, on = (graph.constant(np.float32(value)) for value in form.evidence)
    if layer.filters is not None:
        return graph.node("Where", _add_edges(graph, layer.filters, seen), on, off)
    if layer.threshold is None:
        values = graph.node("Where", graph.node("Equal", seen, graph.constant(np.float32(1))), on, off)
    else:
        above = graph.node("Greater", seen, graph.constant(np.float32(layer.threshold)))
        values = graph.node("Where", above, on, off)
    if layer.missing is None:
        return values
    if math.isnan(layer.missing):
        no_number = graph.node("Equal", seen, graph.constant(np.float32(UNKNOWN)))
        unknown = graph.node("Or", graph.node("IsNaN", seen), no_number)
    else:
        unknown = graph.node("Equal", seen, graph.constant(np.float32(layer.missing)))
    return graph.node("Where", unknown, graph.constant(np.float32(0)), values)


def _add_edges(graph: RowGraph, filters: OrientedFilters, seen: str) -> str:
    """Add nodes that mark the strongest filter at each pixel: bool (rows, filters, height, width)."""
    weights = filters.weights[:, None].astype(np.float32)
    answers = graph.node("Conv", seen, graph.constant(weights), pads=[filters.size // 2] * 4)
    strength = graph.node("Abs", answers)
    best = graph.node("ArgMax", strength, axis=1, keepdims=1)
    answer = graph.node("GatherElements", answers, best, axis=1)
    half = graph.constant(np.int64(filters.n // 2))
    bright = graph.node("Greater", answer, graph.constant(np.float32(0)))
    on = graph.node("Where", bright, best, graph.node("Add", best, half))
    numbers = graph.constant(np.arange(filters.n)[:, None, None])
    least = graph.constant(np.float32(np.rint(filters.threshold * SCALE)))
    enough = graph.node("GreaterOrEqual", graph.node("Abs", answer), least)
    return graph.node("And", graph.node("Equal", numbers, on), enough)


def _add_pools(graph: RowGraph, values: str, pool: np.ndarray) -> str:
    """Add nodes for the pools: the largest sum of a shifted value and the log prior of its shift."""
    (n_shifts, height, width), axes = pool.shape, graph.constant(np.array([2, 3]))
    side = math.isqrt(n_shifts)
    if side == 1:
        return graph.node("Add", values, graph.constant(pool[0]))
    reach = side // 2
    wide = graph.node("Pad", values, graph.constant(np.array([0, 0, reach, reach] * 2)))
    shifted = [
        graph.node(
            "Add",
            graph.node(
                "Slice",
                wide,
                graph.constant(np.array([s // side, s % side])),
                graph.constant(np.array([s // side + height, s % side + width])),
                axes,
            ),
            graph.constant(pool[s]),
        )
        for s in range(n_shifts)
    ]
    return graph.node("Max", *shifted)
