"""A search on a cluster equals the search in this process, bit by bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalelatent import Callback, CapsuleRegression, Dataset, Search, load_model
from scalelatent.jobs.datasets import open_job_data
from scalelatent.jobs.resolve import resolve
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import build_estimator
from scalelatent.jobs.submit import submit_job
from tests.estimators.crbm_cases import make_patterns
from tests.helpers import WITHOUT_REPORT, wait_for

ENGINE = {"block_rows": 64, "leaf_rows": 128}
BASE = CapsuleRegression(max_iter=5, nu_schedule=[(0.5, 2), (0.0, 1)], random_state=0, n_jobs=1)
GRID = [
    {"capsule_dim": 1},
    {"capsule_dim": 2, "max_iter": 3},
    {"capsule_dim": 2, "projection": 12},
    {"capsule_dim": 1, "architecture": "all_vs_all"},
]


class StopSearch(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] == self.at:
            raise KeyboardInterrupt


def assert_same(a: Search, b: Search) -> None:
    assert a.results_["mean_test_score"].tolist() == b.results_["mean_test_score"].tolist()
    assert a.results_["n_passes"].tolist() == b.results_["n_passes"].tolist()
    np.testing.assert_array_equal(a.best_estimator_.W_, b.best_estimator_.W_)
    keys = ("pass", "objective", "train_error", "validation_error")
    histories = [[[r[k] for k in keys] for r in s.best_estimator_.history_] for s in (a, b)]
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    "how",
    [
        "validation",
        pytest.param("folds", marks=pytest.mark.slow),
        pytest.param("halving", marks=pytest.mark.slow),
    ],
)
def test_a_search_on_a_cluster_has_the_same_results(
    client: Any, rows: SimpleNamespace, tmp_path: Path, how: str
) -> None:
    given: dict[str, Any] = {"halving": how == "halving", "min_passes": 2, "cv": 2}
    held = None if how == "folds" else rows.validation[:500]
    train, call = rows.train[:3000], {"engine": ENGINE, "validation": held}
    here = Search(BASE, GRID, **given).fit(train, **call)
    assert_same(Search(BASE, GRID, **given).fit(train, client=client, **call), here)
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Search(BASE, GRID, **given).fit(train, client=client, run_dir=folder, callbacks=StopSearch(3), **call)
    # The search that was interrupted on the cluster resumes in this process.
    assert_same(Search(BASE, GRID, **given).fit(train, run_dir=folder, resume=True, **call), here)
    assert [found.name for found in folder.rglob("*.zarr")] == ["model.zarr"]


def test_a_search_of_arrays_has_readable_task_names(
    client: Any, rows: SimpleNamespace, tmp_path: Path
) -> None:
    from distributed import get_task_stream

    given = (rows.x[:2000], rows.y[:2000])
    with get_task_stream(client=client) as stream:
        there = Search(BASE, GRID[:2], cv=2).fit(*given, client=client, engine=ENGINE)
    assert_same(there, Search(BASE, GRID[:2], cv=2).fit(*given, engine=ENGINE))
    names = {task["key"].split("-it")[0] for task in stream.data if "search" in task["key"]}
    assert {"search-4_estep", "search-4_mstep", "search-2_estep"} <= names


def test_a_submitted_search_fits_models_one_by_one(client: Any, tmp_path: Path) -> None:
    """A search of conditional RBMs stores the rows of each fold in the run folder, and deletes them."""
    x, v = make_patterns(240, 1)
    Dataset.from_arrays(x).save(tmp_path / "x.zarr")
    Dataset.from_arrays(v).save(tmp_path / "v.zarr")
    job = resolve(
        {
            "job": {"out": str(tmp_path / "run"), "seed": 2},
            "data": {"train": str(tmp_path / "x.zarr"), "target": str(tmp_path / "v.zarr")},
            "model": {"kind": "crbm", "n_epochs": 2, "learning_rate": 0.3},
            "search": {"grid": {"n_hidden": [2, 5]}, "cv": 2},
        },
        environ={},
    )
    client.run(exec, WITHOUT_REPORT)
    folder = RunFolder.open(submit_job(job, client=client).run)
    state = wait_for(lambda: (s := folder.read_state())["state"] in ("done", "failed") and s, 90)
    assert (state["state"], state["error"]) == ("done", None)
    here = Search(build_estimator(job), {"n_hidden": [2, 5]}, cv=2).fit(open_job_data(job).train)
    assert state["search"]["best_params"] == here.best_params_
    assert state["search"]["best_score"] == here.best_score_
    np.testing.assert_array_equal(load_model(folder.url).W_, here.best_estimator_.W_)
    assert not list((tmp_path / "run").rglob("train.zarr"))
