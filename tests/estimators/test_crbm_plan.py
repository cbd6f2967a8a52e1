"""A fit of a conditional RBM takes less memory than its plan says, also for four times as many rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import scalelatent as sl

SCRIPT = """
import json, sys
import scalelatent as sl
from scalelatent.deploy.probes import peak_bytes
ds = sl.open_dataset(sys.argv[1])
options = {"learner": sys.argv[3], "n_epochs": 1, "n_sweeps": 2, "batch_size": 160, "momentum": 0.5}
model = sl.ConditionalRBM(n_hidden=200, random_state=0, n_jobs=2, **options)
plan = model.plan(ds)
model.fit(ds, run_dir=sys.argv[2])
print(json.dumps({"peak": peak_bytes(), "plan": plan["peak_bytes_per_worker"]}))
"""


def measure_peak(folder: Path, rows: int, learner: str) -> dict[str, int]:
    rng = np.random.default_rng(0)
    x, v = rng.integers(0, 2, (rows, 500), dtype=np.uint8), rng.integers(0, 2, (rows, 400), dtype=np.uint8)
    sl.Dataset.from_arrays(x, v).save(folder / f"{rows}.zarr")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"{folder}/{rows}.zarr", f"{folder}/run-{rows}", learner],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("learner", ["mle-bp", "pcd"])
@pytest.mark.slow
def test_the_peak_of_a_fit_stays_under_its_plan(tmp_path: Path, learner: str) -> None:
    few, many = (measure_peak(tmp_path, rows, learner) for rows in (4_000, 16_000))
    assert many["peak"] < many["plan"] < 4 * many["peak"]
    # More rows take only the memory that the plan predicts for the cache of rows, plus at most 16 MiB.
    assert many["peak"] - few["peak"] < many["plan"] - few["plan"] + 16 * 2**20
