"""`client=` accepts a cluster of Dask in place of a client, and refuses closed or asynchronous clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def dask_cluster() -> Iterator[Any]:
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 2


def test_a_cluster_is_accepted_as_client(dask_cluster, rows, tmp_path: Path) -> None:
    from distributed import default_client

    model = sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0)
    assert model.plan(*rows, client=dask_cluster)["resources"]["workers"] == 1
    here = sl.CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0).fit(*rows).predict(rows[0])
    np.testing.assert_array_equal(model.fit(*rows, client=dask_cluster).predict(rows[0]), here)
    written = model.transform(rows[0], out=tmp_path / "codes.zarr", client=dask_cluster)
    np.testing.assert_array_equal(written.read_x(0, 60), model.transform(rows[0]).astype(np.float32))
    search = sl.Search(model, {"capsule_dim": [1, 2]}, cv=2).fit(*rows, client=dask_cluster)
    assert search.best_params_["capsule_dim"] in (1, 2)
    assert str(dask_cluster.status) == "Status.running"
    with pytest.raises(ValueError, match="No clients found"):
        default_client()


@pytest.mark.parametrize("given", ["tcp://127.0.0.1:8786", 3])
def test_objects_that_are_neither_cluster_nor_client_are_refused(rows, given) -> None:
    with pytest.raises(TypeError, match="neither a distributed.Client nor a running cluster"):
        sl.CapsuleRegression().fit(*rows, client=given)


def test_asynchronous_clients_are_refused_at_once(dask_cluster, rows) -> None:
    from distributed import Client

    async def call() -> None:
        async with Client(processes=False, asynchronous=True, dashboard_address=None) as client:
            sl.CapsuleRegression().fit(*rows, client=client)

    with pytest.raises(TypeError, match="is asynchronous.*asyncio.to_thread"):
        asyncio.run(call())
    with Client(dask_cluster, set_as_default=False) as client:
        pass
    with pytest.raises(sl.errors.RunError, match="is closed; create a new one"):
        sl.CapsuleRegression().fit(*rows, client=client)
