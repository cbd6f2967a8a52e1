"""Choosing decay without labels: clusters that are there are found again from half of the features."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.inprocess import run_threads
from scalelatent.engine.reading import StopEvent, as_rows
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import DataError
from scalelatent.kernels.arrays import HostRows
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.mbn.model.layers import Layer, make_layers, schedule, share
from scalelatent.models.mbn.model.network import ready_rows
from scalelatent.models.mbn.model.sampling import choose, choose_mask, draw_bits

if TYPE_CHECKING:
    from .estimator import MultilayerBootstrapNetwork

GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SAMPLE_ROWS, SAMPLE_CLUSTERINGS = 1000, 60
# Networks that see all features, and as many that see a half of them; one of each is noisier.
NETWORKS = 2
# Clusters that rows are grouped into where their number is not known.
SOME_CLUSTERS = (2, 4, 8, 16)
RESTARTS = 5


@dataclass(frozen=True)
class HalfLayer(Layer):
    """A first layer whose clusterings look at some of the features, and never at the others."""

    features: tuple[int, ...]

    @property
    def n_columns(self) -> int:
        """Columns that a clustering looks at."""
        return max(1, share(self.fraction, len(self.features)))

    def columns(self, which: int) -> np.ndarray:
        """Columns of a clustering, int64 in rising order."""
        bits = draw_bits(self.seed, "columns", 1, which)
        return np.array(self.features)[choose(bits, len(self.features), self.n_columns)]


def choose_decay(model: MultilayerBootstrapNetwork, train: Dataset, seed: int) -> float:
    """The decay of a grid whose clusters are found again best from half of the features."""
    scores = decay_scores(model, train, seed)
    best = max(scores.values())
    return min((d for d, score in scores.items() if score >= best - 1e-9), key=lambda d: abs(d - 0.5))


def decay_scores(model: MultilayerBootstrapNetwork, train: Dataset, seed: int) -> dict[float, float]:
    """Agreement for each decay of the grid, over all pairs of networks of which one sees all features."""
    numbers = choose(draw_bits(seed, "sample", 0, 0), len(train), min(SAMPLE_ROWS, len(train)))
    schedules = {decay: _schedule(model, len(numbers), decay) for decay in GRID}
    # Few rows have one schedule for several decays.
    different = list(dict.fromkeys(schedules.values()))
    firsts = _first_layers(model, train, len(numbers), different[0][0], seed)
    x = sample_rows(train, numbers, firsts[0])
    with single_threaded():
        networks = [_clusters(model, x, first, different, seed) for first in firsts]
    pairs = [(a, b) for b in range(len(networks)) for a in range(min(b, NETWORKS))]
    scores = {}
    for ks in different:
        both = [zip(networks[a][ks], networks[b][ks], strict=True) for a, b in pairs]
        scores[ks] = float(np.mean([agreement(*labels) for pair in both for labels in pair]))
    return {decay: scores[ks] for decay, ks in schedules.items()}


def _schedule(model: MultilayerBootstrapNetwork, n: int, decay: float) -> tuple[int, ...]:
    """Centroids of each layer of a small network over ``n`` rows, which ends where the large one does."""
    k1 = n // 2 if model.k1 is None else min(n // 2, int(model.k1))
    least = math.ceil(1.5 * (model.n_classes or 2)) if model.k_last is None else int(model.k_last)
    return tuple(schedule(n, max(2, k1), decay, max(2, min(least, k1)), None))


def _first_layers(
    model: MultilayerBootstrapNetwork, train: Dataset, n: int, k: int, seed: int
) -> list[Layer]:
    """Those of the networks that see all features, then of those that see a half."""
    p, layers = train.n_features, []
    # Of less than four features a half is too little.
    mask = choose_mask(draw_bits(seed, "halves", 0, 0), p, p // 2 if p >= 4 else p)
    halves = (mask, ~mask) if p >= 4 else (mask, mask)
    for number in range(2 * NETWORKS):
        (layer,) = make_layers(
            [k],
            n_rows=n,
            n_features=p,
            n_clusterings=min(int(model.n_clusterings), SAMPLE_CLUSTERINGS),
            fraction=float(model.feature_fraction),
            metric=model.metric,
            csr=train.is_sparse,
            dtype=str(train.dtype),
            seed=seed + 1 + number,
        )
        if number >= NETWORKS:
            seen = np.flatnonzero(halves[number % 2])
            layer = HalfLayer(**vars(layer), features=tuple(seen.tolist()))
        layers.append(layer)
    return layers


def _layers_above(first: Layer, ks: tuple[int, ...]) -> tuple[Layer, ...]:
    # Of the few units of a small network each clustering looks at one at least.
    least = min((first.n_clusterings * k for k in ks[:-1]), default=1)
    return make_layers(
        list(ks),
        n_rows=first.n_rows,
        n_features=first.width,
        n_clusterings=first.n_clusterings,
        fraction=max(first.fraction, 1 / least),
        metric=first.metric,
        csr=first.csr,
        dtype=first.dtype,
        seed=first.seed,
    )[1:]


def sample_rows(train: Dataset, numbers: np.ndarray, layer: Layer) -> HostRows:
    """Some rows that the layer has a place for; pieces without any are not read."""
    dense: list[np.ndarray] = []
    sparse: list[CsrRows] = []
    for start, stop in train.pieces():
        here = numbers[slice(*np.searchsorted(numbers, [start, stop]))]
        if len(here):
            x: HostRows = as_rows(train.read_x(start, stop))
            try:
                layer.check(x, start)
            except ValueError as error:
                raise DataError(f"{train.url or 'the rows'}: {error}") from None
            if isinstance(x, CsrRows):
                sparse.append(x.take(here - start))
            else:
                dense.append(x[here - start])
    return np.concatenate(dense) if dense else CsrRows.concatenate(sparse)


def code_rows(layer: Layer, source: HostRows, x: HostRows, n_jobs: int | None, device: str) -> np.ndarray:
    """Codes of rows in memory by a layer whose centroids are drawn from others, threads over clusterings."""
    out = np.empty((len(x), layer.n_clusterings), dtype=layer.code_dtype)
    name = "reference" if device == "reference" else "cpu"
    rows = ready_rows(layer, make_backend(name), x)

    def compute(slot: int, stop: StopEvent) -> Callable[[int], None]:
        backend = make_backend(name)

        def run(first: int) -> None:
            some = range(first, min(first + layer.together, layer.n_clusterings))
            centroids = [layer.take(which, source, layer.rows(which)) for which in some]
            out[:, some.start : some.stop] = layer.codes(backend, rows, centroids, first)

        return run

    firsts = range(0, layer.n_clusterings, layer.together)
    run_threads(firsts, resolve_jobs(n_jobs), compute, lambda first, _: None)
    return out


def _clusters(
    model: MultilayerBootstrapNetwork,
    x: HostRows,
    first: Layer,
    schedules: list[tuple[int, ...]],
    seed: int,
) -> dict[tuple[int, ...], list[np.ndarray]]:
    """Clusters of the outputs of networks with one first layer: one for each number of clusters."""
    from sklearn.exceptions import ConvergenceWarning

    below, last = code_rows(first, x, x, model.n_jobs, model.device), {}
    for ks in schedules:
        codes = below
        for layer in _layers_above(first, ks):
            codes = code_rows(layer, codes, codes, model.n_jobs, model.device)
        last[ks] = codes
    wanted = SOME_CLUSTERS if model.n_classes is None else (int(model.n_classes),)
    counts = [min(count, len(below)) for count in wanted]

    def cluster(ks: tuple[int, ...]) -> list[np.ndarray]:
        z = small_output(last[ks], max(counts), model.device)
        return [_kmeans(z[:, :count], count, seed) for count in counts]

    found: dict[tuple[int, ...], list[np.ndarray]] = {}
    with warnings.catch_warnings():
        # Rows of fewer kinds than clusters: then those are the clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        run_threads(schedules, resolve_jobs(model.n_jobs), lambda slot, stop: cluster, found.__setitem__)
    return found


def small_output(codes: np.ndarray, d: int, device: str) -> np.ndarray:
    """The first principal components of codes in memory, float64 (n, d); see :mod:`~.models.mbn.pca`."""
    from scipy.linalg import eigh

    backend = make_backend("reference" if device == "reference" else "cpu")
    matches = backend.kernel("mbn_count_matches")(codes)
    matches -= matches.mean(axis=0)
    matches -= matches.mean(axis=1, keepdims=True)
    values, u = eigh(matches, subset_by_index=(len(codes) - d, len(codes) - 1))
    return np.asarray(u[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0)))


def _kmeans(z: np.ndarray, k: int, seed: int) -> np.ndarray:
    """The clusters of the restart of the smallest inertia."""
    from sklearn.cluster import KMeans

    return np.asarray(KMeans(k, n_init=RESTARTS, random_state=seed % 2**32).fit(z).labels_)


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """How much two clusterings of the same rows say of each other: adjusted mutual information, at most 1."""
    from sklearn.metrics import adjusted_mutual_info_score

    if min(len(np.unique(a)), len(np.unique(b))) < 2:
        return 0.0
    return float(adjusted_mutual_info_score(a, b))
