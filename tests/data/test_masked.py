"""Arguments that take rows refuse masked arrays with masked entries, because these are no values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest

import scalelatent as sl
from scalelatent.data import Dataset, create_dataset
from scalelatent.errors import DataError

X = np.random.default_rng(0).integers(0, 2, (40, 10)).astype("f4")
Y = np.arange(40) % 2
MASKED = np.ma.array(X, mask=np.zeros_like(X, bool))
MASKED[7, 3] = np.ma.masked
MASKED_Y = np.ma.masked_equal(np.where(np.arange(40) == 9, -1, Y), -1)
WHERE = r"masked array: row 7, feature 3 is masked \(1 of "


def _write(x: Any, folder: Path) -> None:
    create_dataset(folder / "a", 40, (10,), "f4", shard_rows=40).write_shard(0, x)


def make_capsule() -> Any:
    return sl.CapsuleRegression(capsule_dim=2, max_iter=1, n_jobs=1)


ENTRY_POINTS: dict[str, Callable[[Any, Path], Any]] = {
    "from_arrays": lambda x, _: Dataset.from_arrays(x, Y),
    "list of rows": lambda x, _: Dataset.from_arrays(list(x), Y),
    "dask": lambda x, _: Dataset.from_arrays(da.from_array(x, chunks=(15, 10)), Y).read_x(0, 40),
    "save dask": lambda x, path: Dataset.from_arrays(da.from_array(x, chunks=40)).save(path / "a"),
    "writer": _write,
    "targets": lambda x, _: Dataset.from_arrays(X, x),
    "capsule": lambda x, _: make_capsule().fit(x, Y),
    "validation": lambda x, _: make_capsule().fit(X, Y, validation=(x, Y)),
    "mbn": lambda x, _: sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=2, k1=3).fit(x),
    "crbm": lambda x, _: sl.ConditionalRBM(n_hidden=2, n_epochs=1).fit(x, X),
    "crbm outputs": lambda x, _: sl.ConditionalRBM(n_hidden=2, n_epochs=1).fit(X, x),
    "partial_fit": lambda x, _: make_capsule().partial_fit(x, Y, classes=[0, 1]),
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_masked_rows_are_refused_with_row_and_feature(entry_point: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=WHERE):
        ENTRY_POINTS[entry_point](MASKED, tmp_path)
    assert not (tmp_path / "a/x/c").exists()


def test_predict_refuses_masked_rows() -> None:
    model = sl.CapsuleRegression(capsule_dim=2, max_iter=1, n_jobs=1).fit(X, Y)
    for call in (model.predict, model.transform, lambda x: model.score(x, Y)):
        with pytest.raises(DataError, match=WHERE):
            call(MASKED)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Dataset.from_arrays(X, MASKED_Y),
        lambda: Dataset.from_arrays(X, Y, sample_weight=MASKED_Y),
        lambda: make_capsule().fit(X, MASKED_Y),
        lambda: make_capsule().fit(X, Y, sample_weight=MASKED_Y),
    ],
)
def test_masked_labels_and_weights_are_refused_with_the_row(call: Callable[[], Any]) -> None:
    with pytest.raises(DataError, match="masked array: row 9 is masked"):
        call()


def test_an_array_without_masked_entries_is_accepted() -> None:
    whole = np.ma.array(X, mask=np.zeros_like(X, bool))
    np.testing.assert_array_equal(Dataset.from_arrays(whole, np.ma.array(Y)).read_x(0, 40), X)
