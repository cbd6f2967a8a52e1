"""Choosing decay without labels: networks that differ by their seed alone should say the same of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.inprocess import run_threads
from scalelatent.engine.reading import as_rows
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.models.base import CsrRows
from scalelatent.models.mbn.layers import ArraySets, Layer, make_layers, schedule
from scalelatent.models.mbn.pca import kernel_components
from scalelatent.models.mbn.sampling import choose, draw_bits

GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SAMPLE_ROWS, SAMPLE_CLUSTERINGS, NETWORKS = 1000, 100, 3


def choose_decay(model: Any, train: Dataset, seed: int) -> float:
    """The decay of a grid whose networks agree most.

    On a sample of the rows each decay has a few small networks of different seeds. Agreement is that of their
    outputs (see :func:`agreement`), averaged over pairs; of decays that agree alike the one nearest to 0.5 is
    taken.

    Parameters
    ----------
    model : MultilayerBootstrapNetwork
        Its parameters.
    train : Dataset
    seed : int

    Returns
    -------
    float
    """
    scores = decay_scores(model, train, seed)
    best = max(scores.values())
    return min((d for d, score in scores.items() if score >= best - 1e-9), key=lambda d: abs(d - 0.5))


def decay_scores(model: Any, train: Dataset, seed: int) -> dict[float, float]:
    """Agreement of each decay of the grid that has a schedule for these rows; see :func:`choose_decay`."""
    x = sample_rows(train, min(SAMPLE_ROWS, len(train)), seed)
    n = len(x)
    # The sample keeps the share of the rows that are centroids, up to half of them.
    k1 = None if model.k1 is None else min(n // 2, max(2, int(model.k1 * n / len(train))))
    least = None if model.k_last is None else min(int(model.k_last), n // 2)
    options = {
        "n_rows": n,
        "n_features": train.n_features,
        "n_clusterings": min(int(model.n_clusterings), SAMPLE_CLUSTERINGS),
        "fraction": float(model.feature_fraction),
        "metric": model.metric,
        "csr": train.is_sparse,
        "dtype": str(train.dtype),
    }
    d = int(model.n_classes or 2)
    found: dict[float, list[np.ndarray]] = {decay: [] for decay in GRID}
    firsts: dict[int, np.ndarray] = {}
    with single_threaded():
        for number in range(NETWORKS):
            for decay in GRID:
                ks = schedule(n, k1, decay, least, model.n_classes)
                layers = make_layers(ks, seed=seed + 1 + number, **options)
                # The first layer is the same for every decay.
                codes = firsts.get(number)
                if codes is None:
                    codes = firsts[number] = code_rows(layers[0], x, x, model.n_jobs, model.device)
                for layer in layers[1:]:
                    codes = code_rows(layer, codes, codes, model.n_jobs, model.device)
                found[decay].append(small_output(codes, ks[-1], d, model.device))
    return {decay: _mean_agreement(outputs) for decay, outputs in found.items()}


def sample_rows(train: Dataset, n: int, seed: int) -> Any:
    """Some of the rows, in their order, as ndarray or CsrRows; pieces without any are not read."""
    numbers = choose(draw_bits(seed, "sample", 0, 0), len(train), n)
    parts: list[Any] = []
    for start, stop in train.pieces():
        here = numbers[slice(*np.searchsorted(numbers, [start, stop]))]
        if len(here):
            x = as_rows(train.read_x(start, stop))
            parts.append(x[here - start] if isinstance(x, np.ndarray) else x.take(here - start))
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else CsrRows.concatenate(parts)


def code_rows(layer: Layer, source: Any, x: Any, n_jobs: int | None, device: str) -> np.ndarray:
    """Codes of rows in memory by a layer whose centroids are drawn from others, threads over clusterings."""
    layer.check(x, 0)
    out = np.empty((len(x), layer.n_clusterings), dtype=layer.code_dtype)
    name = "reference" if device == "reference" else "cpu"

    def compute(slot: int, stop: Any) -> Any:
        backend = make_backend(name)

        def run(which: int) -> None:
            centroids = layer.take(which, source, layer.rows(which))
            out[:, which] = layer.code(backend, x, ArraySets(centroids, layer.k).read(0), which)

        return run

    run_threads(range(layer.n_clusterings), resolve_jobs(n_jobs), compute, lambda which, _: None)
    return out


def small_output(codes: np.ndarray, k: int, d: int, device: str) -> np.ndarray:
    """The first principal components of codes in memory, float64 (n, d)."""
    backend = make_backend("reference" if device == "reference" else "cpu")
    found = kernel_components(codes, k, backend.kernel).first(d)
    return np.asarray(backend.kernel("mbn_gather_sum")(codes, found.table)) - found.offset


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """How much of two outputs is the same: linear centred kernel alignment, 0 to 1.

    |A'B|^2 / (|A'A| |B'B|) with Frobenius norms, of centred outputs; turning or scaling one of them changes
    nothing.

    Parameters
    ----------
    a, b : ndarray of float64, shape (n, d)

    Examples
    --------
    >>> a = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    >>> round(agreement(a, 3 * a[:, ::-1]), 6)
    1.0
    """
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    own = np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)
    return float(np.linalg.norm(a.T @ b) ** 2 / own) if own else 0.0


def _mean_agreement(outputs: list[np.ndarray]) -> float:
    pairs = [(a, b) for i, a in enumerate(outputs) for b in outputs[:i]]
    return float(np.mean([agreement(a, b) for a, b in pairs]))
