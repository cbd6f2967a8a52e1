"""The type checker of a user accepts valid calls of scalelatent, and refuses invalid ones."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import scalelatent.typing

ROOT = Path(__file__).parents[1]
USER = """
import dask.array as da
import numpy as np
import pandas as pd
import polars as pl
import torch
import xarray as xr
import zarr
from distributed import Client, LocalCluster
from scipy.sparse import csr_array
from sklearn.model_selection import KFold

import scalelatent as sl

x, y = np.zeros((20, 3), "f4"), np.arange(20) % 2
frame, lazy = pd.DataFrame(x), pl.DataFrame({"a": [1.0], "b": [2.0]}).lazy()
stored = zarr.open_array("x.zarr", mode="r")
ds = sl.Dataset.from_arrays(x, y, sample_weight=np.ones(20))
sl.Dataset.from_dataframe(frame), sl.Dataset.from_dataframe(lazy, label="b"), ds.with_weight([1.0] * 20)
model = sl.CapsuleRegression(capsule_dim=2, random_state=np.random.default_rng(0))
model.fit(ds)
model.fit(x, y, sample_weight=[1.0] * 20, validation=(x, y), run_dir="run", engine={"block_rows": 256})
model.fit([[0.0, 1.0], [1.0, 0.0]], ["a", "b"], validation=ds)
model.fit(da.from_array(x), da.from_array(y)), model.fit(torch.zeros(20, 3), torch.zeros(20))
model.fit(xr.DataArray(x), pd.Series(y)), model.fit(frame, y.tolist()), model.fit(pl.DataFrame(x), y)
model.fit(csr_array(x), y), model.fit(np.memmap("x.npy", "f4", shape=(20, 3)), y), model.fit(lazy, y)
model.fit(stored, y)
with LocalCluster(n_workers=1) as cluster, Client(cluster) as client:
    model.fit(ds, client=client).transform(x, client=cluster)
model.predict(x), model.predict(frame), model.predict_proba(da.from_array(x)), model.transform(ds, out="h")
float(model.score(x, y)) + float(model.score(ds)) + float(model.score(csr_array(x), y.tolist(), [1.0] * 20))
model.plan(x, y, memory_limit="4GB")["stages"]
model.report("page", data=(x, y)), model.report("page", data=ds)
grid = {"capsule_dim": [1, 2]}
search = sl.Search(sl.CapsuleRegression(), grid, cv=KFold(3), scoring="accuracy", random_state=0)
search.fit(x, y, validation=None, groups=[0] * 20), sl.Search(model, [{"capsule_dim": 1}], cv=3).fit(ds)
pairs = [(np.arange(10), np.arange(10, 20))]
sl.Search(model, grid, cv=pairs, error_score="raise", scoring=lambda model, rows: 1.0).fit(x, y)
"""
REFUSED = """
model.fit(object())
model.fit(x, y, client="tcp://127.0.0.1:8786")
model.fit(x, y, resume="yes")
sl.Dataset.from_arrays(x, object())
ds.save("copy.zarr", chunk_row=3)
"""


def test_the_typed_names_exist():
    assert scalelatent.typing.__all__ == sorted(scalelatent.typing.__all__)
    assert all(hasattr(scalelatent.typing, name) for name in scalelatent.typing.__all__)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_a_users_type_checker_accepts_valid_calls_only(tmp_path):
    (tmp_path / "user.py").write_text(USER + REFUSED)
    (tmp_path / "mypy.ini").write_text("[mypy]\nignore_missing_imports = true\nfollow_imports = silent\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=850,
    )
    found = [line for line in done.stdout.splitlines() if ": error:" in line]
    first = USER.count("\n") + 2
    assert [int(line.split(":")[1]) for line in found] == list(range(first, first + 5)), done.stdout
