"""A job file names the outputs of its rows; invalid outputs are refused before work starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent.data import Dataset
from scalelatent.errors import DataError, JobError
from scalelatent.jobs.datasets import JobData, open_job_data, open_rows
from scalelatent.jobs.resolve import resolve

N = 40
V = np.random.default_rng(0).integers(0, 2, (N, 5)).astype("u1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    x = np.arange(N * 3.0).reshape(N, 3)
    Dataset.from_arrays(x).save(folder / "x")
    Dataset.from_arrays(x + 1000).save(folder / "other")
    Dataset.from_arrays(x, V[::-1].copy()).save(folder / "own")
    Dataset.from_arrays(V).save(folder / "v")
    Dataset.from_arrays(1 - V).save(folder / "w")
    Dataset.from_arrays(V[:30]).save(folder / "short")
    Dataset.from_arrays(V[:, :4]).save(folder / "narrow")
    return folder


def open_rows_of(folder: Path, kind: str = "crbm", **data: str) -> JobData:
    named = {k: v if k.endswith("rows") else str(folder / v) for k, v in data.items()}
    stored = {"job": {"out": "run"}, "data": named, "model": {"kind": kind}}
    return open_job_data(resolve(stored, environ={}))


def read_outputs(ds: Any) -> np.ndarray:
    return ds.read_targets(0, len(ds))


def test_outputs_follow_the_rows(folder: Path) -> None:
    data = open_rows_of(
        folder,
        train="x",
        target="v",
        train_rows="5:25",
        validation="x",
        validation_rows="-10:",
        test="other",
        test_target="w",
        test_rows=":3",
    )
    assert data.validation is not None
    assert data.test is not None
    np.testing.assert_array_equal(read_outputs(data.train), V[5:25])
    np.testing.assert_array_equal(read_outputs(data.validation), V[-10:])
    np.testing.assert_array_equal(read_outputs(data.test), 1 - V[:3])
    assert data.train.read_x(0, 1)[0, 0] == 15
    held = open_rows_of(folder, train="x", target="v", validation="x", validation_target="w").validation
    assert held is not None
    np.testing.assert_array_equal(read_outputs(held), 1 - V)


def test_own_outputs_need_no_target(folder: Path) -> None:
    data = open_rows_of(folder, train="own", train_rows="0:9", validation="own", validation_rows="9:")
    assert data.validation is not None
    np.testing.assert_array_equal(read_outputs(data.train), V[::-1][:9])
    np.testing.assert_array_equal(
        read_outputs(open_rows(str(folder / "own"), "1:2", target=str(folder / "v"))), V[1:2]
    )


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        # The last ten rows of the two datasets are not the same rows, because one dataset has 30 rows.
        (
            {"target": "short", "train_rows": "-10:"},
            DataError,
            "has 40 rows, but its target of .*short has 30",
        ),
        ({"target": "v", "train_rows": "0:41"}, JobError, "exceed"),
        (
            {"target": "v", "validation": "other", "validation_target": "narrow"},
            JobError,
            "has 4 outputs per row, train has 5; give .data. validation_target",
        ),
        ({"target": "v", "test_target": "v"}, JobError, "test_target is given without .data. test"),
        (
            {"target": "v", "kind": "mbn"},
            JobError,
            "target = .* kind 'mbn' learns no outputs; remove the key",
        ),
        (
            {"validation": "x", "validation_target": "v", "kind": "capsule"},
            JobError,
            "validation_target = .* kind 'capsule'",
        ),
        ({"target": "nowhere"}, DataError, "nowhere"),
    ],
)
def test_invalid_targets_are_refused(
    folder: Path, data: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_rows_of(folder, train="x", **data)
