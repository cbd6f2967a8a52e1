"""Compositional networks on a cluster have the bits of one process, also if workers die or a fit resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import Callback, Dataset, HierarchicalCompositionalNetwork
from tests.models.hcn.test_inputs import draw_images

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*labels y are not learned from",
    "ignore:messages of",
    "ignore:all weights",
    "ignore:.*weights still changed",
)

X = draw_images(200)
# An image has class 1 if it has more ink than the median image, else 0; each fifth image is unlabelled (-1).
Y = np.where(np.arange(200) % 5 == 0, -1, (X.mean(axis=(1, 2)) > np.median(X.mean(axis=(1, 2)))).astype(int))
# Parameters of a fit by name. An online epoch has at least six steps, and a report comes after each third.
# The fit "kept" stores the messages of six leaves (fixed ranges of images); each step updates two leaves.
WAYS: dict[str, dict[str, Any]] = {
    "online": {"n_chains": 3, "chain_batches": 2, "warmup_rows": 40, "n_epochs": 2},
    "kept": {"online": False, "n_chains": 2, "damping": 0.5, "n_epochs": 4},
}
SEVERAL_LAYERS: dict[str, Any] = {"layers": [(3, 3)], "templates": 2}
WAYS |= {
    "several online": {
        **SEVERAL_LAYERS,
        "online": True,
        "inner_iterations": 3,
        "n_epochs": 2,
        "n_chains": 3,
        "p_weight": (0.5, 0.1),
        "template_passes": 2,
        "read_noise": (0.1, 1e-4),
    },
    "several kept": {**SEVERAL_LAYERS, "online": False, "n_chains": 2, "n_epochs": 4},
    "several by default": {**SEVERAL_LAYERS, "n_chains": 3, "n_epochs": 2},
}
ENGINE: dict[str, dict[str, Any]] = {
    "online": {"report_steps": 3},
    "kept": {"report_steps": 1, "leaf_rows": 30},
    "several online": {"report_steps": 3},
    "several kept": {"report_steps": 1, "leaf_rows": 30},
    "several by default": {"report_steps": 3},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.from_arrays(X, Y).save(tmp_path_factory.mktemp("hcn") / "x", chunk_rows=16)


def fit(way: str, images: Any, n_jobs: int = 1, **how: Any) -> HierarchicalCompositionalNetwork:
    params: dict[str, Any] = {"layers": [(3, (3, 2))], "p01": 1e-2, "p10": 1e-2, "p_sparsity": 1e-2}
    model = HierarchicalCompositionalNetwork(**params | WAYS[way], random_state=3, n_jobs=n_jobs)
    return model.fit(images[:160], validation=images[160:], engine=ENGINE[way], **how)


def assert_same(one: HierarchicalCompositionalNetwork, other: HierarchicalCompositionalNetwork) -> None:
    for a, b in zip([*one.beliefs_, *one.used_], [*other.beliefs_, *other.used_], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_equal(one.compression_, other.compression_)
    keys = ("pass", "steps", "weights_on", "weights_changed", "objective")
    keys = (
        *keys,
        "rows_at_rest" if one.templates is None else "rows_moved" if one.online is False else "pass",
    )
    reported = [[[record[key] for key in keys] for record in model.history_] for model in (one, other)]
    assert reported[0] == reported[1]


class KillWorker(Callback):
    """Callback that kills a worker process at the first report of a fit, which comes within an epoch."""

    def __init__(self, client: Any) -> None:
        self.victim = next(iter(client.run(os.getpid).values()))
        self.killed = False

    def on_report(self, record: dict[str, Any]) -> None:
        if not self.killed:
            self.killed = True
            os.kill(self.victim, signal.SIGKILL)


class StopAtReport(Callback):
    """Callback that interrupts a fit at its second report."""

    reports = 0

    def on_report(self, record: dict[str, Any]) -> None:
        self.reports += 1
        if self.reports == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("way", WAYS)
def test_a_cluster_gives_the_bits_of_one_process(
    way: str, client: Any, start_other_cluster: Any, images: Dataset, tmp_path: Path
) -> None:
    from distributed import Client

    alone = fit(way, images)
    assert alone.weights_[0].any()
    assert_same(alone, fit(way, images, n_jobs=3))
    assert_same(alone, fit(way, images, client=client, run_dir=tmp_path / "two"))
    if way == "online":
        with start_other_cluster(1) as cluster, Client(cluster, timeout=30, set_as_default=False) as one:
            assert_same(alone, fit(way, images, client=one, run_dir=tmp_path / "one"))
        arrays = Dataset.from_arrays(X, Y)
        assert_same(alone, fit(way, arrays, client=client, run_dir=tmp_path / "array"))
    out = alone.transform(images, out=tmp_path / "s.zarr", client=client)
    here = alone.transform(X)
    np.testing.assert_array_equal(out.read_x(0, 200).reshape(here.shape), here)


@pytest.mark.parametrize("way", WAYS)
def test_a_dead_worker_does_not_change_the_result(
    way: str, mortal_cluster: Any, images: Dataset, tmp_path: Path
) -> None:
    kill = KillWorker(mortal_cluster)
    model = fit(way, images, client=mortal_cluster, run_dir=tmp_path / "run", callbacks=kill)
    assert kill.killed
    assert_same(fit(way, images), model)


@pytest.mark.parametrize("way", WAYS)
def test_a_fit_resumes_on_another_cluster(way: str, client: Any, images: Dataset, tmp_path: Path) -> None:
    """A fit started in this process ends on a cluster, and the reverse."""
    alone = fit(way, images)
    for first, then in ((None, client), (client, None)):
        how: dict[str, Any] = {"run_dir": tmp_path / f"run-{first is None}"}
        with pytest.raises(KeyboardInterrupt):
            fit(way, images, client=first, callbacks=StopAtReport(), **how)
        assert_same(alone, fit(way, images, client=then, resume=True, **how))


def test_unknown_pixels_reach_the_workers(client: Any, tmp_path: Path) -> None:
    """A dataset cannot hold NaN, the mark of unknown pixels, so a fit replaces NaN by a finite number."""
    holes = np.where(np.random.default_rng(1).random(X.shape) < 0.1, np.nan, X)
    model = HierarchicalCompositionalNetwork([(3, (3, 2))], missing=float("nan"), n_epochs=1, random_state=0)
    beliefs = model.fit(holes).beliefs_[0]
    on_cluster = model.fit(holes, client=client, run_dir=tmp_path / "run").beliefs_[0]
    np.testing.assert_array_equal(on_cluster, beliefs)
