"""Errors name the column, label, weight or chunk that a fit or a prediction cannot use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from sklearn.exceptions import NotFittedError

import scalelatent as sl
from scalelatent.errors import DataError

RNG = np.random.default_rng(0)
LABELS = np.repeat(np.arange(3), 20)
ROWS = (RNG.normal(size=(3, 6))[LABELS] * 3 + RNG.normal(size=(60, 6))).astype("f4")
FRAME = pd.DataFrame(ROWS, columns=list("abcdef"))
BITS = pd.DataFrame((RNG.random((60, 4)) < 0.4).astype("f4"), columns=list("abcd"))


def make_capsule() -> sl.CapsuleRegression:
    return sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0)


def make_rbm(**options: Any) -> sl.ConditionalRBM:
    return sl.ConditionalRBM(n_hidden=2, n_epochs=1, random_state=0, **options)


# -- names of columns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditional", [False, True])
def test_an_rbm_keeps_the_names_of_its_columns(conditional: bool) -> None:
    model = make_rbm(conditional=conditional).fit(BITS, BITS.to_numpy() if conditional else None)
    assert model.feature_names_in_.tolist() == list("abcd")
    model.transform(BITS)
    with pytest.raises(ValueError, match="must be in the same order"):
        model.transform(BITS[list("bacd")])
    more = make_rbm(conditional=conditional).partial_fit(BITS, BITS.to_numpy() if conditional else None)
    with pytest.raises(ValueError, match="must be in the same order"):
        more.partial_fit(BITS[list("bacd")], BITS.to_numpy() if conditional else None)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (
            lambda d: d.rename(columns={"a": "z"}),
            r"unseen at fit time: z\. Feature names seen at fit time, yet now missing: a\. Pass the columns",
        ),
        (lambda d: d.drop(columns=["b", "c"]), "yet now missing: b, c. Pass"),
        (lambda d: d[list("bacdef")], "must be in the same order as they were in fit. Pass"),
        (lambda d: d.set_axis(list("aabcde"), axis=1), "more than one column of each of these names: a"),
    ],
)
def test_the_error_names_columns_that_differ_from_those_of_the_fit(
    change: Callable[[pd.DataFrame], pd.DataFrame], reported: str
) -> None:
    model = make_capsule().fit(FRAME, LABELS)
    with pytest.raises(ValueError, match=reported):
        model.predict(change(FRAME))


@pytest.mark.parametrize("kind", ["Arrow", "polars lazy"])
def test_frames_that_are_read_piece_by_piece_have_column_names(kind: str) -> None:
    def make(frame: pd.DataFrame) -> Any:
        if kind == "Arrow":
            return pytest.importorskip("pyarrow").Table.from_pandas(frame)
        return pytest.importorskip("polars").from_pandas(frame).lazy()

    model = make_capsule().fit(make(FRAME), LABELS)
    assert model.feature_names_in_.tolist() == list("abcdef")
    np.testing.assert_array_equal(model.predict(make(FRAME)), model.predict(FRAME))
    with pytest.raises(ValueError, match="must be in the same order"):
        model.predict(make(FRAME[list("bacdef")]))


# -- data frames ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "reported"),
    [
        (FRAME.assign(a=pd.Timestamp("2020")), "column 'a' holds values of type datetime64.*dates by"),
        (FRAME.assign(b=pd.Categorical(["x", "y", "z"] * 20)), "column 'b' holds values of type category"),
        (FRAME.assign(c="x"), "column 'c' holds 'x' in row 0, but features are numbers"),
        (FRAME[[]], r"data frame of shape \(60, 0\), without columns"),
    ],
)
def test_the_error_names_a_column_without_numbers(frame: pd.DataFrame, reported: str) -> None:
    with pytest.raises(DataError, match=reported):
        make_capsule().fit(frame, LABELS)


def test_numeric_columns_of_any_type_are_accepted() -> None:
    frame = FRAME.assign(
        a=FRAME["a"].astype(object), b=pd.array([1, 2, 3] * 20, dtype="Int64"), c=[True, False] * 30
    )
    plain = frame.astype("f8").to_numpy()
    np.testing.assert_array_equal(
        make_capsule().fit(frame, LABELS).W_, make_capsule().fit(plain.astype("f4"), LABELS).W_
    )


def test_the_error_names_a_polars_column_without_numbers() -> None:
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "b": ["x", "y", "x", "y"], "c": [True] * 4})
    with pytest.raises(DataError, match="column 'b' holds values of type String"):
        make_capsule().fit(frame, [0, 1, 0, 1])
    make_capsule().fit(frame.drop("b"), [0, 1, 0, 1])


# -- labels and weights --------------------------------------------------------------------------------------


def test_labels_in_xarray_match_rows_in_numpy() -> None:
    xr = pytest.importorskip("xarray")
    model = make_capsule().fit(ROWS, xr.DataArray(LABELS))
    np.testing.assert_array_equal(model.W_, make_capsule().fit(ROWS, LABELS).W_)
    assert model.score(ROWS, xr.DataArray(LABELS)) == model.score(ROWS, LABELS)


@pytest.mark.parametrize("kind", ["string", "Int64", "object"])
def test_the_error_names_the_row_of_a_missing_pandas_label(kind: str) -> None:
    values = LABELS if kind == "Int64" else np.array(list("abc"), dtype=object)[LABELS]
    y = pd.Series(values).astype(kind)
    y[3] = pd.NA
    for learn in (make_capsule().fit, lambda x, y: make_capsule().partial_fit(x, y, classes=["a", "b", "c"])):
        with pytest.raises(DataError, match="the label of row 3 is missing. Label or drop"):
            learn(ROWS, y)


@pytest.mark.parametrize("make", [list, lambda y: np.array(y, dtype=object), pd.Series])
def test_a_label_that_ends_in_nul_is_refused(make: Callable[[list[str]], Any]) -> None:
    y = make([["a", "a\0", "c"][code] for code in LABELS])
    with pytest.raises(DataError, match=r"the label of row 20 is 'a\\x00', which ends in the character NUL"):
        make_capsule().fit(ROWS, y)


def test_partial_fit_refuses_weights_that_are_all_0() -> None:
    none, ds = np.zeros(60), sl.Dataset.from_arrays(ROWS, LABELS, sample_weight=np.zeros(60))
    model = make_capsule().partial_fit(ROWS, LABELS, classes=[0, 1, 2])
    for call in (
        lambda: make_capsule().partial_fit(ROWS, LABELS, classes=[0, 1, 2], sample_weight=none),
        lambda: model.partial_fit(ROWS, LABELS, sample_weight=none),
        lambda: model.partial_fit(ds),
    ):
        with pytest.raises(DataError, match="sample_weight is 0 for all rows"):
            call()


def test_classes_of_another_type_than_the_labels_are_refused() -> None:
    model = sl.LinearMixtureClassifier(n_components=2, n_dims=2)
    with pytest.raises(DataError, match=r"labels of type int64, classes=\['0', '1', '2'\].*both as"):
        model.partial_fit(ROWS, LABELS, classes=["0", "1", "2"])


@pytest.mark.parametrize(
    "ask",
    [
        lambda: sl.HierarchicalCompositionalNetwork().infer(ROWS),
        lambda: sl.LinearMixture().n_dims_,
        lambda: sl.LinearMixtureClassifier().temperature_,
        lambda: sl.CapsuleRegression().W_,
        lambda: sl.CapsuleRegression().capsule_dim_,
    ],
)
def test_an_unfitted_model_raises_not_fitted_error(ask: Callable[[], Any]) -> None:
    with pytest.raises(NotFittedError, match="fit"):
        ask()
    assert not hasattr(sl.LinearMixture(), "n_dims_")


def test_the_error_of_object_arrays_recommends_a_conversion() -> None:
    y = LABELS.astype(object)
    y[5] = np.float64(1)
    with pytest.raises(ValueError, match=r"Unknown label type.*that of row 0 is 0 \(int\).*y.astype\(int\)"):
        make_capsule().fit(ROWS, y)


def test_complex_weights_are_refused_in_a_short_message() -> None:
    with pytest.raises(ValueError, match="^Complex data not supported: sample_weight holds.{,40}$"):
        make_capsule().fit(ROWS, LABELS, sample_weight=np.ones(60) + 1j)


# -- arrays that are read in pieces --------------------------------------------------------------------------


def test_zarr_scalars_and_groups_are_refused_with_their_name(tmp_path: Path) -> None:
    scalar = zarr.create_array(str(tmp_path / "s"), shape=(), dtype="f4")
    group = zarr.open_group(str(tmp_path / "g"), mode="w")
    group.create_array("rows", data=ROWS)
    with pytest.raises(DataError, match=r"x has shape \(\)"):
        make_capsule().fit(scalar, LABELS)
    with pytest.raises(DataError, match=r"X is a zarr group.*\(rows\), for example group\['rows'\]"):
        make_capsule().fit(group, LABELS)
    (tmp_path / "e").mkdir()
    with pytest.raises(DataError, match="is an empty folder"):
        sl.open_dataset(tmp_path / "e")
    with pytest.raises(DataError, match="is a zarr array, not a saved model"):
        sl.load_model(tmp_path / "s")


def test_the_error_names_a_dask_chunk_of_another_shape() -> None:
    rows = da.from_array(ROWS, chunks=(25, 6))
    with pytest.raises(DataError, match="sparse blocks .coo_matrix.*CSR"):
        make_capsule().fit(rows.map_blocks(sp.coo_matrix), LABELS)
    short = rows.map_blocks(lambda block: block[:-1], dtype="f4")
    with pytest.raises(
        DataError, match=r"rows 0 to 24 .*has shape \(24, 6\), but the shape of the array implies \(25, 6\)"
    ):
        make_capsule().fit(short, LABELS)


def test_the_error_names_a_dask_array_of_unknown_length() -> None:
    rows, labels = da.from_array(ROWS, chunks=(25, 6)), da.from_array(LABELS, chunks=25)
    columns = rows.T[rows.T[:, 0] > -100].T
    with pytest.raises(DataError, match="dask array x has an unknown number of columns"):
        make_capsule().fit(columns, LABELS)
    with pytest.raises(DataError, match=r"dask array y has an unknown number of rows.*y.compute_chunk"):
        make_capsule().fit(rows, labels[labels >= 0])
