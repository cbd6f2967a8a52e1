"""A fit warns of rows that float32 cannot distinguish, and does not warn of other rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import DataConversionWarning

import scalelatent as sl
from scalelatent.errors import DataError, ScalelatentError

RNG = np.random.default_rng(0)
ROWS, LABELS = RNG.normal(size=(300, 5)), np.arange(300) % 2
BITS = (RNG.random((300, 4)) > 0.5).astype("u1")
MODELS: dict[str, Callable[[Any], Any]] = {
    "mixture classifier": lambda x: sl.LinearMixtureClassifier(
        n_components=2, n_dims=2, max_iter=2, random_state=0
    ).fit(x, LABELS),
    "mixture": lambda x: sl.LinearMixture(n_components=2, n_dims=2, max_iter=2, random_state=0).fit(x),
    "bootstrap": lambda x: sl.MultilayerBootstrapNetwork(
        decay=0.5, n_clusterings=60, k1=10, random_state=0
    ).fit(x),
    "conditional RBM": lambda x: sl.ConditionalRBM(n_hidden=3, n_epochs=1, random_state=0).fit(x, BITS),
}


def make_shifted_rows(column: int, offset: float) -> np.ndarray:
    return ROWS + offset * (np.arange(5) == column)


@pytest.mark.parametrize("name", MODELS)
def test_an_offset_too_large_for_the_spread_in_float32_is_reported_once(name: str) -> None:
    with pytest.warns(DataConversionWarning) as reported:
        MODELS[name](make_shifted_rows(3, 1e6))
    (message,) = [str(one.message) for one in reported if one.category is DataConversionWarning]
    assert message.startswith("feature 3 has values up to 1e+06 and a standard deviation of ")
    assert "1 of 5 features" in message
    assert "Subtract the mean" in message
    assert reported[0].filename == __file__


@pytest.mark.parametrize(
    "x",
    [
        make_shifted_rows(2, 1e4),
        ROWS * 1e15,
        make_shifted_rows(2, 1e6).astype("f4"),  # A fit does not round float32 values.
        np.hstack([ROWS[:, 1:], np.full((300, 1), 1e9 + 0.1)]),
        np.hstack([ROWS[:, 1:], 0.1 + 1e-17 * RNG.normal(size=(300, 1))]),
        (ROWS * 1e6).astype("i8"),
        np.arange(1500, dtype="i8").reshape(300, 5) ** 5,
    ],
    ids=["small offset", "large spread", "float32", "constant", "rounded constant", "integers", "powers"],
)
def test_rows_with_enough_precision_in_float32_give_no_warning(x: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataConversionWarning)
        MODELS["mixture"](x)


@pytest.mark.parametrize("offset", [2**62, 2**63 + 2**40])
def test_integers_that_float32_cannot_distinguish_are_reported(offset: int) -> None:
    x = (ROWS * 1000).astype("i8").astype("u8") + np.uint64(offset)
    with pytest.warns(DataConversionWarning, match="takes 100%"), pytest.raises(ScalelatentError):
        MODELS["mixture"](x)


def test_the_warning_names_the_column() -> None:
    with pytest.warns(DataConversionWarning, match="column 'c3' has values"):
        MODELS["mixture"](pd.DataFrame(make_shifted_rows(3, 1e7), columns=[f"c{i}" for i in range(5)]))


def test_a_column_that_rises_over_the_whole_dataset_has_the_spread_of_all_rows() -> None:
    seconds = 1.6e9 + 1e6 * np.arange(300.0)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataConversionWarning)
        MODELS["mixture"](np.hstack([ROWS, seconds]))


def test_the_check_reads_few_rows_of_stored_and_lazy_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.estimators.inputs import warn_of_rounding

    x = np.random.default_rng(0).normal(size=(5000, 5)) + 1e6
    model, read, take = sl.LinearMixture(), [], sl.Dataset.read_x
    stored = sl.Dataset.from_arrays(x).save(tmp_path / "rows.zarr")
    lazy = sl.Dataset.from_arrays(da.from_array(x, chunks=(50, 5)))
    monkeypatch.setattr(sl.Dataset, "read_x", lambda d, a, b: read.append(b - a) or take(d, a, b))
    for ds in (stored, lazy):
        with pytest.warns(DataConversionWarning, match="5 of 5 features"):
            warn_of_rounding(model, ds)
    assert sum(read) <= 2 * 256


@pytest.mark.parametrize("dtype", ["u8", "f8"])
def test_integers_have_the_same_size_limit_as_floats(dtype: str) -> None:
    x = ((ROWS + 100) * 1e17).astype(dtype)
    with pytest.raises(
        DataError, match=r"row 0, feature 0 is 1\.0\d+e\+19, too large for products in float32"
    ):
        MODELS["mixture"](x)
