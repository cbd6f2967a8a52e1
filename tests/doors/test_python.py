"""Models raise an error of one line for rows and labels from Python that they cannot learn from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.errors import DataError, DivergenceError, RunError

RNG = np.random.default_rng(0)
X, Y = RNG.uniform(0, 1, (60, 8)).astype(np.float32), np.arange(60) % 3
BITS = (X > 0.5).astype(np.uint8)
FOLDER = Path(__file__).parent

MODELS: dict[str, Callable[[Any], Any]] = {
    "capsule": lambda x: sl.CapsuleRegression(capsule_dim=2, max_iter=3, random_state=0, n_jobs=1).fit(x, Y),
    "mbn": lambda x: sl.MultilayerBootstrapNetwork(
        decay=0.5, n_clusterings=3, k1=10, random_state=0, n_jobs=1
    ).fit(x),
    "crbm": lambda x: sl.ConditionalRBM(n_hidden=3, n_epochs=1, batch_size=20, n_jobs=1).fit(x, BITS),
}


def make_rows_with(row: int, feature: int, number: float) -> np.ndarray:
    x = X.astype(np.float64)
    x[row, feature] = number
    return x


# Invalid rows: name of the case, rows, words of the error that every model raises.
ROWS: list[tuple[str, Any, str]] = [
    ("complex", X + 1j, "Complex data not supported: an array of shape (60, 8), complex64"),
    ("complex lists", (X + 1j).tolist(), "Complex data not supported: an array of shape (60, 8), complex128"),
    ("one axis", np.arange(1000.0), "got 1D array instead: an array of shape (1000,), float64. Reshape your"),
    ("one number", np.float64(3), "got scalar array instead: an array of shape (), float64"),
    ("three axes", np.zeros((60, 3, 3)), "Give each row one axis: X.reshape(len(X), -1)"),
    ("a record type", np.zeros(60, [("a", "f4")]), "got 1D array instead: an array of shape (60,)"),
    ("a name", "rows.zarr", "X is the string 'rows.zarr', which holds no rows; if it is the path"),
    ("a folder", FOLDER, f"pass the rows: scalelatent.open_dataset('{FOLDER}')"),
    ("a mapping", {"a": 1}, "got scalar array instead"),
    ("words", X.astype(str), "is not compatible with arrays of bytes/strings"),
    ("dates", np.zeros((60, 8), "M8[s]"), "dtype datetime64[s]"),
    ("rows of two lengths", [[1, 2], [3]], "inhomogeneous"),
    ("objects", np.full((60, 8), None), "row 0, feature 0 is nan"),
    ("no rows", X[:0], "0 sample(s)"),
    ("NaN", make_rows_with(7, 5, np.nan), "row 7, feature 5 is nan"),
    ("infinite", make_rows_with(7, 5, -np.inf), "row 7, feature 5 is -inf"),
    ("beyond float32", make_rows_with(7, 5, 1e39), "row 7, feature 5 is 1e+39"),
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("rows", "reported"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_invalid_rows_are_refused(model: str, rows: Any, reported: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        MODELS[model](rows)
    assert reported in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_string_in_place_of_rows_or_labels_is_refused() -> None:
    for call in (lambda: make_capsule().fit(X, "x"), lambda: sl.Dataset.from_arrays(X, "x")):
        with pytest.raises(DataError, match="y is the string 'x', which holds no rows"):
            call()
    with pytest.raises(DataError, match="X is the string 'x', which holds no rows; if it"):
        make_capsule().fit("x", [1, 2])
    # The message must not be that y is missing.
    with pytest.raises(DataError, match=r"X is the string .*scalelatent\.open_dataset\("):
        make_capsule().fit(str(FOLDER))


def test_rows_without_labels_are_refused(tmp_path: Path) -> None:
    ds = sl.Dataset.from_arrays(X)
    for rows in (ds, ds.save(tmp_path / "d")):
        with pytest.raises(
            DataError, match=r"no labels, .* \(images: one folder per class; tables: --label COL"
        ):
            make_capsule().fit(rows)


def test_errors_of_columns_name_the_argument_to_change() -> None:
    pytest.importorskip("pyarrow")
    frame = {"a": [1.0, 2.0], "b": ["x", "y"]}
    with pytest.raises(
        DataError, match=r"no column 'c'; its columns are 'a', 'b': choose some with label=, wei"
    ):
        sl.Dataset.from_dataframe(frame, label="c")
    with pytest.raises(
        DataError, match=r"column 'b' holds text, but features .*exclude it with features= \("
    ):
        sl.Dataset.from_dataframe(frame)


HUGE = make_rows_with(5, 3, 1e38)
ALGORITHMS = ("em", "stepwise")
TOO_LARGE = "row 5, feature 3 is {:g}, too large for products in float32: scale the features below 1e+18"
# Rows that a capsule model refuses: name of the case, rows, parameters of the model, words of the error.
CAPSULE_ROWS: list[tuple[str, np.ndarray, dict[str, Any], str]] = [
    *((f"1e38, {name}", HUGE, {"algorithm": name}, TOO_LARGE.format(1e38)) for name in ALGORITHMS),
    ("-1e20", make_rows_with(5, 3, -1e20), {}, TOO_LARGE.format(-1e20)),
    ("1e38, random start", HUGE, {"init": "random"}, TOO_LARGE.format(1e38)),
    ("1e38, projected", HUGE, {"projection": 4}, TOO_LARGE.format(1e38)),
    ("1e38, one against the rest", HUGE, {"architecture": "one_vs_all"}, TOO_LARGE.format(1e38)),
    *((f"zeros, {name}", np.zeros_like(X), {"algorithm": name}, "row is the same") for name in ALGORITHMS),
    ("zeros, no intercept", np.zeros_like(X), {"fit_intercept": False}, "every row is 0"),
    (
        "a class of zeros", np.where((Y == 1)[:, None], 0, X), {"fit_intercept": False},
        "every row of class 1 is 0, so its capsule has",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "options", "reported"), [row[1:] for row in CAPSULE_ROWS], ids=[row[0] for row in CAPSULE_ROWS]
)
def test_rows_that_a_capsule_model_cannot_learn_from_are_refused(
    rows: np.ndarray, options: dict[str, Any], reported: str
) -> None:
    model = sl.CapsuleRegression(capsule_dim=2, max_iter=3, random_state=0, n_jobs=1, **options)
    with pytest.raises(DataError) as refused:
        model.fit(rows, Y)
    assert reported in str(refused.value)
    assert "momentum" not in str(refused.value)


def make_capsule() -> Any:
    return sl.CapsuleRegression(capsule_dim=2, max_iter=3, random_state=0, n_jobs=1)


def make_crbm() -> Any:
    return sl.ConditionalRBM(n_hidden=3, n_epochs=1, batch_size=20, n_jobs=1)


# Calls that must refuse rows with a value of 1e38, by name.
CALLS: dict[str, Callable[[Any], Any]] = {
    "capsule, validation": lambda x: make_capsule().fit(X, Y, validation=(x, Y)),
    "capsule, validation of stepwise": lambda x: (
        make_capsule().set_params(algorithm="stepwise", n_epochs=1).fit(X, Y, validation=(x, Y))
    ),
    "capsule, validation of one against the rest": lambda x: (
        make_capsule().set_params(architecture="one_vs_all").fit(X, Y, validation=(x, Y))
    ),
    "capsule, predict": lambda x: make_capsule().fit(X, Y).predict(x),
    "capsule, transform": lambda x: make_capsule().fit(X, Y).transform(x),
    "capsule, projected": lambda x: make_capsule().set_params(projection=4).fit(X, Y).predict(x),
    "capsule, score": lambda x: make_capsule().fit(X, Y).score(x, Y),
    "crbm, fit": lambda x: make_crbm().fit(x, BITS),
    "crbm, validation": lambda x: make_crbm().fit(X, BITS, validation=(x, BITS)),
    "crbm, predict": lambda x: make_crbm().fit(X, BITS).predict(x),
    "crbm, score": lambda x: make_crbm().fit(X, BITS).score(x, BITS),
}


@pytest.mark.parametrize("use", CALLS)
def test_rows_with_too_large_values_are_refused_in_every_call(use: str) -> None:
    with pytest.raises(DataError) as refused:
        CALLS[use](HUGE)
    assert TOO_LARGE.format(1e38) in str(refused.value)


@pytest.mark.parametrize("use", ["capsule, predict", "crbm, predict"])
def test_stored_rows_with_too_large_values_are_refused(use: str, tmp_path: Path) -> None:
    stored = sl.Dataset.from_arrays(HUGE.astype(np.float32)).save(
        tmp_path / "x.zarr", chunk_rows=4, shard_rows=8
    )
    with pytest.raises(DataError, match=f"x.zarr.*{re.escape(TOO_LARGE.format(1e38))}"):
        CALLS[use](stored)


def test_stored_rows_with_too_large_values_are_refused_in_a_fit(tmp_path: Path) -> None:
    stored = sl.Dataset.from_arrays(HUGE, BITS).save(tmp_path / "x.zarr", chunk_rows=4, shard_rows=8)
    with pytest.raises(DataError, match=f"x.zarr.*{re.escape(TOO_LARGE.format(1e38))}"):
        make_crbm().fit(stored)


def test_a_batch_with_too_large_values_is_refused_and_changes_nothing() -> None:
    model = sl.CapsuleRegression(capsule_dim=2, random_state=0).partial_fit(X, Y, [0, 1, 2])
    before = model.W_.copy()
    with pytest.raises(DataError, match=r"row 5, feature 3 is 1e\+38"):
        model.partial_fit(make_rows_with(5, 3, 1e38), Y)
    np.testing.assert_array_equal(model.W_, before)


@pytest.mark.parametrize("algorithm", ["em", "stepwise"])
def test_a_batch_of_another_scale_is_reported_and_skipped(algorithm: str) -> None:
    model = sl.CapsuleRegression(capsule_dim=2, algorithm=algorithm, random_state=0)
    model.partial_fit(1e-18 * X, Y, [0, 1, 2])
    before = model.W_.copy()
    with pytest.raises(
        DivergenceError, match=r"were ignored: .* another scale .*; scale them to about 1 and"
    ):
        model.partial_fit(9e17 * X.astype(np.float64), Y)
    np.testing.assert_array_equal(model.W_, before)
    model.partial_fit(1e-18 * X, Y)


def test_the_first_pass_gives_no_advice_about_momentum() -> None:
    from scalelatent.contract.finite import make_divergence_error

    assert isinstance(make_divergence_error([0], "pass 3", "lower `momentum`"), DivergenceError | RunError)
    assert "momentum" in str(make_divergence_error([0], "pass 3", "lower `momentum`"))
    assert "momentum" not in str(make_divergence_error([0], "pass 1", "lower `momentum`"))


# Invalid labels: name of the case, labels, words of the error message.
LABELS: list[tuple[str, Any, str]] = [
    ("None", [None] * 60, "The label of row 0 is None (NoneType)"),
    ("some None", [0, None, 1] * 20, "The label of row 1 is None (NoneType)"),
    ("None among words", np.array(["a", "b", None] * 20, object), "The label of row 2 is None (NoneType)"),
    ("numbers and words", np.array([0, "a", 1] * 20, object), "The label of row 1 is 'a' (str), and row 0 i"),
    ("words and numbers", np.array(["a", 0, "b"] * 20, object), "The label of row 1 is 0 (int), and row 0 i"),
    ("a list of numbers and words", [0, 1, "a"] * 20, "The label of row 2 is 'a' (str), and row 0 is 0 (int"),
    ("a list of words and numbers", ["a", "b", 1.5] * 20, "The label of row 2 is 1.5 (float), and row 0 is"),
    ("a tuple of words and None", ("a", None) * 30, "The label of row 1 is None (NoneType)"),
    ("mappings", [{}] * 60, "The label of row 0 is {} (dict)"),
    ("complex", Y + 1j, "Complex data not supported: "),
    ("two columns", np.c_[Y, Y], "(60, 2)"),
    ("one word", "abc", "y is the string 'abc', which holds no rows"),
    ("a set", {1, 2}, "shape ()"),
]  # fmt: skip


@pytest.mark.parametrize("labels", [[0, 1, "a"] * 20, np.array([0, 1, "a"] * 20, object)])
@pytest.mark.parametrize(
    "use_labels",
    [
        lambda y: sl.Dataset.from_arrays(X, y),
        lambda y: make_capsule().partial_fit(X, y, classes=["0", "1", "a"]),
        lambda y: make_capsule().fit(X, Y, validation=(X, y)),
    ],
    ids=["dataset", "partial_fit", "validation"],
)
def test_labels_of_mixed_types_are_refused_with_the_row(
    use_labels: Callable[[Any], Any], labels: Any
) -> None:
    with pytest.raises(DataError, match=r"The label of row 2 is 'a' \(str\), and row 0 is 0 \(int\)"):
        use_labels(labels)


@pytest.fixture(scope="module")
def fitted() -> Any:
    return MODELS["capsule"](X)


@pytest.mark.parametrize("method", ["fit", "score"])
@pytest.mark.parametrize(("labels", "reported"), [row[1:] for row in LABELS], ids=[row[0] for row in LABELS])
def test_invalid_labels_are_refused(fitted: Any, method: str, labels: Any, reported: str) -> None:
    new = sl.CapsuleRegression(capsule_dim=2, max_iter=3, random_state=0, n_jobs=1)
    with pytest.raises((ValueError, TypeError)) as refused:
        new.fit(X, labels) if method == "fit" else fitted.score(X, labels)
    assert reported in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300
