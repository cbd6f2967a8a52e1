"""Bootstrap networks on a cluster have the bits of one process, also if workers die within a layer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import scalelatent as sl
from scalelatent.engine import mapwrite, rowsets
from scalelatent.estimators import session
from scalelatent.models.mbn import fit as mbn_fit

OPTIONS: dict[str, Any] = {"n_clusterings": 6, "decay": 0.5, "k1": 200, "n_components": 4, "n_classes": 10}


@pytest.fixture(autouse=True)
def use_small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide outputs into tasks of 500 rows and one clustering.

    The process of the fit alone divides the work, so these constants are changed in no other process.
    """
    monkeypatch.setattr(mapwrite, "COLUMN_BLOCK_ROWS", 500)
    monkeypatch.setattr(session, "MAX_TASK_FLOPS", 1.0)
    monkeypatch.setattr(rowsets, "SMALL_BYTES", 0)
    monkeypatch.setattr(mbn_fit, "KERNEL_ROWS", 0)


def _fit(x: Any, **more: Any) -> sl.MultilayerBootstrapNetwork:
    return sl.MultilayerBootstrapNetwork(**OPTIONS, random_state=3).fit(x, **more)


def assert_same(model: Any, other: Any) -> None:
    assert model.ks_ == other.ks_ == [200, 100, 50, 25]
    np.testing.assert_array_equal(model.codes(), other.codes())
    np.testing.assert_array_equal(model.components_, other.components_)


@pytest.mark.parametrize("kind", ["dense", "csr", "memory"])
def test_a_cluster_gives_the_bits_of_one_process(client: Any, rows: Any, tmp_path: Path, kind: str) -> None:
    x = rows.x[:1600]
    given: Any = sl.Dataset.from_arrays(sp.csr_array(x) if kind == "csr" else x)
    given = given if kind == "memory" else given.save(tmp_path / "x.zarr")
    model, alone = _fit(given, client=client, run_dir=tmp_path / "run"), _fit(x)
    assert_same(model, alone)
    out = model.transform(given, out=tmp_path / "z.zarr", client=client)
    np.testing.assert_array_equal(out.read_x(0, 1600), alone.transform(x))


def test_workers_killed_within_a_layer_change_no_bit(
    start_other_cluster: Any, rows: Any, tmp_path: Path
) -> None:
    from distributed import Client

    x = rows.train[:1600]

    class Kill(sl.Callback):
        def __init__(self) -> None:
            self.left = {"mbn_gather-l1", "mbn_code-l2", "mbn_code-l3"}

        def on_progress(self, info: dict[str, Any]) -> None:
            if info["stage"] in self.left:
                self.left.remove(info["stage"])
                os.kill(sorted(client.run(os.getpid).values())[0], signal.SIGKILL)

    cluster = start_other_cluster(2)
    try:
        with Client(cluster, timeout=30, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            kill = Kill()
            model = _fit(x, client=client, run_dir=tmp_path / "run", callbacks=kill)
            assert not kill.left
            assert_same(model, _fit(x))
    finally:
        cluster.close(timeout=60)
