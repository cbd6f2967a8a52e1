"""Jobs with a section [search] are planned, fitted, resumed and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import Dataset, Search, load_model
from scalelatent.errors import JobError
from scalelatent.jobs import runner, searching
from scalelatent.jobs.planning import plan_job
from scalelatent.jobs.resolve import resolve
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.searching import candidates_of
from scalelatent.jobs.spec import Job
from tests.estimators.crbm_cases import make_patterns
from tests.helpers import InterruptAt
from tests.jobs.test_end_to_end import run_command

MODELS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "capsule": ({"max_iter": 4, "nu_schedule": "none"}, {"capsule_dim": [1, 3], "tol": ["none", 0.1]}),
    "crbm": ({"n_hidden": 4, "n_epochs": 2, "learning_rate": 0.3}, {"n_hidden": [2, 5]}),
    "mbn": ({"n_clusterings": 50, "n_classes": 4, "k1": 20}, {"feature_fraction": [0.2, 0.8]}),
}


@pytest.fixture
def dataset_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with labelled rows, and with rows and outputs."""
    monkeypatch.chdir(tmp_path)
    x, v = make_patterns(240, 1)
    Dataset.from_arrays(x, v.sum(axis=1) % 4).save("rows.zarr")
    Dataset.from_arrays(x).save("x.zarr")
    Dataset.from_arrays(v).save("v.zarr")
    return tmp_path


def make_job(kind: str, search: dict[str, Any] | None = None, **data: str) -> Job:
    params, grid = MODELS[kind]
    rows = {"train": "x.zarr", "target": "v.zarr"} if kind == "crbm" else {"train": "rows.zarr"}
    return resolve(
        {
            "job": {"out": "run", "seed": 5},
            "data": {**rows, **data},
            "model": {"kind": kind, **params},
            "search": {"grid": grid, "cv": 2} if search is None else search,
        },
        environ={},
    )


def _fit(job: Job, **more: Any) -> Any:
    return runner.run_job(job, RunFolder.create(job.job.out, job), **more)


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_report", lambda *_: None)


@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("kind", MODELS)
def test_best_candidate_becomes_the_model_of_the_run(dataset_folder: Path, kind: str) -> None:
    job = make_job(kind)
    result = _fit(job)
    state, reported = result.folder.read_state(), json.loads((dataset_folder / "run/search.json").read_text())
    _, grid = MODELS[kind]
    assert job.search is not None
    base = runner.build_estimator(job)
    data = runner.open_job_data(job)
    search = Search(base, candidates_of(job), cv=2).fit(data.train)
    assert [one["score"] for one in reported["candidates"]] == search.cv_results_["mean_test_score"].tolist()
    assert len(reported["candidates"]) == int(np.prod([len(v) for v in grid.values()]))
    assert state["search"]["best_params"] == search.best_params_
    assert state["search"]["best_score"] == search.best_score_
    assert state["state"] == "done"
    saved = load_model(dataset_folder / "run")
    np.testing.assert_array_equal(saved.transform(data.train), search.best_estimator_.transform(data.train))
    assert RunFolder.open("run").read_job() == job


@pytest.mark.usefixtures("without_report", "dataset_folder")
@pytest.mark.parametrize("kind", MODELS)
def test_an_interrupted_search_job_resumes(kind: str, tmp_path: Path) -> None:
    job = make_job(kind)
    folder = RunFolder.create("run", job)
    with pytest.raises(KeyboardInterrupt):
        runner.run_job(job, folder, callbacks=[InterruptAt(5, "stage", "pass_end", "event")])
    assert folder.read_state()["state"] == "cancelled"
    runner.run_job(folder.read_job(), folder, resume=True)
    first = json.loads(Path("run/search.json").read_text())
    data = runner.open_job_data(job)
    search = Search(runner.build_estimator(job), candidates_of(job), cv=2).fit(data.train)
    assert [one["score"] for one in first["candidates"]] == search.cv_results_["mean_test_score"].tolist()


def test_command_line_plans_fits_and_reports_a_search(dataset_folder: Path) -> None:
    (dataset_folder / "job.toml").write_text(
        '[job]\nout = "run"\nseed = 1\n[data]\ntrain = "rows.zarr"\ntrain_rows = ":160"\n'
        'validation = "rows.zarr"\nvalidation_rows = "160:"\n[model]\nkind = "capsule"\nmax_iter = 4\n'
        '[search]\ngrid = { capsule_dim = [1, 2], momentum = [0.0, 0.9] }\nscoring = "balanced_accuracy"\n'
    )
    planned = run_command("plan", "job.toml", "--json", cwd=dataset_folder).json()
    assert planned["plan"]["search"] == {"candidates": 4, "folds": 1, "fits": 4}
    assert planned["job"]["search"]["grid"]["capsule_dim"] == [1, 2]
    assert not (dataset_folder / "run").exists()
    done = run_command("fit", "job.toml", "--json", cwd=dataset_folder).json()
    found = done["search"]
    assert (found["candidates"], found["folds"], found["scoring"]) == (4, 1, "balanced_accuracy")
    assert run_command("status", "run", "--json", cwd=dataset_folder).json()["search"] == found
    page = (dataset_folder / "run/report/index.html").read_text()
    assert "Search over 4 candidates" in page
    assert page.count("capsule_dim = ") >= 4
    assert f"{found['best_score']:.4f}" in page
    assert (dataset_folder / "run/report/candidates.png").exists()
    assert load_model(dataset_folder / "run").capsule_dim == found["best_params"]["capsule_dim"]


def test_plan_counts_the_memory_of_all_fits_in_a_shared_pass(dataset_folder: Path) -> None:
    def plan_peak_bytes(values: int, cv: int, **cluster: str) -> int:
        grid = {"momentum": [n / values for n in range(values)]}
        raw = {"job": {"out": "run"}, "data": {"train": "rows.zarr"}, "cluster": cluster}
        job = resolve(
            {**raw, "model": {"kind": "capsule", "algorithm": "em"}, "search": {"grid": grid, "cv": cv}}
        )
        return int(plan_job(job)["peak_bytes_per_worker"])

    few, many, most = plan_peak_bytes(1, 2), plan_peak_bytes(100, 2), plan_peak_bytes(100, 4)
    assert few < many < most
    # All fits together would exceed the limit of 900 MiB, so the plan divides them into groups.
    assert plan_peak_bytes(1000, 4, memory_limit="900MiB") < 0.75 * 900 * 2**20 < plan_peak_bytes(1000, 4)


@pytest.mark.parametrize(
    ("search", "data", "message"),
    [
        ({"cv": 3}, {}, r"\[search\] grid is missing"),
        ({"grid": {}}, {}, "write parameters with lists of values"),
        ({"grid": {"capsule_dim": 4}}, {}, r"capsule_dim = 4 is not a list of values"),
        ({"grid": {"capsul_dim": [4]}}, {}, "unknown parameter 'capsul_dim'.*did you mean 'capsule_dim'"),
        ({"grid": {"n_jobs": [4]}}, {}, r"n_jobs affects where or how a fit runs"),
        ({"grid": {"tol": [1]}, "cv": 1}, {}, r"\[search\] cv = 1: .*greater than or equal to 2"),
        ({"grid": {"tol": [1]}, "folds": 3}, {}, r"unknown key 'folds' in \[search\]"),
        (
            {"grid": {"tol": [1]}, "cv": 3},
            {"validation": "rows.zarr"},
            "cv = 3 and .*validation are both given",
        ),
    ],
)
def test_an_invalid_search_is_refused(search: dict[str, Any], data: dict[str, str], message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_job("capsule", search, **data)


@pytest.mark.usefixtures("dataset_folder")
def test_a_refused_search_creates_no_run_folder() -> None:
    for search in (
        {"grid": {"momentum": [0.5, 2.0]}, "cv": 2},
        {"grid": {"momentum": [0.5]}, "scoring": "roc", "cv": 2},
    ):
        with pytest.raises(JobError, match="momentum=2.0|scoring='roc'"):
            runner.run_new_job(make_job("capsule", search))
        assert not Path("run").exists()


def test_seed_draws_candidates_from_the_grid() -> None:
    grid = {"capsule_dim": list(range(1, 20)), "momentum": [0.0, 0.5]}
    drawn = [candidates_of(make_job("capsule", {"grid": grid, "n_iter": n})) for n in (3, 3, 1000)]
    assert drawn[0] == drawn[1]
    assert [len(one) for one in drawn] == [3, 3, 38]


def test_a_job_without_a_search_is_written_as_before() -> None:
    job = resolve(
        {"job": {"out": "run"}, "data": {"train": "a.zarr"}, "model": {"kind": "capsule"}}, environ={}
    )
    assert "search" not in job.to_dict()
    assert Job.from_dict(job.to_dict()) == job
    searched = make_job("mbn")
    assert Job.from_dict(json.loads(json.dumps(searched.to_dict()))) == searched
    assert searched.origins["search.grid"] == "job file"


def test_the_plan_includes_the_largest_candidates():
    """A plan of many candidates estimates a sample with the largest one, which sets the peak memory."""
    chosen = searching._candidates_to_plan([{"capsule_dim": dim, "tol": None} for dim in (1, 64, *[2] * 40)])
    assert 1 in chosen
    assert len(chosen) <= searching.PLANNED + 1
