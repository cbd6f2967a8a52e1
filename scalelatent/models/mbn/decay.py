"""Choose the decay (ratio of the numbers of centroids of two layers) by the stability of the clusters.

No labels are used. The steps of :func:`choose_decay`:

1. Sample at most 1,000 rows.
2. For each decay, make small networks: two on all features, and one on each half of the features.
3. Cluster the outputs of each network by k-means.
4. The score of a decay is the mean agreement between the clusters of two networks. The two networks on half
   of the features are not compared with each other.
5. Stop at a decay of 0.5 or more whose score is 0.01 below the best one; larger decays take much longer.
6. Choose the decay with the best score. If several decays have this score, choose the one nearest to 0.5.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.inprocess import run_threads
from scalelatent.engine.reading import StopEvent, as_rows, join_rows, name_dataset_in_errors
from scalelatent.engine.rowsets import DrawnSets
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.kernels.arrays import HostRows
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.mbn.model.layers import Layer, floor_share, make_layers, make_schedule
from scalelatent.models.mbn.model.network import convert_rows
from scalelatent.models.mbn.model.pca import compute_coordinates
from scalelatent.models.mbn.model.sampling import choose_masks, choose_numbers

if TYPE_CHECKING:
    from .estimator import MultilayerBootstrapNetwork

# Decays that are tried, in this order.
DECAYS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Largest numbers of rows and of clusterings per layer of the networks with which a decay is tried.
SAMPLE_ROWS, SAMPLE_CLUSTERINGS = 1000, 60
# Number of networks on all features, and of networks on half of the features, for each decay. With one
# instead of two, the scores would vary more between seeds.
N_NETWORKS = 2
# If n_classes is None, rows are clustered into each of these numbers of clusters, and scores are averaged.
CLUSTER_COUNTS = (2, 4, 8, 16)
# Number of random starts of each k-means; the best clustering is used.
KMEANS_RESTARTS = 5
# The search stops at a decay whose score (adjusted mutual information) is below the best score by more than
# this number. On nine datasets with ten seeds, it never changed the chosen decay (benchmarks/mbn_decay.py).
MAX_SCORE_DROP = 0.01


@dataclass(frozen=True)
class HalfLayer(Layer):
    """A first layer whose clusterings draw their columns from some of the features only."""

    features: tuple[int, ...] = ()  # numbers of these features

    @property
    def n_columns(self) -> int:
        """Number of columns that a clustering uses."""
        return max(1, floor_share(self.fraction, len(self.features)))

    def draw_columns(self, which: int) -> np.ndarray:
        """Return the columns that clustering number ``which`` uses, int64 in rising order."""
        places = choose_numbers(self.seed, "columns", 1, which, n=len(self.features), m=self.n_columns)
        return np.array(self.features)[places]


def choose_decay(model: MultilayerBootstrapNetwork, train: Dataset, seed: int) -> float:
    """Return the decay for which the clusters of networks on all and on half of the features agree best."""
    scores = score_decays(model, train, seed)
    best = max(scores.values())
    return min((d for d, score in scores.items() if score >= best - 1e-9), key=lambda d: abs(d - 0.5))


def score_decays(model: MultilayerBootstrapNetwork, train: Dataset, seed: int) -> dict[float, float]:
    """Return the mean agreement between the clusters of two networks, for each decay that is tried."""
    from sklearn.exceptions import ConvergenceWarning

    numbers = choose_numbers(seed, "sample", 0, 0, n=len(train), m=min(SAMPLE_ROWS, len(train)))
    schedules = {decay: _choose_schedule(model, len(numbers), decay) for decay in DECAYS}
    first_layers = _make_first_layers(model, train, len(numbers), schedules[DECAYS[0]][0], seed)
    x = read_sample(train, numbers, first_layers[0])
    scores: dict[float, float] = {}
    with single_threaded(), warnings.catch_warnings():
        # Hide the warning of k-means that the output has fewer distinct rows than clusters.
        warnings.simplefilter("ignore", ConvergenceWarning)
        codes = [code_rows(first, x, x, model.n_jobs, model.device) for first in first_layers]

        @cache  # with few rows, several decays give the same numbers ``ks`` of centroids
        def score(ks: tuple[int, ...]) -> float:
            def cluster(number: int) -> list[np.ndarray]:
                return _cluster_rows(model, first_layers[number], ks, codes[number], seed)

            networks = range(len(first_layers))
            found: dict[int, list[np.ndarray]] = {}
            run_threads(networks, resolve_jobs(model.n_jobs), lambda slot, stop: cluster, found.__setitem__)
            pairs = [(found[a], found[b]) for b in networks for a in range(min(b, N_NETWORKS))]
            both = [one for pair in pairs for one in zip(*pair, strict=True)]
            return float(np.mean([measure_agreement(*one) for one in both]))

        for decay, ks in schedules.items():
            scores[decay] = score(ks)
            if decay >= 0.5 and scores[decay] < max(scores.values()) - MAX_SCORE_DROP:
                break
    return scores


def _choose_schedule(model: MultilayerBootstrapNetwork, n: int, decay: float) -> tuple[int, ...]:
    """Return the number of centroids of a clustering in each layer, for a network on ``n`` sampled rows."""
    k1 = n // 2 if model.k1 is None else min(n // 2, int(model.k1))
    least = math.ceil(1.5 * (model.n_classes or 2)) if model.k_last is None else int(model.k_last)
    return tuple(make_schedule(n, max(2, k1), decay, max(2, min(least, k1)), None))


def _make_first_layers(
    model: MultilayerBootstrapNetwork, train: Dataset, n: int, k: int, seed: int
) -> list[Layer]:
    """Return the first layers of two networks on all features, then of one network on each half of them.

    The layers have ``k`` centroids per clustering, which are drawn from ``n`` rows.
    """
    p, layers = train.n_features, []
    # With fewer than four features, all networks use all of them, because half would be too few.
    mask = choose_masks(seed, "halves", 0, 0, 1, n=p, m=p // 2 if p >= 4 else p)[0]
    halves = (mask, ~mask) if p >= 4 else (mask, mask)
    for number in range(2 * N_NETWORKS):
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
        if number >= N_NETWORKS:
            seen = np.flatnonzero(halves[number % 2])
            layer = HalfLayer(**vars(layer), features=tuple(seen.tolist()))
        layers.append(layer)
    return layers


def _make_upper_layers(first: Layer, ks: tuple[int, ...]) -> tuple[Layer, ...]:
    """Return the layers above ``first``; ``ks`` are the numbers of centroids per clustering of all layers."""
    # Raise feature_fraction if a clustering would use none of the columns of the one-hot codes below.
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


def read_sample(train: Dataset, numbers: np.ndarray, layer: Layer) -> HostRows:
    """Return the rows ``numbers`` of a dataset; raise DataError if ``layer`` cannot use them, as with NaN."""
    parts: list[HostRows] = []
    for start, stop in train.pieces():
        here = numbers[slice(*np.searchsorted(numbers, [start, stop]))]
        if len(here):
            x: HostRows = as_rows(train.read_x(start, stop))
            with name_dataset_in_errors(train):
                layer.check(x, start)
            parts.append(x.take(here - start) if isinstance(x, CsrRows) else x[here - start])
    return join_rows(parts)


def code_rows(layer: Layer, source: HostRows, x: HostRows, n_jobs: int | None, device: str) -> np.ndarray:
    """Return the number of the nearest centroid of each row ``x`` in each clustering of a layer.

    The centroids are rows of ``source``. Each of ``n_jobs`` threads computes other clusterings.
    """
    out = np.empty((len(x), layer.n_clusterings), dtype=layer.code_dtype)
    name = "reference" if device == "reference" else "cpu"
    rows = convert_rows(layer, make_backend(name), x)

    def compute(slot: int, stop: StopEvent) -> Callable[[int], None]:
        backend = make_backend(name)

        def run(first: int) -> None:
            last = min(first + layer.group_size, layer.n_clusterings)
            out[:, first:last] = layer.compute_codes(backend, rows, DrawnSets(layer, source), first, last)

        return run

    firsts = range(0, layer.n_clusterings, layer.group_size)
    run_threads(firsts, resolve_jobs(n_jobs), compute, lambda first, _: None)
    return out


def _cluster_rows(
    model: MultilayerBootstrapNetwork, first: Layer, ks: tuple[int, ...], codes: np.ndarray, seed: int
) -> list[np.ndarray]:
    """Return k-means clusters of the output of a network, one array of labels per number of clusters.

    ``codes`` are the numbers of the rows' nearest centroids in the layer ``first``; ``ks`` are the numbers of
    centroids per clustering of all layers.
    """
    from sklearn.cluster import KMeans

    for layer in _make_upper_layers(first, ks):
        codes = code_rows(layer, codes, codes, 1, model.device)
    given = CLUSTER_COUNTS if model.n_classes is None else (int(model.n_classes),)
    counts = [min(count, len(codes)) for count in given]
    z = compute_output(codes, max(counts), model.device)
    with single_threaded():  # k-means uses OpenMP, whose number of threads each calling thread has to limit
        return [
            KMeans(count, n_init=KMEANS_RESTARTS, random_state=seed % 2**32).fit(z[:, :count]).labels_
            for count in counts
        ]


def compute_output(codes: np.ndarray, d: int, device: str) -> np.ndarray:
    """Return the coordinates of the rows of ``codes`` along their first d components, float64 (n, d)."""
    backend = make_backend("reference" if device == "reference" else "cpu")
    return compute_coordinates(codes, d, backend.kernel)


def measure_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Return the adjusted mutual information of two clusterings of the same rows.

    It is 1 for equal clusterings, and 0 if one of them has a single cluster.
    """
    from sklearn.metrics import adjusted_mutual_info_score

    if min(len(np.unique(a)), len(np.unique(b))) < 2:
        return 0.0
    return float(adjusted_mutual_info_score(a, b))
