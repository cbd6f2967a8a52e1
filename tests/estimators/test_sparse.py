"""Capsule regression gets the same bits from CSR rows as from dense rows, and refuses too wide rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from scalelatent import CapsuleRegression
from scalelatent.data import Dataset, open_dataset
from scalelatent.errors import DataError, PlanError


def _fit(*data: Any, **options: Any) -> CapsuleRegression:
    return CapsuleRegression(capsule_dim=3, max_iter=4, random_state=0, **options).fit(*data)


@pytest.mark.parametrize("projection", [None, 20])
def test_csr_rows_give_the_bits_of_dense_rows(digits: Any, projection: int | None, tmp_path: Path) -> None:
    x, y = digits[0].astype("f4"), digits[1]
    csr = sp.csr_array(x)
    stored = Dataset.from_arrays(csr, y).save(tmp_path / "ds", shard_rows=100)
    dense = _fit(x, y, projection=projection)
    held = Dataset.from_arrays(x, y).save(tmp_path / "dense")
    twin = _fit(held, projection=projection)
    for model, other in (
        (_fit(csr, y, projection=projection), dense),
        (_fit(sp.coo_matrix(x), y, projection=projection, n_jobs=1), dense),
        (_fit(stored, projection=projection), twin),
    ):
        assert (model.W_ == other.W_).all()
        assert (model.predict_proba(csr) == other.predict_proba(x)).all()
        assert (model.transform(stored) == other.transform(held)).all()
        assert model.score(stored) == other.score(x, y)
    out = dense.transform(stored, out=tmp_path / "out")
    assert (out.read_x(0, len(y)) == dense.transform(held)).all()
    assert (out.read_y(0, len(y)) == y).all()


def test_transform_keeps_multi_labels_and_targets(digits: Any, tmp_path: Path) -> None:
    x, y = digits[0][:200], digits[1][:200]
    model = _fit(x, y)
    topics = sp.csr_array(np.eye(10, dtype="u1")[y])
    for rows in (topics, topics.toarray()):
        ds = Dataset.from_arrays(sp.csr_array(x), rows).save(tmp_path / "in", overwrite=True)
        out = model.transform(ds, out=tmp_path / "out", overwrite=True)
        assert out.y_kind == ds.y_kind
        assert abs(out.read_y(0, 200) - rows).sum() == 0


def test_too_wide_rows_are_refused_before_work_starts() -> None:
    x = sp.random_array((60, 2_000_000), density=1e-5, rng=np.random.default_rng(0), format="csr")
    y = np.arange(60) % 2
    message = r"2000000 features need \d+ matrices of second moments of .* GiB.* only \d+ features fit\. Keep"
    for projection in ("auto", 50, None):
        model = CapsuleRegression(capsule_dim=2, projection=projection)
        with pytest.raises(PlanError, match=message):
            model.fit(x, y)
        with pytest.raises(PlanError, match=message):
            model.plan(x, y)
    narrow = CapsuleRegression(capsule_dim=2, max_iter=1).plan(x[:, :300], y)
    assert narrow["stages"]["svd"]["statistic_bytes"] == 8 * (301 * 301 + 4)


def test_plan_counts_the_bytes_of_csr(tmp_path: Path) -> None:
    x = sp.random_array((3000, 400), density=0.01, rng=np.random.default_rng(0), format="csr")
    ds = Dataset.from_arrays(x, np.arange(3000) % 2).save(tmp_path / "ds", shard_rows=1000)
    plan = CapsuleRegression(capsule_dim=2, projection=None).plan(ds)
    assert plan["cache_bytes"] == ds.nbytes < 3000 * 400
    assert plan["stages"]["moments"]["memory_bytes"]["pieces read ahead"] < 3000 * 400


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_invalid_values_and_kinds_are_refused(value: float) -> None:
    x = sp.csr_array(np.eye(4))
    with pytest.raises(DataError, match="learns from one label a row"):
        _fit(Dataset.from_arrays(x, np.eye(4)))
    x.data[2] = value
    with pytest.raises(DataError, match="row 2, feature 2 is"):
        _fit(x, [0, 1, 0, 1])


def test_info_reports_entries_and_density(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from scalelatent.cli import app

    x = sp.random_array((50, 20), density=0.1, rng=np.random.default_rng(0), format="csr")
    Dataset.from_arrays(x, sp.csr_array(np.eye(50, 6))).save(tmp_path / "ds")
    done = CliRunner().invoke(app, ["data", "info", str(tmp_path / "ds"), "--json"])
    found = json.loads(done.stdout)
    assert (found["nnz"], found["density"], found["nnz_per_row"]) == (100, 0.1, 2.0)
    assert (found["y_kind"], found["n_targets"]) == ("multilabel", 6)
    assert found["data_bytes"] == open_dataset(tmp_path / "ds").nbytes == 100 * 12 + 8 * 51
