"""A model of another package is fitted, saved, searched and run in jobs like the models of scalelatent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.cluster import KMeans

import scalelatent as sl
from scalelatent import Dataset
from scalelatent.contract import kinds
from scalelatent.engine.callbacks import Callback

TOY = Path(__file__).parent / "toy"


@pytest.fixture(autouse=True)
def install_toy(monkeypatch: pytest.MonkeyPatch):
    """Add the folder of the package kmeans_toy to the import path of this process and its children."""
    monkeypatch.syspath_prepend(str(TOY))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), os.environ.get("PYTHONPATH", "")]))
    kinds.load_all_kinds.cache_clear()
    yield
    kinds.load_all_kinds.cache_clear()


@pytest.fixture
def rows_path(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    y = np.arange(600) % 3
    x = np.array([[0, 0], [4, 0], [0, 4]])[y] + rng.normal(size=(600, 2))
    Dataset.from_arrays(x.astype(np.float32), y).save(str(tmp_path / "rows.zarr"))
    return str(tmp_path / "rows.zarr")


def make_model(**params: Any) -> Any:
    return kinds.find_kind("kmeans").estimator_class()(**{"n_clusters": 3, "random_state": 0, **params})


class StopAfter(Callback):
    """Callback that raises KeyboardInterrupt at the end of pass number ``passes``."""

    def __init__(self, passes: int) -> None:
        self.passes = passes

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] == self.passes:
            raise KeyboardInterrupt


def test_the_toy_model_is_kmeans(rows_path: str) -> None:
    ds = sl.open_dataset(rows_path)
    model = make_model().fit(ds)
    x = ds.read_x(0, len(ds))
    start = model.centroids_[np.argsort(model.centroids_[:, 0])]
    peer = KMeans(3, init=model.centroids_, n_init=1).fit(x)
    np.testing.assert_allclose(np.sort(peer.cluster_centers_, axis=0), np.sort(start, axis=0), atol=1e-4)
    np.testing.assert_array_equal(peer.predict(x), model.transform(ds).argmax(axis=1))


def test_the_toy_model_is_saved_loaded_resumed_and_planned(rows_path: str, tmp_path: Path) -> None:
    ds, run = sl.open_dataset(rows_path), str(tmp_path / "run")
    whole = make_model().fit(ds)
    with pytest.raises(KeyboardInterrupt):
        make_model().fit(ds, run_dir=run, callbacks=StopAfter(2))
    model = make_model().fit(ds, run_dir=run, resume=True)
    assert model.n_iter_ == whole.n_iter_ > 2
    np.testing.assert_array_equal(model.centroids_, whole.centroids_)
    model.save(str(tmp_path / "model.zarr"))
    loaded = sl.load_model(str(tmp_path / "model.zarr"))
    np.testing.assert_array_equal(loaded.transform(ds), model.transform(ds))
    assert model.plan(ds)["seconds"]["estep"] > 0


def test_the_toy_model_is_searched(rows_path: str) -> None:
    search = sl.Search(make_model(), {"n_clusters": [1, 3]}, cv=2).fit(sl.open_dataset(rows_path))
    assert search.best_params_ == {"n_clusters": 3}


def run_command(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "scalelatent", *arguments],
        capture_output=True, text=True, timeout=150, cwd=cwd, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


JOB = """
[job]
out = "run"
seed = 0
[data]
train = "rows.zarr"
test = "rows.zarr"
[model]
kind = "kmeans"
n_clusters = 3
"""


def test_jobs_fit_the_toy_model(rows_path: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert "kmeans" in run_command("--help", cwd=tmp_path)
    assert "n_clusters" in run_command("plan", "job.toml", cwd=tmp_path)
    run_command("fit", "job.toml", cwd=tmp_path)
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["state"] == "done"
    assert state["test_nmi"] > 0.7
    scores = json.loads(run_command("score", "run", "rows.zarr", "--json", cwd=tmp_path))
    assert scores["nmi"] == state["test_nmi"]
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "StreamedKMeans" in page
    assert "Objective against passes" in page
    assert "sl.load_model(" in page
    (tmp_path / "wrong.toml").write_text(JOB.replace("n_clusters", "n_cluster"))
    wrong = subprocess.run(
        [sys.executable, "-m", "scalelatent", "plan", "wrong.toml"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert "did you mean 'n_clusters'?" in wrong.stderr


@pytest.mark.cluster
def test_a_cluster_gives_the_same_bits(rows_path: str, tmp_path: Path) -> None:
    ds = sl.open_dataset(rows_path)
    alone = make_model().fit(ds, engine={"leaf_rows": 64, "block_rows": 32})
    engine = "[engine]\nleaf_rows = 64\nblock_rows = 32\n[cluster]\nworkers = 2\n"
    (tmp_path / "job.toml").write_text(JOB + engine)
    run_command("fit", "job.toml", cwd=tmp_path)
    np.testing.assert_array_equal(sl.load_model(str(tmp_path / "run")).centroids_, alone.centroids_)


@pytest.mark.cluster
def test_tasks_and_the_page_name_the_toy_model(rows_path: str, tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    from scalelatent.monitor import ClusterLog, install

    ds = sl.open_dataset(rows_path)
    workers = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    with workers, Client(workers) as client:
        assert not install(client)
        with ClusterLog(client, str(tmp_path), job="toy-1", model="kmeans", name="toy") as log:
            model = make_model().fit(
                ds, client=client, callbacks=[log], engine={"leaf_rows": 64, "block_rows": 32}
            )
        tasks = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.task_prefixes))
        base = str(client.dashboard_link).removesuffix("/status")
        with urllib.request.urlopen(f"{base}/scalelatent.json?job=toy-1", timeout=30) as answer:
            page = json.load(answer)
    assert any(name.startswith("kmeans_estep") for name in tasks)
    assert "kmeans" in [job["model"] for job in page["jobs"]]
    assert (page["job"]["model"], page["job"]["pass"]) == ("kmeans", model.n_iter_)
