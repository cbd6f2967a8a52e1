"""If ``decay="auto"``, a fit without labels chooses the decay with the best score, and a resume keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import scalelatent as sl
from scalelatent.errors import DataError
from scalelatent.models.mbn import decay as mbn_decay
from scalelatent.models.mbn import fit as mbn_fit
from scalelatent.models.mbn.decay import HalfLayer, measure_agreement, score_decays
from tests.helpers import InterruptAt


def make_network(**options: Any) -> sl.MultilayerBootstrapNetwork:
    given = {"n_clusterings": 10, "n_classes": 3, "random_state": 5, "decay": "auto"}
    return sl.MultilayerBootstrapNetwork(**{**given, **options})


@pytest.fixture(autouse=True)
def use_few_decays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fits try three decays with two restarts of k-means each, because the defaults take longer."""
    monkeypatch.setattr(mbn_decay, "DECAYS", (0.1, 0.4, 0.9))
    monkeypatch.setattr(mbn_decay, "KMEANS_RESTARTS", 2)


def make_groups(n: int = 90, features: int = 8) -> np.ndarray:
    """Return rows of three groups that every feature separates."""
    rng = np.random.default_rng(0)
    return np.repeat(rng.normal(size=(3, features)) * 4, n // 3, axis=0) + rng.normal(size=(n, features))


def compute_scores(x: Any, seed: int = 5, **options: Any) -> dict[float, float]:
    return score_decays(make_network(**options), sl.Dataset.from_arrays(x), seed)


def test_agreement_is_corrected_for_chance() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 20, 300)
    assert measure_agreement(a, (a * 7 + 3) % 20) == pytest.approx(1)
    assert abs(measure_agreement(a, rng.integers(0, 20, 300))) < 0.05
    assert (
        measure_agreement(a, np.zeros(300, int))
        == measure_agreement(np.zeros(300, int), np.zeros(300, int))
        == 0
    )


def test_the_decay_with_the_best_score_is_chosen() -> None:
    x = make_groups()
    model = make_network().fit(x)
    scores = compute_scores(x)
    assert list(scores) == [0.1, 0.4, 0.9]
    assert scores[model.decay_] == max(scores.values()) > 0.5
    assert max(scores.values()) - min(scores.values()) > 0.1
    assert model.ks_ == make_network(decay=model.decay_).schedule(len(x))
    np.testing.assert_array_equal(make_network(decay=model.decay_).fit(x).codes(), model.codes())
    assert compute_scores(x, n_jobs=3) == scores
    assert compute_scores(x, seed=6) != scores
    # Clusterings of rows without groups hardly agree.
    noise = np.random.default_rng(1).normal(size=x.shape)
    assert max(compute_scores(noise).values()) < max(scores.values()) - 0.3


def test_decays_beyond_one_that_is_far_below_the_best_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_groups()
    monkeypatch.setattr(mbn_decay, "DECAYS", (0.1, 0.4, 0.5, 0.6, 0.9))
    monkeypatch.setattr(mbn_decay, "MAX_SCORE_DROP", np.inf)
    every = compute_scores(x)
    # The infinite margin MAX_SCORE_DROP tries all five decays. Their scores show where a margin of 0.9 times
    # ``gap`` ends the search.
    best = np.maximum.accumulate(list(every.values()))
    gap = next(float(best[i] - every[d]) for i, d in enumerate(every) if d >= 0.5 and every[d] < best[i])
    monkeypatch.setattr(mbn_decay, "MAX_SCORE_DROP", 0.9 * gap)
    tried = compute_scores(x)
    assert tried == dict(list(every.items())[: len(tried)])
    assert 3 <= len(tried) < len(every)
    assert max(tried.values()) - list(tried.values())[-1] > 0.9 * gap


def test_among_equal_scores_the_decay_nearest_to_the_default_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mbn_decay, "score_decays", lambda *_: {0.1: 0.4, 0.2: 0.7, 0.6: 0.7, 0.9: 0.6})
    assert mbn_decay.choose_decay(None, None, 0) == 0.6  # type: ignore[arg-type]


@pytest.mark.parametrize("features", [3, 9])
def test_networks_of_half_the_features_do_not_use_the_others(features: int) -> None:
    train = sl.Dataset.from_arrays(np.zeros((20, features), dtype=np.float32))
    whole, other, *halves = mbn_decay._make_first_layers(make_network(feature_fraction=0.6), train, 20, 10, 0)
    assert not isinstance(whole, HalfLayer)
    assert whole.seed != other.seed
    seen = []
    for layer in halves:
        assert isinstance(layer, HalfLayer)
        columns = [layer.draw_columns(which) for which in range(layer.n_clusterings)]
        assert {len(c) for c in columns} == {layer.n_columns} == {int(0.6 * len(layer.features))}
        assert set(np.concatenate(columns)) <= set(layer.features)
        seen.append(layer.features)
    expected = list(range(features))
    # Each network uses half of the features. Half of three features is too little, so each one uses all.
    assert sorted(seen[0] + seen[1]) == (expected if features == 9 else sorted(2 * expected))


def test_networks_with_few_units_use_at_least_one_feature() -> None:
    train = sl.Dataset.from_arrays(np.zeros((20, 500), dtype=np.float32))
    first = mbn_decay._make_first_layers(make_network(feature_fraction=0.002), train, 20, 10, 0)[0]
    layers = mbn_decay._make_upper_layers(first, (10, 6, 5))
    assert [int(layer.draw_units(0).sum()) for layer in layers] == [1, 1]


@pytest.mark.parametrize(
    ("options", "n", "layers"),
    [
        ({}, 100, (50, 25, 12, 6)),
        ({"k1": 20}, 1000, (20, 10, 5)),
        ({"k1": 900, "n_classes": 400}, 1000, (500,)),
        ({"n_classes": None}, 20, (10, 5)),
        ({"k_last": 15}, 100, (50, 25)),
        ({"k1": 30, "k_last": 40}, 100, (30,)),
        ({}, 3, (2,)),
    ],
)
def test_small_networks_have_the_last_layer_of_large_ones(
    options: Any, n: int, layers: tuple[int, ...]
) -> None:
    assert mbn_decay._choose_schedule(make_network(**options), n, 0.5) == layers


def test_dense_and_sparse_documents_have_equal_scores() -> None:
    """Some documents have no words in one half of the columns; the number of classes is unknown."""
    rng = np.random.default_rng(0)
    x = (rng.poisson(0.06, (60, 30)) * rng.integers(1, 5, (60, 30))).astype(np.float32)
    x[np.arange(60), rng.integers(0, 30, 60)] += 1
    options: dict[str, Any] = {"metric": "cosine", "n_classes": None, "n_clusterings": 6}
    assert compute_scores(x, **options) == compute_scores(sp.csr_array(x), **options)


def test_rows_of_one_kind_have_no_best_decay() -> None:
    scores = compute_scores(np.ones((12, 4)))
    assert set(scores.values()) == {0.0}


@pytest.mark.parametrize("kind", ["NaN", "zeros"])
def test_the_error_names_a_bad_row_by_its_index_in_the_dataset(tmp_path: Path, kind: str) -> None:
    x = make_groups(30).astype(np.float32)
    x[13, 2 if kind == "NaN" else slice(None)] = np.nan if kind == "NaN" else 0
    rows = sl.Dataset.from_arrays(x)
    if kind == "zeros":
        rows = rows.save(tmp_path / "x.zarr", chunk_rows=10)
    reported = "row 13, feature 2 is nan" if kind == "NaN" else "x.zarr: row 13 is all zeros"
    with pytest.raises(DataError, match=reported):
        score_decays(make_network(metric="cosine"), rows, 0)


def test_a_resumed_fit_keeps_the_decay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = sl.Dataset.from_arrays(make_groups()).save(tmp_path / "x.zarr")
    answers = iter([0.3])
    monkeypatch.setattr(mbn_fit, "choose_decay", lambda *_: next(answers))
    with pytest.raises(KeyboardInterrupt):
        make_network().fit(
            x, run_dir=tmp_path / "run", callbacks=InterruptAt(3, "stage", "event", "pass_end")
        )
    model = make_network().fit(x, run_dir=tmp_path / "run", resume=True)
    assert model.decay_ == 0.3
    assert model.ks_ == make_network(decay=0.3).schedule(len(x))


@pytest.mark.slow
def test_wine_is_clustered_better_than_with_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default decay of 0.5 shrinks the layers too slowly for the wine data, so "auto" chooses less."""
    from sklearn.datasets import load_wine

    from scalelatent.evaluation import kmeans_scores

    monkeypatch.setattr(mbn_decay, "DECAYS", (0.1, 0.3, 0.5, 0.7, 0.9))
    x, y = load_wine(return_X_y=True)
    found = {}
    for decay in ("auto", 0.5):
        model = make_network(decay=decay, n_clusterings=60, n_components=3, random_state=0)
        found[decay] = kmeans_scores(model.fit_transform(x), y, restarts=10).nmi
        assert decay == 0.5 or model.decay_ <= 0.4
    assert found["auto"] > found[0.5] + 0.03
