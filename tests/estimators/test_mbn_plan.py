"""The plan of a bootstrap network: the peak that it names holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import scalelatent as sl
from scalelatent.engine.mapwrite import PARTED_ROWS
from scalelatent.engine.plan import ALLOWED_SHARE, find_resources
from scalelatent.errors import PlanError
from scalelatent.estimators import mbn

FIT = """
import json, sys
import scalelatent as sl
from scalelatent.engine import mapwrite
from scalelatent.jobs.workers import peak_bytes
mapwrite.PARTED_ROWS = int(sys.argv[3])
ds = sl.open_dataset(sys.argv[1])
options = {"n_clusterings": 32, "k1": 400, "n_classes": 100, "n_components": 5}
model = sl.MultilayerBootstrapNetwork(random_state=0, n_jobs=2, **options)
plan = model.plan(ds)
model.fit(ds, run_dir=sys.argv[2])
print(json.dumps({"peak": peak_bytes(), "plan": plan["peak_bytes_per_worker"], "ks": model.ks_}))
"""
N = 60_000


def _rows(kind: str, n: int, entries: int) -> Any:
    rng = np.random.default_rng(0)
    if kind == "dense":
        return rng.random((n, 400), dtype=np.float32)
    columns = (2000 * rng.random((n, entries)) ** 3).astype(np.int32)
    pointers = np.arange(n + 1) * entries
    return sp.csr_array((np.ones(columns.size, "f4"), columns.ravel(), pointers), (n, 2000))


def _fit(place: Path, x: Any, block_rows: int) -> dict[str, Any]:
    """A fit in a process of its own: its peak in bytes, measured and planned."""
    place.mkdir()
    sl.Dataset.from_arrays(x).save(place / "rows.zarr")
    done = subprocess.run(
        [sys.executable, "-c", FIT, str(place / "rows.zarr"), str(place / "run"), str(block_rows)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert measured["ks"] == [400, 200]
    return measured


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.slow
def test_the_peak_of_a_fit_stays_under_its_plan(tmp_path: Path, kind: str) -> None:
    measured = _fit(tmp_path / "fit", _rows(kind, N, 40), PARTED_ROWS)
    assert measured["peak"] < measured["plan"] < 3 * measured["peak"]


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.slow
def test_the_peak_does_not_grow_with_the_rows(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what the cache keeps, and once there are more rows than a block."""
    monkeypatch.setenv("SCALELATENT_CACHE_BYTES", "0")
    few, many = (_rows(kind, n, 200) for n in (N // 2, 2 * N))
    peaks = [_fit(tmp_path / str(x.shape[0]), x, 8192)["peak"] for x in (few, many)]
    grown = sl.Dataset.from_arrays(many).nbytes - sl.Dataset.from_arrays(few).nbytes
    assert peaks[1] - peaks[0] < grown / 3


def test_centroids_of_half_of_the_rows_that_memory_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k1=None is refused by the fit itself, before anything runs; a smaller k1 fits."""
    x = np.random.default_rng(0).random((20_000, 400), dtype=np.float32)
    options: dict[str, Any] = {"n_clusterings": 4, "n_components": 2, "random_state": 0, "n_jobs": 1}
    half, small = (sl.MultilayerBootstrapNetwork(k1=k1, k_last=40, **options) for k1 in (None, 50))
    peaks = [m.plan(x)["peak_bytes_per_worker"] for m in (half, small)]
    limit = int(sum(peaks) / 2 / ALLOWED_SHARE)
    monkeypatch.setattr(mbn, "find_resources", lambda *_: find_resources(None, 1, limit))
    told = r"layer 1 \(k = 10000\) would need .* MiB a worker .*: lower k1 \(it is 10000\), or"
    with pytest.raises(PlanError, match=told):
        half.fit(x, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert small.fit(x, run_dir=tmp_path / "run").ks_ == [50]
