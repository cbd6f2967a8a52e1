"""The plan of a bootstrap network: the peak that it names holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import scalelatent as sl

FIT = """
import json, sys
import scalelatent as sl
from scalelatent.jobs.workers import peak_bytes
ds = sl.open_dataset(sys.argv[1])
options = {"n_clusterings": 32, "k1": 400, "n_classes": 100, "n_components": 5}
model = sl.MultilayerBootstrapNetwork(random_state=0, n_jobs=2, **options)
plan = model.plan(ds)
model.fit(ds, run_dir=sys.argv[2])
print(json.dumps({"peak": peak_bytes(), "plan": plan["peak_bytes_per_worker"], "ks": model.ks_}))
"""
N = 60_000


def _documents(rng: np.random.Generator) -> sp.csr_array:
    columns = (2000 * rng.random((N, 40)) ** 3).astype(np.int32)
    return sp.csr_array((np.ones(columns.size, "f4"), columns.ravel(), np.arange(N + 1) * 40), (N, 2000))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.slow
def test_the_peak_of_a_fit_stays_under_its_plan(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    x = _documents(rng) if kind == "sparse" else rng.random((N, 400), dtype=np.float32)
    sl.Dataset.from_arrays(x).save(tmp_path / "rows.zarr")
    done = subprocess.run(
        [sys.executable, "-c", FIT, str(tmp_path / "rows.zarr"), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["ks"] == [400, 200]
    assert measured["peak"] < measured["plan"] < 3 * measured["peak"]
