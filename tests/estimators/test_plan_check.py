"""`fit` refuses what `plan` refuses, and warns before the first pass over the rows if it will take long."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.engine import plan as engine_plan
from scalelatent.engine.plan import ALLOWED_SHARE, PROCESS_BYTES, Resources, find_resources
from scalelatent.engine.rates import Rates
from scalelatent.errors import LongFitWarning, PlanError
from scalelatent.estimators import base

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 20)).astype(np.float32)
Y = np.arange(400) % 4
V = (X > 0).astype(np.uint8)


def make_models() -> dict[str, tuple[Any, tuple[Any, ...], str]]:
    """Return a dict from name to a model, the rows of its fit, and the advice that shortens the fit."""
    em = {"capsule_dim": 2, "max_iter": 2}
    online = {"capsule_dim": 2, "n_epochs": 1}
    return {
        "capsule": (sl.CapsuleRegression(**em), (X, Y), "lower max_iter"),
        "stepwise": (sl.CapsuleRegression(algorithm="stepwise", **online), (X, Y), "lower n_epochs"),
        "mbn": (sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=50, n_classes=40), (X,), "lower k1"),
        "logistic": (sl.ConditionalRBM(learner="logistic", n_epochs=1), (V, V), "lower n_epochs"),
        "crbm": (sl.ConditionalRBM(n_hidden=3, n_epochs=1), (V, V), "lower n_epochs"),
    }


KINDS = list(make_models())

FIT_SCRIPT = """
import sys
import numpy as np
import scalelatent as sl
from scalelatent.deploy.probes import peak_bytes
x = np.random.default_rng(0).random((400, 64), dtype=np.float32)
models = {
    "capsule": lambda: sl.CapsuleRegression(capsule_dim=2, max_iter=2),
    "mixture": lambda: sl.LinearMixtureClassifier(n_components=3, n_dims=3, max_iter=2),
    "hcn": lambda: sl.HierarchicalCompositionalNetwork(layers=[(2, 4)], image_shape=(8, 8)),
}
given = (x > 0.5,) if sys.argv[1] == "hcn" else (x, np.arange(400) % 4)
models[sys.argv[1]]().set_params(n_jobs=1).fit(*given)
print(peak_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["capsule", "mixture", "hcn"])
def test_compiling_takes_less_memory_than_plans_assume(kind, tmp_path) -> None:
    command = [sys.executable, "-c", FIT_SCRIPT, kind]
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    out = subprocess.run(command, capture_output=True, text=True, timeout=170, check=True, env=env)
    peak = int(out.stdout.splitlines()[-1])
    assert 0.6 * PROCESS_BYTES < peak < PROCESS_BYTES, peak / 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_fit_refuses_exactly_what_plan_refuses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, _ = make_models()[kind]
    reported = model.set_params(n_jobs=1).plan(*rows)
    peak = reported["peak_bytes_per_worker"] - reported["cache_bytes"]
    for share, fits in ((1.001, True), (0.999, False)):
        small = find_resources(None, 1, int(share * peak / ALLOWED_SHARE))
        monkeypatch.setattr(base, "find_resources", lambda *_, small=small: small)
        if fits:
            model.plan(*rows)
            model.fit(*rows)
            continue
        refused = []
        for do in (model.plan, model.fit):
            with pytest.raises(PlanError, match=r"would need [\d,]+ MiB a worker") as error:
                do(*rows)
            refused.append(str(error.value))
        assert refused[0] == refused[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_fit_is_announced_before_it_starts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, shorter = make_models()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LongFitWarning)
        model.fit(*rows)
    for module in (base, engine_plan):
        monkeypatch.setattr(module, "LONG_SECONDS", 1e-9)
    monkeypatch.setattr(type(model), "_run_fit", lambda self, *_: pytest.fail("the fit started"))
    with (
        warnings.catch_warnings(),
        pytest.raises(LongFitWarning, match=rf"would take about .*: to .*{shorter}"),
    ):
        warnings.simplefilter("error", LongFitWarning)
        model.fit(*rows)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_measured_for_a_short_fit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, _ = make_models()[kind]
    monkeypatch.setattr(Rates, "get", lambda self, name, measure: pytest.fail(f"{name} was measured"))
    model.fit(*rows)


def test_a_bootstrap_network_with_half_of_many_rows_takes_long() -> None:
    """The planned network is that of the paper, for 60,000 images of 28 x 28 pixels and one thread."""
    x = np.broadcast_to(np.zeros((1, 784), np.uint8), (60_000, 784))
    model = sl.MultilayerBootstrapNetwork(n_classes=10, n_pools="paper", decay=0.5)
    rows, one_thread = sl.Dataset.from_arrays(x), Resources(1, 1, 2**36)
    reported = model._plan(engine_plan.Forecast("mbn", rows, None, one_thread, {}, measure=False))
    assert reported["expected_seconds"] > 3600
    assert "lower k1 (it is 30000)" in (engine_plan.long_fit(reported) or "")


def test_all_stages_are_in_the_plan(tmp_path: Path) -> None:
    x = RNG.normal(size=(3000, 300)).astype(np.float32)
    ds = sl.Dataset.from_arrays(x, np.arange(3000) % 5).save(tmp_path / "rows.zarr")
    reported = sl.CapsuleRegression(capsule_dim=2, max_iter=9).plan(ds[:2500], validation=ds[2500:])
    stages = {"looking at labels", "svd", "directions", "project-train", "project-validation"}
    assert set(reported["seconds"]) == stages | {"moments", "start", "estep", "temperature"}
    assert all(seconds > 0 for seconds in reported["seconds"].values())
    assert reported["expected_seconds"] == pytest.approx(sum(reported["seconds"].values()))
    assert reported["disk_bytes"] > reported["scratch_bytes"] == 3000 * 197 * 4
    assert reported["passes"] == {"at_least": 9, "expected": 9, "at_most": 9}


def test_a_schedule_without_a_fixed_number_of_passes_has_a_range() -> None:
    reported = sl.CapsuleRegression(capsule_dim=2, algorithm="em").plan(X, Y)
    least, most = reported["expected_seconds_at_least"], reported["expected_seconds_at_most"]
    assert least < reported["expected_seconds"] < most
    assert reported["passes"]["at_least"] < reported["passes"]["expected"] < reported["passes"]["at_most"]


def test_the_plan_counts_the_actual_cache(tmp_path: Path) -> None:
    ds = sl.Dataset.from_arrays(X, Y).save(tmp_path / "rows.zarr")
    model = sl.CapsuleRegression(capsule_dim=2, max_iter=2)
    cached = [model.plan(ds, engine={"cache": cache})["cache_bytes"] for cache in (0, "8KiB", "auto")]
    assert cached == [0, 8192, ds.nbytes]
