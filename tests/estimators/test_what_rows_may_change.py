"""One table declares, for nine models, how a change of the rows of a fit affects its result.

Each model is fitted twice, before and after a change of the rows, and gives results for the same held-out
rows. An entry of the table declares the relation of the two results:

same    They have the same bits.
close   They differ by float32 rounding: at most by ``ModelColumn.rounding``.
score   They differ, and the score of the second fit is lower by at most ``ModelColumn.spread``.
error   The second fit is refused: images are dense, and their pixels are 0 or 1.
letter  The change does not apply to the model. REASONS says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

import scalelatent as sl
from scalelatent.errors import DataError

TABLE = """
                        | em    | steps | classes | density | factors | boots | crbm  | parts | tree
rows in another order   | close | score | score   | score   | score   | score | score | score | g
names of classes        | same  | same  | same    | a       | a       | a     | a     | a     | same
order of classes        | close | close | score   | a       | a       | a     | a     | a     | g
rows twice or weights 2 | close | score | close   | close   | close   | b     | b     | b     | b
a fifth of rows twice   | close | score | score   | score   | score   | b     | b     | b     | b
a column of ones        | close | close | close   | d       | d       | score | score | f     | f
a column of zeros       | close | close | close   | d       | d       | score | score | score | g
a column x 1000         | score | score | c       | c       | c       | c     | e     | error | error
all numbers + 1024      | close | close | close   | close   | close   | same  | e     | error | error
float16                 | same  | same  | same    | same    | same    | same  | same  | same  | same
float64                 | same  | same  | same    | same    | same    | same  | same  | same  | same
integers                | same  | same  | same    | same    | same    | same  | same  | same  | same
CSR                     | same  | same  | same    | same    | same    | same  | same  | error | error
column by column        | same  | same  | same    | same    | same    | same  | same  | same  | same
dask chunks             | same  | same  | same    | same    | same    | same  | same  | same  | same
zarr chunks             | same  | same  | same    | same    | same    | same  | same  | same  | same
blocks of 32 rows       | close | close | close   | close   | close   | same  | same  | same  | same
leaves of 32 rows       | close | close | close   | close   | close   | same  | same  | score | g
"""
REASONS = {
    "a": "The model learns without classes.",
    "b": "The model takes each row once and has no weights.",
    "c": "Squared distances, from which k-means starts and noise is computed, need features in one unit.",
    "d": "The noise is, or starts as, a mean over all features, so that a constant one changes densities.",
    "e": "Gradients of all inputs share one learning rate, so that inputs are to be about 0 to 1.",
    "f": "A column of ones is a line of pixels, which the features have to explain.",
    "g": "The change leads to another network, and the network is too small to learn the classes.",
}


def draw_clouds(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw n rows of whole numbers, exact in float16, from two clouds per class; return rows and classes."""
    means = np.random.default_rng(1).normal(size=(6, 6)) * 50
    cloud = np.arange(n) % 6
    x = np.rint(means[cloud] + 12 * rng.normal(size=(n, 6)))
    x[rng.random(x.shape) < 0.05] = 0
    return x.astype("f4"), cloud % 3


def draw_patterns(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw n noisy rows and the n clean rows of three patterns of 12 bits; a tenth of the bits is flipped."""
    v = (np.random.default_rng(7).random((3, 12)) < 0.5)[np.arange(n) % 3]
    return (v ^ (rng.random(v.shape) < 0.1)).astype("f4"), v.astype("u1")


def draw_images(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw n images of 8 x 8 pixels, each with one of two shapes at two places; return shape indices too."""
    shapes = np.array([[[1, 1, 1], [0, 0, 1], [0, 0, 1]], [[1, 0, 1], [0, 1, 0], [1, 0, 1]]], bool)
    x, y = np.zeros((n, 8, 8), bool), np.arange(n) % 2
    for i, _ in product(range(n), range(2)):
        a, b = rng.integers(0, 6, 2)
        x[i, a : a + 3, b : b + 3] |= shapes[y[i]]
    return x.astype("f4"), y


def share_neighbours_of_class(fitted: Any, x: np.ndarray, y: np.ndarray) -> float:
    """Return the share of rows whose class is the class of the nearest other row in the output."""
    made = fitted.transform(x)
    gaps = ((made[:, None] - made) ** 2).sum(axis=2)
    np.fill_diagonal(gaps, np.inf)
    return float((y[gaps.argmin(axis=1)] == y).mean())


@dataclass(frozen=True)
class FitArguments:
    """Arguments of ``fit``: rows, labels or outputs, row weights, and engine options."""

    x: Any
    y: Any
    weight: np.ndarray | None = None
    engine: dict[str, Any] | None = None


@dataclass(frozen=True)
class ModelColumn:
    """Column of TABLE: a model, the rows that it learns, and the tolerances of comparisons."""

    make: Callable[..., Any]
    options: dict[str, Any]
    draw: Callable[[int, np.random.Generator], tuple[np.ndarray, np.ndarray]]
    # Name of the method whose outputs are compared.
    result: str
    # Largest difference of two results that were rounded in different places.
    rounding: float = 0.0
    # Largest loss of score: two standard deviations of the difference of two scores of 300 rows.
    spread: float = 0.0
    score: Callable[[Any, np.ndarray, np.ndarray], float] = lambda fitted, x, y: float(fitted.score(x, y))
    # A supervised model receives the second array that ``draw`` returns: labels or outputs.
    supervised: bool = True

    def given(self) -> FitArguments:
        x, y = self.draw(300, np.random.default_rng(0))
        return FitArguments(x, y if self.supervised else None)

    def fit(self, given: FitArguments) -> Any:
        model = self.make(**self.options, random_state=0, n_jobs=1)
        if given.weight is None:
            return model.fit(given.x, given.y, engine=given.engine)
        return model.fit(sl.Dataset.from_arrays(given.x, given.y, sample_weight=given.weight))

    def read_results(self, fitted: Any, x: np.ndarray) -> np.ndarray:
        found = np.asarray(getattr(fitted, self.result)(x), dtype=np.float64)
        return found.reshape(len(found), -1)


# In six passes a row takes part in six float32 products of six features. Their roundings add up to at most 6
# * 6 * 2**-24 = 2e-6 of a sum. A probability changes by at most a quarter of the change of its log-odds,
# which are at most 20.
CAPSULES = {"draw": draw_clouds, "result": "predict_proba", "rounding": 20 / 4 * 6 * 6 * 2.0**-24}
# A squared distance is a float32 sum of six squares. Differences are at most 200, which is 200 / 12 in units
# of the noise. A log density has half of this sum, and two fits round it, so the factors 1/2 and 2 cancel.
SQUARES_ROUNDING = 6 * (200 / 12) ** 2 * 2.0**-24
MIXTURES = {"draw": draw_clouds, "result": "predict_proba", "rounding": SQUARES_ROUNDING}
# A mixture starts from rows drawn by index, so rows in another order give another start. A log density of six
# Gaussian features has the variance 6 / 2, so two standard deviations of the difference of two means over 300
# rows are 2 * sqrt(6 / 2 * 2 / 300).
DENSITIES = {"draw": draw_clouds, "result": "score_samples", "rounding": SQUARES_ROUNDING, "spread": 0.28}
# Two standard deviations of a difference of scores, if 5 % of rows are wrong: 2 * sqrt(2 * .05 * .95 / 300).
SCORE_SPREAD = 0.036
MODELS = {
    "em": ModelColumn(
        sl.CapsuleRegression, {"capsule_dim": 2, "max_iter": 6}, spread=SCORE_SPREAD, **CAPSULES
    ),
    "steps": ModelColumn(
        sl.CapsuleRegression,
        {"capsule_dim": 2, "n_epochs": 6, "batch_rows": 64},
        spread=SCORE_SPREAD,
        **CAPSULES,
    ),
    "classes": ModelColumn(
        sl.LinearMixtureClassifier,
        {"n_components": 2, "n_dims": 2, "likelihood": "error", "max_iter": 6},
        spread=SCORE_SPREAD,
        **MIXTURES,
    ),
    "density": ModelColumn(
        sl.LinearMixture,
        {"n_components": 6, "n_dims": 2, "max_iter": 6, "likelihood": "ppca"},
        supervised=False,
        **DENSITIES,
    ),
    "factors": ModelColumn(
        sl.LinearMixture,
        {"n_components": 6, "n_dims": 2, "max_iter": 6, "likelihood": "factor-analysis"},
        supervised=False,
        **DENSITIES,
    ),
    "boots": ModelColumn(
        sl.MultilayerBootstrapNetwork,
        {"n_clusterings": 50, "k1": 30, "n_classes": 3},
        draw_clouds,
        "transform",
        spread=SCORE_SPREAD,
        score=share_neighbours_of_class,
        supervised=False,
    ),
    "crbm": ModelColumn(
        sl.ConditionalRBM,
        {"n_hidden": 4, "n_epochs": 6, "learning_rate": 0.2},
        draw_patterns,
        "predict_marginals",
        spread=SCORE_SPREAD,
    ),
    "parts": ModelColumn(
        sl.HierarchicalCompositionalNetwork,
        {"layers": [(4, 3)], "online": False, "n_epochs": 10, "n_restarts": 3},
        draw_images,
        "transform",
        # One start in ten ends in a worse optimum, therefore the fit has restarts. The share of bits that the
        # features save has a standard deviation of .052 between images, so spread = 2 * .052 * sqrt(2 / 300).
        spread=0.0085,
        score=lambda fitted, x, y: float(fitted.score(x)),
        supervised=False,
    ),
    "tree": ModelColumn(
        sl.HierarchicalCompositionalNetwork,
        {"layers": [(3, 3)], "templates": 1, "n_epochs": 10},
        draw_images,
        "transform",
    ),
}


def keep_unchanged(given: Any) -> Any:
    return given


@dataclass(frozen=True)
class ChangeRow:
    """Row of TABLE: the change of the rows between two fits, and how to compare the results."""

    after: Callable[[FitArguments, Path], FitArguments]
    # Change of the rows of the first fit, with which the changed fit is compared. By default there is none.
    before: Callable[[FitArguments], FitArguments] = keep_unchanged
    # Changes of the held-out rows and of their labels, which correspond to ``after``.
    rows: Callable[[np.ndarray], Any] = keep_unchanged
    labels: Callable[[np.ndarray], np.ndarray] = keep_unchanged
    # Function that converts the results of the changed fit so that they can be compared with those of the
    # other fit.
    back: Callable[[np.ndarray], np.ndarray] = keep_unchanged


def change_all_rows(change: Callable[[np.ndarray], Any]) -> ChangeRow:
    """Return a table row whose ``change`` applies to the training rows and to the held-out rows."""
    return ChangeRow(lambda given, _: replace(given, x=change(given.x)), rows=change)


def change_training_rows(change: Callable[[np.ndarray, Path], Any]) -> ChangeRow:
    """Return a table row whose ``change`` puts the training rows into another container."""
    return ChangeRow(lambda given, folder: replace(given, x=change(given.x, folder)))


def set_engine(**options: int) -> ChangeRow:
    return ChangeRow(lambda given, _: replace(given, engine=options))


def rename_classes(names: list[Any]) -> ChangeRow:
    """Return a table row with new class names, by which the columns of the results are sorted."""
    own, order = np.array(names), np.argsort(np.argsort(names))

    def in_own_order(found: np.ndarray) -> np.ndarray:
        return found[:, order] if found.shape[1] == len(order) else found

    return ChangeRow(
        lambda given, _: replace(given, y=own[given.y]), labels=lambda y: own[y], back=in_own_order
    )


def repeat_against_weights(times: Callable[[int], np.ndarray]) -> ChangeRow:
    """Return a table row: ``before`` gives rows the weights ``times(n)``, ``after`` repeats the rows."""

    def repeated(given: FitArguments, _: Path) -> FitArguments:
        n = times(len(given.x))
        return FitArguments(given.x.repeat(n, axis=0), None if given.y is None else given.y.repeat(n))

    return ChangeRow(repeated, before=lambda given: replace(given, weight=times(len(given.x)).astype("f8")))


def permute(given: FitArguments, _: Path) -> FitArguments:
    order = np.random.default_rng(3).permutation(len(given.x))
    return FitArguments(given.x[order], None if given.y is None else given.y[order])


def append_column(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.concatenate([x, np.full_like(x[..., :1], value)], axis=-1)


def write_zarr(x: np.ndarray, folder: Path) -> Any:
    chunks = (77, *(side // 2 for side in x.shape[1:]))
    array = zarr.create_array(store=str(folder / "x.zarr"), shape=x.shape, dtype=x.dtype, chunks=chunks)
    array[...] = x
    return array


CHANGES = {
    "rows in another order": ChangeRow(permute),
    "names of classes": rename_classes(["left", "right", "top"]),
    "order of classes": rename_classes([2, 0, 1]),
    "rows twice or weights 2": repeat_against_weights(lambda n: np.full(n, 2)),
    "a fifth of rows twice": repeat_against_weights(lambda n: np.where(np.arange(n) % 5 == 0, 2, 1)),
    "a column of ones": change_all_rows(append_column(1)),
    "a column of zeros": change_all_rows(append_column(0)),
    "a column x 1000": change_all_rows(lambda x: np.concatenate([x[..., :1] * 1000, x[..., 1:]], axis=-1)),
    "all numbers + 1024": change_all_rows(lambda x: x + np.float32(1024)),
    "float16": change_all_rows(lambda x: x.astype("f2")),
    "float64": change_all_rows(lambda x: x.astype("f8")),
    "integers": change_all_rows(lambda x: x.astype("i8")),
    "CSR": change_all_rows(lambda x: sp.csr_array(x.reshape(len(x), -1))),
    "column by column": change_training_rows(lambda x, _: np.asfortranarray(x)),
    "dask chunks": change_training_rows(lambda x, _: da.from_array(x, (70, *(n // 2 for n in x.shape[1:])))),
    "zarr chunks": change_training_rows(write_zarr),
    "blocks of 32 rows": set_engine(block_rows=32),
    "leaves of 32 rows": set_engine(block_rows=32, leaf_rows=32),
}
HEAD, *LINES = ([cell.strip() for cell in line.split("|")] for line in TABLE.strip("\n").splitlines())
ENTRIES = {
    (change, model): entry
    for change, *entries in LINES
    for model, entry in zip(HEAD[1:], entries, strict=True)
}


def test_the_table_has_an_entry_for_each_change_and_model_and_needs_each_reason() -> None:
    assert list(ENTRIES) == list(product(CHANGES, MODELS))
    assert set(ENTRIES.values()) == {"same", "close", "score", "error", *REASONS}


@cache
def fit_before(model: str, change: str | None) -> Any:
    """Return the fit with which a changed fit is compared; ``change`` is None if rows stay as drawn."""
    given = MODELS[model].given()
    return MODELS[model].fit(given if change is None else CHANGES[change].before(given))


@pytest.mark.filterwarnings("ignore:.*weights still changed")
@pytest.mark.parametrize(
    ("change", "model"),
    [
        pytest.param(*key, id=f"{key[1]}-{key[0]}-{ENTRIES[key]}")
        for key in ENTRIES
        if ENTRIES[key] not in REASONS
    ],
)
def test_a_change_of_the_rows_changes_the_result_as_the_table_declares(
    change: str, model: str, tmp_path: Path
) -> None:
    row, column, entry = CHANGES[change], MODELS[model], ENTRIES[change, model]
    changed = row.after(column.given(), tmp_path)
    if entry == "error":
        with pytest.raises(DataError, match="images|pixels must be 0 or 1"):
            column.fit(changed)
        return
    first, second = (
        fit_before(model, None if row.before is keep_unchanged else change),
        column.fit(changed),
    )
    x, y = column.draw(300, np.random.default_rng(1))
    after, labels = row.rows(x), row.labels(y)
    if entry == "score":
        assert column.score(second, after, labels) >= column.score(first, x, y) - column.spread
        return
    expected, found = column.read_results(first, x), row.back(column.read_results(second, after))
    if entry == "same":
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=column.rounding)
