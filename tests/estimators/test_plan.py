"""A plan has the sizes of a fit and an upper bound of its memory, and refuses impossible fits with advice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent import CapsuleRegression, Dataset
from scalelatent.errors import PlanError

FIT_SCRIPT = """
import json, sys
import scalelatent as sl
ds = sl.open_dataset(sys.argv[1])
options = {"max_iter": 3, "n_epochs": 3, "projection": None, "random_state": 0, "n_jobs": 2}
model = sl.CapsuleRegression(capsule_dim=8, algorithm=sys.argv[2], **options)
plan = model.plan(ds)
model.fit(ds)
from scalelatent.deploy.probes import peak_bytes
peak = peak_bytes()
print(json.dumps({"peak": peak, "plan": plan["peak_bytes_per_worker"], "passes": len(model.history_)}))
"""


def make_rows(n: int, p: int) -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset.from_arrays(rng.normal(size=(n, p)).astype(np.float32), np.arange(n) % 10)


@pytest.mark.parametrize("algorithm", ["em", "stepwise"])
@pytest.mark.slow
def test_the_peak_of_a_fit_stays_under_its_plan(tmp_path: Path, algorithm: str) -> None:
    make_rows(40_000, 300).save(tmp_path / "rows.zarr")
    out = subprocess.run(
        [sys.executable, "-c", FIT_SCRIPT, str(tmp_path / "rows.zarr"), algorithm],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    measured = json.loads(out.stdout.splitlines()[-1])
    assert measured["passes"] == 3
    assert measured["peak"] < measured["plan"]


def test_planned_sizes_are_those_of_the_model() -> None:
    model = CapsuleRegression(architecture="multiclass", capsule_dim=4, algorithm="em")
    plan = model.plan(make_rows(5000, 300), validation=make_rows(1000, 300))
    assert set(plan["stages"]) == {"svd", "moments", "estep"}
    estep = plan["stages"]["estep"]
    # The float64 numbers are four sums (log-loss, errors, active rows, weight), the number of rows, and
    # products of 10 x 4 residuals with 197 columns: 196 of the default projection, and an intercept.
    assert estep["statistic_bytes"] == 8 * (5 + 40 * 197)
    assert estep["rows"] == 6000
    assert plan["stages"]["moments"]["statistic_bytes"] == 8 * (10 * 197 * 197 + 20)
    assert plan["passes"] == {"at_least": 248, "expected": 546, "at_most": 2000}
    assert plan["seconds_per_pass"] > 0


def test_stepwise_em_has_a_plan_of_its_own(tmp_path: Path) -> None:
    ds = make_rows(9000, 64).save(tmp_path / "rows.zarr")
    given = {"architecture": "multiclass", "capsule_dim": 4, "n_epochs": 7, "n_chains": 2, "n_jobs": 1}
    model = CapsuleRegression(algorithm="stepwise", **given)
    plan = model.plan(ds, validation=make_rows(100, 64))
    assert set(plan["stages"]) == {"moments", "stepwise", "validation"}
    own, weights = plan["stages"]["stepwise"], 40 * 65
    # The float64 numbers are four sums of the only member, a model of all classes (log-loss, errors, active
    # rows, weight), the numbers of all rows and of rows of its classes, and the products (``weights``).
    assert own["statistic_bytes"] == 8 * (6 + weights)
    assert own["steps_per_pass"] * own["batch_rows"] >= 9000
    assert plan["passes"] == {"at_least": 7, "expected": 7, "at_most": 7}
    assert own["memory_bytes"]["rows of the buffers"] > 0.5 * ds.nbytes
    assert plan["scratch_bytes"] == 0
    assert plan["seconds_per_pass"] > 0
    buffered = model.plan(ds, engine={"run_rows": 8, "buffer_runs": 2})
    assert buffered["stages"]["stepwise"]["buffer_rows"] == 16


@pytest.mark.parametrize(
    ("n_classes", "dim", "architecture"),
    [(2, 2, "multiclass"), (3, 2, "one_vs_all"), (3, [1, 2, 3], "multiclass")],
)
def test_plan_and_fit_choose_an_architecture(n_classes: int, dim: Any, architecture: str) -> None:
    x, y = np.random.default_rng(0).normal(size=(90, 5)), np.arange(90) % n_classes
    model = CapsuleRegression(capsule_dim=dim, n_epochs=1, random_state=0)
    assert model.plan(x, y)["architecture"] == architecture
    assert model.fit(x, y).architecture_ == architecture
    named = CapsuleRegression(architecture=architecture, capsule_dim=dim, n_epochs=1, random_state=0)
    np.testing.assert_array_equal(model.W_, named.fit(x, y).W_)
    assert model.architecture is None


MODELS: dict[str, Any] = {
    "capsule": CapsuleRegression(capsule_dim=2),
    "stepwise": CapsuleRegression(capsule_dim=2, algorithm="stepwise"),
    "linear_mixture": sl.LinearMixtureClassifier(n_components=2, n_dims=2),
    "crbm": sl.ConditionalRBM(n_hidden=4),
    "mbn": sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=3, k1=10, n_classes=3),
    "hcn": sl.HierarchicalCompositionalNetwork([(3, 3)]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_plans_of_all_models_have_the_same_keys(kind: str) -> None:
    x = np.random.default_rng(0).integers(0, 2, (60, 8, 8)).astype(np.uint8)
    flat, labels = x.reshape(60, -1), np.arange(60) % 3
    given = {"crbm": (flat, flat), "mbn": (flat,), "hcn": (x,)}.get(kind, (flat, labels))
    plan = MODELS[kind].plan(*given)
    assert plan.keys() >= {
        "stages", "resources", "seconds", "expected_seconds", "passes", "seconds_per_pass", "disk_bytes",
        "peak_bytes_per_worker", "cache_bytes", "checkpoint_bytes", "scratch_bytes", "summary", "shorter",
        "predicting_seconds_per_row",
    }  # fmt: skip
    assert list(plan["passes"]) == ["at_least", "expected", "at_most"]
    assert 1 <= plan["passes"]["at_least"] <= plan["passes"]["expected"] <= plan["passes"]["at_most"]
    assert plan["seconds_per_pass"] > 0
    # Programs read a plan by these names. Other names, with sizes and types in them, identify stored
    # measurements and must not appear in a plan.
    named = [*plan, *plan["seconds"], *plan["stages"]]
    assert [name for name in named if re.search(r"\d\d|x\d", name)] == []


def test_passes_of_a_fit_with_tol_are_a_lower_bound() -> None:
    rows = make_rows(600, 20)
    model = CapsuleRegression(capsule_dim=2, max_iter=500, nu_schedule=None, tol=10.0)
    assert model.plan(rows)["passes"] == {"at_least": 2, "expected": 500, "at_most": 500}
    assert model.fit(rows).n_iter_ == 2
    scheduled = CapsuleRegression(
        algorithm="em", capsule_dim=2, tol=10.0, nu_schedule=[(0.5, 9), (0.2, 9), (0.0, 9)]
    )
    assert scheduled.plan(rows)["passes"]["at_least"] == 6 <= scheduled.fit(rows).n_iter_


def test_a_plan_does_not_change_the_model() -> None:
    rows = make_rows(600, 20)
    model = CapsuleRegression(capsule_dim=2, max_iter=2).fit(rows)
    before = vars(model).copy()
    model.plan(np.ones((40, 7)), np.arange(40) % 2)
    assert vars(model) == before


def test_a_plan_is_for_the_enclosing_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.deploy import clusters
    from scalelatent.jobs.planning import PlannedCluster
    from scalelatent.jobs.spec import ClusterSection

    cluster = PlannedCluster.from_section(ClusterSection(workers=3, threads=5, memory_limit="3GiB"))
    monkeypatch.setattr(clusters, "current_client", lambda: cluster)
    assert CapsuleRegression().plan(make_rows(600, 20))["resources"] == {
        "workers": 3, "threads": 5, "memory": 3 * 2**30,
    }  # fmt: skip


def test_the_plan_uses_as_many_cores_as_the_fit() -> None:
    from dask.system import cpu_count

    plan = CapsuleRegression(capsule_dim=2, n_jobs=-1).plan(make_rows(600, 20))
    assert plan["resources"]["threads"] == cpu_count()


def test_an_impossible_fit_is_refused_with_a_possible_setting() -> None:
    wide = make_rows(50, 4000)
    with pytest.raises(PlanError, match=r"4000 features.*set projection to at most \d+.*memory_limit"):
        CapsuleRegression(capsule_dim=2, projection=None).plan(wide, memory_limit="2GB")
    with pytest.raises(PlanError, match=r"capsule_estep.*lower capsule_dim"):
        options = {"architecture": "all_vs_all", "init": "random", "projection": None, "algorithm": "em"}
        CapsuleRegression(capsule_dim=500, **options).plan(make_rows(5000, 400), memory_limit="2GB")


def test_too_many_tasks_are_refused() -> None:
    from scalelatent.engine.passes import make_stage
    from scalelatent.engine.plan import Resources, describe_stage
    from scalelatent.engine.rates import RowShape
    from scalelatent.reductions.moments import SecondMoments

    stage = make_stage(
        "capsule_moments", {"train": SecondMoments(4)}, {"train": RowShape(10**8, 4)}, "cpu", leaf_rows=2048
    )
    assert describe_stage(stage, Resources(2, 1, 2**32))["tasks_per_pass"] < 100
    with pytest.raises(PlanError, match=r"tasks a pass, above 10000: set \[engine\] leaf_rows"):
        describe_stage(stage, Resources(20_000, 1, 2**32))
