"""The plan of a bootstrap network predicts its disk space and an upper bound of its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import scalelatent as sl
from scalelatent.engine.mapwrite import COLUMN_BLOCK_ROWS, choose_column_block_rows
from scalelatent.engine.plan import ALLOWED_SHARE, MAX_TASKS, find_resources
from scalelatent.errors import PlanError
from scalelatent.estimators import base
from scalelatent.estimators.session import tile_layout
from scalelatent.models.mbn import fit as mbn_fit
from scalelatent.models.mbn.model.layers import Layer
from scalelatent.models.mbn.model.network import LayerCoder
from scalelatent.models.mbn.model.pca import StreamedPca
from scalelatent.storage.disk import LocalLocation

FIT_SCRIPT = """
import json, sys
import scalelatent as sl
from scalelatent.engine import mapwrite
from scalelatent.deploy.probes import peak_bytes
mapwrite.COLUMN_BLOCK_ROWS = int(sys.argv[3])
ds = sl.open_dataset(sys.argv[1])
options = {"n_clusterings": 32, "k1": 400, "decay": 0.5, "n_classes": 100, "n_components": 5}
model = sl.MultilayerBootstrapNetwork(random_state=0, n_jobs=2, **options)
plan = model.plan(ds)
model.fit(ds, run_dir=sys.argv[2])
print(json.dumps({"peak": peak_bytes(), "plan": plan["peak_bytes_per_worker"], "ks": model.ks_}))
"""
N_ROWS = 60_000


@pytest.fixture
def rows() -> sl.Dataset:
    return sl.Dataset.from_arrays(np.random.default_rng(0).random((600, 64), dtype=np.float32))


def make_network(**options: Any) -> sl.MultilayerBootstrapNetwork:
    return sl.MultilayerBootstrapNetwork(**{"n_clusterings": 12, "decay": 0.5, "n_classes": 20, **options})


class TwoPassSolver(StreamedPca):
    """Solver that stops after two passes, before the components have converged."""

    @classmethod
    def create(cls, counts: np.ndarray, n_rows: int, n_components: int, **_: Any) -> StreamedPca:
        return StreamedPca.create(counts, n_rows, n_components, max_iter=2)


def test_a_decay_whose_layers_need_too_much_disk_or_memory_is_refused(
    rows: sl.Dataset, tmp_path: Path, monkeypatch: Any
) -> None:
    needs = [make_network(decay=decay).plan(rows)["disk_bytes"] for decay in (0.5, 0.9)]
    auto = make_network(decay="auto", random_state=0)
    monkeypatch.setattr(LocalLocation, "free_bytes", lambda self: sum(needs) // 2)
    monkeypatch.setattr(mbn_fit, "choose_decay", lambda *_: 0.5)
    assert auto.fit(rows).ks_ == [300, 150, 75, 37]
    assert not hasattr(auto, "_check_decay")
    monkeypatch.setattr(mbn_fit, "choose_decay", lambda *_: 0.9)
    with pytest.raises(PlanError, match=r"lower k1 .*; decay='auto' has chosen 0.9: a smaller decay needs"):
        auto.fit(rows, run_dir=tmp_path / "run")
    monkeypatch.undo()
    memory = mbn_fit._estimate_memory
    grown = {"process": 1, "centroids": 2**50}
    monkeypatch.setattr(
        mbn_fit, "_estimate_memory", lambda layer, *rest: grown if layer.k == 270 else memory(layer, *rest)
    )
    assert auto.plan(rows)["largest_decay"] == 0.8
    monkeypatch.setattr(mbn_fit, "choose_decay", lambda *_: 0.9)
    with pytest.raises(PlanError, match=r"layer 2 \(k = 270\) would need.*; decay='auto' has chosen 0.9"):
        auto.fit(rows)
    # Layer 1 has the same size for each decay, so the error does not recommend a smaller decay.
    with pytest.raises(PlanError, match=r"layer 1 .*needs? .*lower k1[^;]*$"):
        auto.plan(rows, memory_limit="600MB")


def test_the_plan_of_an_automatic_decay_expects_a_usual_one_and_shows_the_range(rows: sl.Dataset) -> None:
    decays = "auto", 0.1, 0.5, 0.9
    plans = {decay: make_network(decay=decay, n_clusterings=30).plan(rows) for decay in decays}
    auto, half, largest = plans["auto"], plans[0.5], plans[0.9]
    assert auto["decay"] == 0.5
    assert auto["layers"].keys() == half["layers"].keys()
    assert auto["disk_bytes"] == largest["disk_bytes"] > half["disk_bytes"]
    assert auto["peak_bytes_per_worker"] == largest["peak_bytes_per_worker"]
    assert "at most" in auto["summary"]
    least, most = (auto[f"expected_seconds_at_{end}"] for end in ("least", "most"))
    assert least < auto["expected_seconds"] < most


def test_auto_excludes_decays_whose_layers_are_impossible() -> None:
    x = np.random.default_rng(0).random((300, 60), dtype=np.float32)
    options: dict[str, Any] = {"n_clusterings": 3, "k1": 100, "feature_fraction": 0.02, "n_classes": 2}
    with pytest.raises(ValueError, match="feature_fraction=0.02 of"):
        sl.MultilayerBootstrapNetwork(decay=0.9, **options).plan(x)
    assert sl.MultilayerBootstrapNetwork(decay="auto", **options).plan(x)["largest_decay"] < 0.9


def test_the_plan_counts_the_disk_space_of_each_folder(
    rows: sl.Dataset, tmp_path: Path, monkeypatch: Any
) -> None:
    reported = make_network().plan(rows)
    codes = 600 * 12 * 2
    assert reported["scratch_bytes"] == codes  # Codes of layer 3 are temporary; those of layers 1 and 2 stay.
    assert reported["run_bytes"] == reported["disk_bytes"] - codes
    assert make_network(keep_codes=True).plan(rows)["scratch_bytes"] == 0
    free = {"run": reported["run_bytes"], "scratch": reported["scratch_bytes"]}
    monkeypatch.setattr(
        LocalLocation, "free_bytes", lambda self: free.get(self.url.rsplit("/", 1)[-1], 2**60)
    )
    places: dict[str, Any] = {"run_dir": tmp_path / "run", "engine": {"scratch": str(tmp_path / "scratch")}}
    make_network(random_state=0).fit(rows, **places)
    with pytest.raises(PlanError, match="centroids and codes would take .*run has .*another run_dir"):
        make_network().fit(rows, run_dir=tmp_path / "run")
    for name, what in (("scratch", "codes of lower layers"), ("run", "centroids and the codes that stay")):
        free[name] -= 1
        with pytest.raises(PlanError, match=rf"{what} would take .*{name} has .*: choose another {name}"):
            make_network().fit(rows, **places)


def test_components_that_do_not_converge_are_reported(rows: sl.Dataset, monkeypatch: Any) -> None:
    monkeypatch.setattr(mbn_fit, "KERNEL_ROWS", 0)
    monkeypatch.setattr(mbn_fit, "StreamedPca", TwoPassSolver)
    with pytest.warns(ConvergenceWarning, match=r"the 3 components .* not converged in 2 passes \(residual"):
        make_network(n_components=3, random_state=0).fit(rows)


def test_the_schedule_of_an_unfitted_automatic_decay_is_refused() -> None:
    with pytest.raises(NotFittedError, match="decay='auto' is chosen by fit"):
        make_network(decay="auto").schedule(600)


def test_only_tiles_of_very_many_rows_are_larger() -> None:
    tasks = set()
    for n in (10**3, 10**6, 10**8, 10**9, 10**10):
        for row_bytes in (64, 784, 20_000):
            for width in (10, 400):
                layer = Layer(1, 0, n, width, 1000, 784, 0, 0.5, "euclidean", False, "uint8")
                coder = LayerCoder(layer, None, 0, width)
                rows = -(-n // -(-n // choose_column_block_rows(row_bytes, coder)))
                work = rows * coder.flops_per_row() + coder.column_flops()
                wanted = min(2e11, max(5e9, -(-n // rows) * width * work / 16))
                columns = max(1, min(round(wanted / work), width))
                count = -(-n // rows) * -(-width // columns)
                tiles = tile_layout(n, row_bytes, coder)
                if count <= MAX_TASKS:
                    assert tiles == {"shard_rows": rows, "tile_columns": columns}
                assert -(-n // tiles["shard_rows"]) * -(-width // tiles["tile_columns"]) <= MAX_TASKS
                tasks.add(count > MAX_TASKS)
    assert tasks == {True, False}


@pytest.mark.parametrize("dtype", ["int8", "bool", "uint16", "float64"])
def test_the_plan_counts_converted_rows(dtype: str) -> None:
    """Each of the three threads converts the rows of its task to four bytes per value."""
    rest = []
    for kind in (dtype, "float32"):
        x = sl.Dataset.from_arrays(np.ones((5000, 300), kind))
        reported = make_network(k1=4, n_classes=2, n_jobs=3).plan(x)
        rest.append(reported["peak_bytes_per_worker"] - reported["cache_bytes"])
    assert rest[0] - rest[1] == pytest.approx(3 * 4 * 5000 * 300, rel=0.05)


def make_rows(kind: str, n: int, entries: int) -> Any:
    rng = np.random.default_rng(0)
    if kind == "dense":
        return rng.random((n, 400), dtype=np.float32)
    columns = (2000 * rng.random((n, entries)) ** 3).astype(np.int32)
    pointers = np.arange(n + 1) * entries
    return sp.csr_array((np.ones(columns.size, "f4"), columns.ravel(), pointers), (n, 2000))


def _fit(folder: Path, x: Any, block_rows: int) -> dict[str, Any]:
    """Fit in a process of its own; return its peak and planned memory in bytes, and ``ks_`` of the model."""
    folder.mkdir()
    sl.Dataset.from_arrays(x).save(folder / "rows.zarr")
    done = subprocess.run(
        [sys.executable, "-c", FIT_SCRIPT, str(folder / "rows.zarr"), str(folder / "run"), str(block_rows)],
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
    measured = _fit(tmp_path / "fit", make_rows(kind, N_ROWS, 40), COLUMN_BLOCK_ROWS)
    assert measured["peak"] < measured["plan"] < 3 * measured["peak"]


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.slow
def test_the_peak_grows_little_with_the_rows(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, more rows take at most a third of their own size as additional memory."""
    monkeypatch.setenv("SCALELATENT_CACHE_BYTES", "0")
    few, many = (make_rows(kind, n, 200) for n in (N_ROWS // 3, 2 * N_ROWS))
    peaks = [_fit(tmp_path / str(x.shape[0]), x, 8192)["peak"] for x in (few, many)]
    grown = sl.Dataset.from_arrays(many).nbytes - sl.Dataset.from_arrays(few).nbytes
    assert peaks[1] - peaks[0] < grown / 3


def test_centroids_of_half_of_the_rows_that_do_not_fit_in_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit refuses k1=None (half of the rows) before work starts, and accepts k1=50."""
    x = np.random.default_rng(0).random((20_000, 400), dtype=np.float32)
    options: dict[str, Any] = {"n_clusterings": 4, "n_components": 2, "random_state": 0, "n_jobs": 1}
    half, small = (sl.MultilayerBootstrapNetwork(decay=0.5, k1=k1, k_last=40, **options) for k1 in (None, 50))
    peaks = [m.plan(x)["peak_bytes_per_worker"] for m in (half, small)]
    limit = int(sum(peaks) / 2 / ALLOWED_SHARE)
    monkeypatch.setattr(base, "find_resources", lambda *_: find_resources(None, 1, limit))
    reported = r"layer 1 \(k = 10000\) would need .* MiB a worker .*: lower k1 \(it is 10000\), or"
    with pytest.raises(PlanError, match=reported):
        half.fit(x, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert small.fit(x, run_dir=tmp_path / "run").ks_ == [50]
