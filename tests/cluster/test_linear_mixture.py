"""Mixtures on a cluster have the bits of one process, also if workers are killed or a fit resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import Dataset, LinearMixture, LinearMixtureClassifier
from scalelatent.engine.callbacks import Callback
from tests.helpers import HookLog

ENGINE = {"block_rows": 100, "leaf_rows": 200, "checkpoint_passes": 1}
SMALL: dict[str, Any] = {"n_components": 3, "n_dims": 3, "max_iter": 2, "random_state": 0, "n_jobs": 1}
FIELDS = ("means_", "bases_", "variances_", "noise_", "weights_")


def make_classifier(**more: Any) -> LinearMixtureClassifier:
    tangents = {"tangents": ("shift-x", "thickness"), "image_shape": (8, 8)}
    return LinearMixtureClassifier(**{**SMALL, **tangents, "recognition": "tangent-distance", **more})


def assert_same(a: Any, b: Any) -> None:
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert [record["objective"] for record in a.history_] == [record["objective"] for record in b.history_]


@pytest.fixture(scope="module")
def labelled_digits(rows: Any) -> Dataset:
    return rows.train[:3000]


@pytest.fixture(scope="module")
def undisturbed(labelled_digits: Dataset) -> LinearMixtureClassifier:
    return make_classifier().fit(labelled_digits, engine=ENGINE)


class KillWorker(Callback):
    """Callback that kills a worker at the first progress report of each given stage (part of a fit)."""

    def __init__(self, client: Any, *stages: str) -> None:
        self.client, self.left = client, set(stages)

    def on_progress(self, info: dict[str, Any]) -> None:
        if info["stage"] in self.left:
            self.left.remove(info["stage"])
            os.kill(sorted(self.client.run(os.getpid).values())[0], signal.SIGKILL)


class StopWithin(Callback):
    """Callback that raises KeyboardInterrupt in the first unfinished pass after pass ``after``."""

    def __init__(self, after: int) -> None:
        self.after, self.passes = after, 0

    def on_pass_end(self, info: dict[str, Any]) -> None:
        self.passes = info["pass"]

    def on_progress(self, info: dict[str, Any]) -> None:
        if self.passes >= self.after and info["rows_done"] < info["rows_total"]:
            raise KeyboardInterrupt


def test_a_cluster_gives_the_bits_and_outputs_of_one_process(
    client: Any, labelled_digits: Dataset, undisturbed: Any, tmp_path: Path
) -> None:
    m = make_classifier().fit(labelled_digits, client=client, run_dir=tmp_path / "run", engine=ENGINE)
    assert_same(m, undisturbed)
    assert m.temperature_ == undisturbed.temperature_
    out = m.predict(labelled_digits[:500], out=tmp_path / "out.zarr", client=client)
    np.testing.assert_array_equal(out.read_y(0, 500), undisturbed.predict(labelled_digits[:500]))
    np.testing.assert_array_equal(out.read_x(0, 500), undisturbed.predict_proba(labelled_digits[:500]))


@pytest.mark.parametrize(
    "options",
    [
        {"likelihood": "ppca", "assignment": "soft"},
        {"algorithm": "stepwise", "n_epochs": 1, "batch_rows": 600},
    ],
)
def test_densities_on_a_cluster_have_the_bits_of_one_process(
    client: Any, labelled_digits: Dataset, tmp_path: Path, options: Any
) -> None:
    d = LinearMixture(**{**SMALL, **options})
    engine = {key: ENGINE[key] for key in ("block_rows", "leaf_rows")}
    if "algorithm" in options:
        engine = {"run_rows": 100}
    assert_same(
        d.fit(labelled_digits, client=client, run_dir=tmp_path, engine=engine),
        LinearMixture(**d.get_params()).fit(labelled_digits, engine=engine),
    )


def test_killed_workers_change_no_bit(
    mortal_cluster: Any, labelled_digits: Dataset, undisturbed: Any, tmp_path: Path
) -> None:
    kill = KillWorker(mortal_cluster, "linear_mixture_sample", "linear_mixture_em")
    assert_same(
        make_classifier().fit(
            labelled_digits, client=mortal_cluster, run_dir=tmp_path, engine=ENGINE, callbacks=kill
        ),
        undisturbed,
    )
    assert not kill.left


def test_a_resume_within_a_pass_changes_no_bit(
    client: Any, labelled_digits: Dataset, undisturbed: Any, tmp_path: Path
) -> None:
    engine = {**ENGINE, "checkpoint_seconds": 0.0}
    how: dict[str, Any] = {"client": client, "run_dir": tmp_path, "engine": engine}
    stop, reported = StopWithin(4), HookLog()
    with pytest.raises(KeyboardInterrupt):
        make_classifier().fit(labelled_digits, callbacks=stop, **how)
    assert 4 <= stop.passes < undisturbed.n_iter_
    m = make_classifier().fit(labelled_digits, resume=True, callbacks=reported, **how)
    assert_same(m, undisturbed)
    # The resumed fit starts one pass later if the workers had finished the interrupted pass.
    assert reported.infos("pass_end")[0]["pass"] - stop.passes in (1, 2)
    assert not list((tmp_path / "engine" / "sets").glob("*"))
