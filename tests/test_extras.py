"""If a package is missing, the error names the extra of scalelatent that installs the package."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.registry import _registry as known

import scalelatent as sl
from scalelatent import data
from scalelatent.deploy.security import make_certificates
from scalelatent.engine.backend import CupyBackend
from scalelatent.errors import ScalelatentError
from scalelatent.monitor.tracking import MlflowTracking
from scalelatent.storage import objects

ROOT = Path(__file__).parents[1]
X = np.random.default_rng(0).normal(size=(40, 3)).astype("f4")


def make_model() -> Any:
    return sl.CapsuleRegression(capsule_dim=2, max_iter=1, random_state=0, n_jobs=1).fit(X, np.arange(40) % 2)


def transform_to_frame(_: Path) -> Any:
    return make_model().set_output(transform="polars").transform(X)


def start_slurm_cluster(folder: Path) -> Any:
    file = ROOT / "cluster" / "slurm" / "jobqueue_cluster.py"
    spec = importlib.util.spec_from_file_location("jobqueue_cluster", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_cluster(module.parse([str(folder)]))


# Each entry: extra of pyproject.toml, package of this extra, and a call that needs the package.
CALLS: list[tuple[str, str, Callable[[Path], Any]]] = [
    ("arrow", "pyarrow", lambda folder: data.import_parquet(folder / "t.parquet", folder / "out")),
    ("arrow", "pyarrow", lambda folder: data.import_csv(folder / "t.csv", folder / "out")),
    ("arrow", "pyarrow", lambda _: data.Dataset.from_dataframe({"a": [1.0]})),
    ("azure", "adlfs", lambda _: data.open_dataset("az://c/a", storage_options={"account_name": "me"})),
    ("cuda12", "cupy", lambda _: CupyBackend()),
    ("gs", "gcsfs", lambda _: data.open_dataset("gs://bucket/a.zarr")),
    ("hdf5", "h5py", lambda folder: data.import_hdf5(folder / "a.h5", folder / "out")),
    ("hdf5", "h5py", lambda folder: data.import_mat(folder / "a.mat", folder / "out")),
    ("mlflow", "mlflow", lambda _: MlflowTracking()),
    ("onnx", "onnx", lambda folder: make_model().to_onnx(folder / "m.onnx")),
    ("polars", "polars", transform_to_frame),
    ("s3", "s3fs", lambda _: data.open_dataset("s3://bucket/a.zarr")),
    ("slurm", "dask_jobqueue", start_slurm_cluster),
    ("tls", "cryptography.hazmat.primitives", lambda folder: make_certificates(folder / "tls")),
    ("torch", "torch", lambda _: sl.CompressiveMBN().fit(X, X)),
]
# Extras without a call above: for clusters that users start, for the other CUDA version, for contributors.
OTHERS = {"k8s", "cuda13", "bench", "docs", "test"}


@pytest.mark.parametrize(("extra", "package", "call"), CALLS)
def test_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, package: str, call: Callable[[Path], Any]
) -> None:
    # The test needs the start of an HDF5 file only. A MATLAB 7.3 file is an HDF5 file after a header.
    head = b"MATLAB 7.3 MAT-file".ljust(512)
    for name in ("a.h5", "a.mat"):
        (tmp_path / name).write_bytes((head if name == "a.mat" else b"") + b"\x89HDF\r\n\x1a\n")
    monkeypatch.setitem(sys.modules, package, None)
    for protocol in ("s3", "gs", "az"):
        monkeypatch.delitem(known, protocol, raising=False)
    objects.forget_connections()
    files = sorted(tmp_path.iterdir())
    with pytest.raises(ScalelatentError) as error:
        call(tmp_path)
    assert f"scalelatent[{extra}]" in str(error.value)
    assert sorted(file for file in tmp_path.iterdir() if file.name != "tls") == files


def test_every_extra_is_needed_by_a_test() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {extra for extra, _, _ in CALLS} == set(project["optional-dependencies"]) - OTHERS
