"""The plan: its numbers are those of the fit, its peak holds, what cannot fit is refused with a way out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scalelatent import CapsuleRegression, Dataset
from scalelatent.errors import PlanError

FIT = """
import json, sys
import scalelatent as sl
ds = sl.open_dataset(sys.argv[1])
model = sl.CapsuleRegression(capsule_dim=8, max_iter=3, projection=None, random_state=0, n_jobs=2)
plan = model.plan(ds)
model.fit(ds)
from scalelatent.jobs.workers import peak_bytes
peak = peak_bytes()
print(json.dumps({"peak": peak, "plan": plan["peak_bytes_per_worker"], "passes": len(model.history_)}))
"""


def _rows(n: int, p: int) -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset.from_arrays(rng.normal(size=(n, p)).astype(np.float32), np.arange(n) % 10)


def test_the_peak_of_a_fit_stays_under_its_plan(tmp_path: Path) -> None:
    _rows(40_000, 300).save(tmp_path / "rows.zarr")
    out = subprocess.run(
        [sys.executable, "-c", FIT, str(tmp_path / "rows.zarr")],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    measured = json.loads(out.stdout.splitlines()[-1])
    assert measured["passes"] == 3
    assert measured["peak"] < measured["plan"]


def test_numbers_are_those_of_the_model() -> None:
    plan = CapsuleRegression(capsule_dim=4).plan(_rows(5000, 300), validation=_rows(1000, 300))
    assert set(plan["stages"]) == {"svd", "moments", "estep"}
    estep = plan["stages"]["estep"]
    # sums (4) and rows of one member, and the residual moment of 40 dimensions over 196 directions.
    assert estep["statistic_bytes"] == 8 * (5 + 40 * 196)
    assert estep["rows"] == 6000
    assert plan["stages"]["moments"]["statistic_bytes"] == 8 * (10 * 196 * 196 + 20)
    assert plan["passes"] == {"at_least": 248, "at_most": 2000}
    assert plan["probe"]["seconds_per_pass"] > 0


def test_what_cannot_fit_is_refused_with_the_setting_that_would() -> None:
    wide = _rows(50, 4000)
    with pytest.raises(PlanError, match=r"4000 features.*set projection to at most \d+.*memory_limit"):
        CapsuleRegression(capsule_dim=2, projection=None).plan(wide, memory_limit="2GB")
    with pytest.raises(PlanError, match=r"capsule_estep.*lower capsule_dim"):
        CapsuleRegression(capsule_dim=500, architecture="all_vs_all", init="random", projection=None).plan(
            _rows(5000, 400), memory_limit="2GB"
        )


def test_too_many_tasks_are_refused() -> None:
    from scalelatent.engine.passes import make_stage
    from scalelatent.engine.plan import Resources, RowShape, describe_stage
    from scalelatent.models.capsule.moments import SecondMoments

    stage = make_stage(
        "capsule_moments", {"train": SecondMoments(4)}, {"train": RowShape(10**8, 4)}, "cpu", leaf_rows=2048
    )
    assert describe_stage(stage, Resources(2, 1, 2**32))["tasks_per_pass"] < 100
    with pytest.raises(PlanError, match=r"tasks a pass, above 10000: set \[engine\] leaf_rows"):
        describe_stage(stage, Resources(20_000, 1, 2**32))
