"""Estimators write run folders, resume interrupted fits, and call callbacks at documented events."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import Callback, CapsuleRegression, Dataset
from scalelatent.errors import RunError, ScalelatentError
from tests.helpers import HookLog, InterruptAt

Arrays = tuple[np.ndarray, np.ndarray]
OPTIONS: dict[str, Any] = {"capsule_dim": 2, "max_iter": 8, "random_state": 0, "n_jobs": 1}
SMALL = {"block_rows": 32, "leaf_rows": 64, "checkpoint_seconds": 0}


@pytest.fixture(scope="module")
def uninterrupted(digits: Arrays, held_out: Arrays) -> CapsuleRegression:
    return CapsuleRegression(projection=20, **OPTIONS).fit(*digits, validation=held_out, engine=SMALL)


def _fit(
    digits: Arrays, held_out: Arrays, folder: Path | None, callback: Any = (), **more: Any
) -> CapsuleRegression:
    model = CapsuleRegression(projection=20, **{**OPTIONS, **more.pop("options", {})})
    return model.fit(
        *digits, validation=held_out, run_dir=folder, callbacks=callback, **{"engine": SMALL, **more}
    )


def assert_same(a: CapsuleRegression, b: CapsuleRegression) -> None:
    np.testing.assert_array_equal(a.W_, b.W_)
    np.testing.assert_array_equal(a.projection_, b.projection_)
    assert a.n_iter_ == b.n_iter_
    assert a.best_validation_error_ == b.best_validation_error_
    keys = ("pass", "objective", "train_error", "validation_error", "nu", "round")
    assert [[r[k] for k in keys] for r in a.history_] == [[r[k] for k in keys] for r in b.history_]


def test_callbacks_receive_all_events_in_order(digits: Arrays, held_out: Arrays, tmp_path: Path) -> None:
    log = HookLog()
    model = _fit(digits, held_out, tmp_path / "run", [log])
    assert log.reported[0][0] == "fit_start"
    assert log.reported[-1][0] == "fit_end"
    start = log.infos("fit_start")[0]
    assert (start["rows"], start["features"], start["members"], start["max_iter"], start["seed"]) == (
        600,
        64,
        10,
        8,
        0,
    )
    assert start["resumed_pass"] is None
    stages = [i["stage"] for i in log.infos("stage")]
    assert stages.index("capsule_svd") < stages.index("capsule_moments") < stages.index("capsule_estep")
    assert log.infos("pass_end") == model.history_
    assert [i["pass"] for i in log.infos("checkpoint")] == list(range(1, 9))
    for record in model.history_:
        assert {
            "pass",
            "stage",
            "objective",
            "train_error",
            "validation_error",
            "seconds",
            "rows",
            "bytes_read",
        } <= set(record)
        assert {"active_members", "nu", "round"} <= set(record)
    end = log.infos("fit_end")[0]
    assert end["passes"] == 8
    assert end["pass_seconds"] > 0


def test_a_users_callback_stops_the_fit(digits: Arrays) -> None:
    class StopBelowTenPercent(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> bool:
            return record["train_error"] < 0.1

    params: dict[str, Any] = {"architecture": "multiclass", "capsule_dim": 4, "nu_schedule": None}
    model = CapsuleRegression(**params, max_iter=300).fit(*digits, callbacks=StopBelowTenPercent())
    assert model.n_iter_ < 300
    errors = [r["train_error"] for r in model.history_]
    assert errors[-1] < 0.1
    assert all(e >= 0.1 for e in errors[:-1])


def test_a_run_folder_changes_no_bit(
    digits: Arrays, held_out: Arrays, tmp_path: Path, uninterrupted: CapsuleRegression
) -> None:
    assert_same(_fit(digits, held_out, tmp_path / "run"), uninterrupted)


@pytest.mark.parametrize(
    ("hook", "at"),
    [("progress", n) for n in range(0, 24, 4)]
    + [("pass_end", n) for n in (0, 3, 7)]
    + [("stage", n) for n in range(5)],
)
def test_an_interrupted_fit_resumes_to_the_same_bits(
    digits: Arrays, held_out: Arrays, tmp_path: Path, uninterrupted: CapsuleRegression, hook: str, at: int
) -> None:
    folder = tmp_path / "run"
    try:
        _fit(digits, held_out, folder, InterruptAt(at, hook))
        pytest.fail("the fit ended before it was interrupted")
    except KeyboardInterrupt:
        pass
    log = HookLog()
    assert_same(_fit(digits, held_out, folder, log, resume=True), uninterrupted)
    if hook == "pass_end":
        assert [r["pass"] for r in log.infos("pass_end")] == list(range(at + 2, 9))
        assert log.infos("fit_start")[0]["resumed_pass"] in (at + 1, None)


def test_a_resume_with_other_threads_gives_the_same_bits(
    digits: Arrays, held_out: Arrays, tmp_path: Path, uninterrupted: CapsuleRegression
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _fit(digits, held_out, tmp_path, InterruptAt(9, "progress"), options={"n_jobs": 3})
    assert_same(_fit(digits, held_out, tmp_path, resume=True), uninterrupted)


def test_a_resume_of_a_finished_fit_loads_it(
    digits: Arrays, held_out: Arrays, tmp_path: Path, uninterrupted: CapsuleRegression
) -> None:
    _fit(digits, held_out, tmp_path)
    log = HookLog()
    assert_same(_fit(digits, held_out, tmp_path, log, resume=True), uninterrupted)
    assert log.infos("pass_end") == []
    # All passes are done, so the resumed fit does not project the rows again.
    assert [i["stage"] for i in log.infos("stage")] == []
    assert [path.name for path in tmp_path.rglob("*.zarr")] == ["model.zarr"]


def test_a_resume_of_an_empty_folder_starts_a_fit(
    digits: Arrays, held_out: Arrays, tmp_path: Path, uninterrupted: CapsuleRegression
) -> None:
    assert_same(_fit(digits, held_out, tmp_path / "new", resume=True), uninterrupted)


def test_the_folder_of_another_fit_is_not_overwritten(
    digits: Arrays, held_out: Arrays, tmp_path: Path
) -> None:
    _fit(digits, held_out, tmp_path)
    with pytest.raises(RunError, match=r"already holds a fit.*resume=True.*another run_dir"):
        _fit(digits, held_out, tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"options": {"capsule_dim": 3}}, r"capsule_dim: \d -> 3"),
        ({"options": {"random_state": 1}}, r"seed: \d+ -> 1"),
        ({"options": {"max_iter": 9}}, r"max_iter: \d+ -> 9"),
        ({"engine": {**SMALL, "leaf_rows": 32}}, "leaf_rows"),
        ({"data": True}, "train data"),
        ({"held": True}, "validation data"),
    ],
)
def test_a_resume_of_another_fit_names_the_differences(
    digits: Arrays, held_out: Arrays, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _fit(digits, held_out, tmp_path, InterruptAt(2, "pass_end"))
    if change.pop("data", False):
        x = digits[0].copy()
        x[599, 63] ^= 1
        digits = x, digits[1]
    if change.pop("held", False):
        held_out = held_out[0], held_out[1][::-1].copy()
    with pytest.raises(RunError, match=rf"holds another fit \(.*{named}"):
        _fit(digits, held_out, tmp_path, resume=True, **change)


@pytest.mark.parametrize(
    "seed",
    [None, np.random.RandomState(1), np.random.default_rng(1)],
    ids=["None", "RandomState", "Generator"],
)
def test_a_resume_keeps_the_drawn_seed(digits: Arrays, tmp_path: Path, seed: Any) -> None:
    options = {**OPTIONS, "random_state": seed, "init": "random"}
    with pytest.raises(KeyboardInterrupt):
        CapsuleRegression(**options).fit(*digits, run_dir=tmp_path, callbacks=InterruptAt(2, "pass_end"))
    model = CapsuleRegression(**options).fit(*digits, run_dir=tmp_path, resume=True)
    again = CapsuleRegression(**{**options, "random_state": model.seed_}).fit(*digits)
    np.testing.assert_array_equal(model.W_, again.W_)


@pytest.mark.parametrize("algorithm", ["em", "stepwise"])
def test_a_resume_keeps_the_warm_start(digits: Arrays, tmp_path: Path, algorithm: str) -> None:
    """The run folder stores the initial weights and the projection, so any process can resume the fit."""
    options = {**OPTIONS, "projection": 12, "algorithm": algorithm, "n_epochs": 3, "warm_start": True}
    half = digits[0][:300], digits[1][:300]

    def fit_half() -> CapsuleRegression:
        return CapsuleRegression(**options).fit(*half)

    whole = fit_half().fit(*digits)
    with pytest.raises(KeyboardInterrupt):
        fit_half().fit(*digits, run_dir=tmp_path / "a", callbacks=InterruptAt(1, "pass_end"))
    resumed = CapsuleRegression(**options).fit(*digits, run_dir=tmp_path / "a", resume=True)
    np.testing.assert_array_equal(resumed.projection_, whole.projection_)
    np.testing.assert_array_equal(resumed.W_, whole.W_)
    # A fit that began without a warm start is resumed without one, even by a fitted estimator.
    cold = CapsuleRegression(**options).fit(*digits)
    with pytest.raises(KeyboardInterrupt):
        CapsuleRegression(**options).fit(*digits, run_dir=tmp_path / "b", callbacks=InterruptAt(1, "stage"))
    np.testing.assert_array_equal(fit_half().fit(*digits, run_dir=tmp_path / "b", resume=True).W_, cold.W_)


def test_temporary_rows_are_removed(digits: Arrays, held_out: Arrays, tmp_path: Path) -> None:
    stored = Dataset.from_arrays(*digits).save(tmp_path / "ds")
    CapsuleRegression(projection=10, **OPTIONS).fit(stored, run_dir=tmp_path / "run")
    left = [p for p in (tmp_path / "run").rglob("*") if p.name.endswith(".zarr") or p.name == "scratch"]
    assert left == [tmp_path / "run" / "model.zarr"]
    CapsuleRegression(projection=10, **OPTIONS).fit(
        stored, run_dir=tmp_path / "r2", engine={"scratch": str(tmp_path / "s")}
    )
    assert list((tmp_path / "s").rglob("*.zarr")) == []


def test_a_fit_that_fails_without_a_run_folder_leaves_nothing(digits: Arrays, tmp_path: Path) -> None:
    stored = Dataset.from_arrays(*digits).save(tmp_path / "ds")
    with pytest.raises(KeyboardInterrupt):
        CapsuleRegression(projection=10, **OPTIONS).fit(
            stored, engine={"scratch": str(tmp_path / "s")}, callbacks=InterruptAt(1, "pass_end")
        )
    assert list(tmp_path.glob("s/**/*.zarr")) == []


def test_projected_rows_are_removed_after_a_fit_without_a_run_folder(
    digits: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    stored = Dataset.from_arrays(*digits).save(tmp_path / "ds")
    model = CapsuleRegression(projection=10, **OPTIONS).fit(stored)
    np.testing.assert_array_equal(model.W_, CapsuleRegression(projection=10, **OPTIONS).fit(*digits).W_)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_fit_resumes_after_a_full_disk(
    digits: Arrays,
    held_out: Arrays,
    tmp_path: Path,
    uninterrupted: CapsuleRegression,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace, calls = os.replace, [0]

    def full(source: Any, target: Any) -> None:
        calls[0] += 1
        if calls[0] > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ScalelatentError, match="(?i)no space left") as raised:
        _fit(digits, held_out, tmp_path / "run")
    assert str(tmp_path / "run") in str(raised.value)
    monkeypatch.undo()
    assert_same(_fit(digits, held_out, tmp_path / "run", resume=True), uninterrupted)


def test_a_run_folder_that_cannot_be_created_is_refused(
    digits: Arrays, held_out: Arrays, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot create the run folder"):
        _fit(digits, held_out, tmp_path / "file" / "run")


FIT_SCRIPT = """
import sys, numpy as np
from sklearn.datasets import load_digits
from scalelatent import Callback, CapsuleRegression
class Tell(Callback):
    def on_pass_end(self, record):
        print(record["pass"], flush=True)
x, y = load_digits(return_X_y=True)
x = x.astype(np.uint8)
CapsuleRegression(capsule_dim=2, max_iter=400, random_state=0, n_jobs=2, nu_schedule=None).fit(
    x, y, run_dir=sys.argv[1], resume=True, callbacks=[Tell()],
    engine={"block_rows": 32, "leaf_rows": 64, "checkpoint_passes": 5})
"""


@pytest.mark.slow
def test_resume_after_a_kill_gives_the_same_bits(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    process = subprocess.Popen(
        [sys.executable, "-c", FIT_SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 23:
                break
        time.sleep(0.003)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
    x, y = load_digits(return_X_y=True)
    x = x.astype(np.uint8)
    engine = {"block_rows": 32, "leaf_rows": 64, "checkpoint_passes": 5}
    options = {"capsule_dim": 2, "max_iter": 400, "random_state": 0, "nu_schedule": None}
    log = HookLog()
    model = CapsuleRegression(n_jobs=1, **options).fit(
        x, y, run_dir=tmp_path, resume=True, callbacks=log, engine=engine
    )
    assert log.infos("pass_end")[0]["pass"] >= 20
    assert [r["pass"] for r in model.history_] == list(range(1, 401))
    expected = CapsuleRegression(n_jobs=1, **options).fit(x, y, engine=engine)
    np.testing.assert_array_equal(model.W_, expected.W_)


def make_crbm(x: Dataset, folder: Path | None, **more: Any) -> Any:
    from scalelatent import ConditionalRBM

    model = ConditionalRBM(n_hidden=3, n_epochs=3, batch_size=20, random_state=0, n_jobs=1)
    return model.fit(x, run_dir=folder, engine={"checkpoint_seconds": 0}, **more)


def make_capsule(x: Dataset, folder: Path | None, **more: Any) -> Any:
    engine = {**SMALL, "cache": 0}  # Without a cache, each pass reads the dataset.
    return CapsuleRegression(projection=None, **OPTIONS).fit(x, run_dir=folder, engine=engine, **more)


@pytest.mark.parametrize("kind", ["capsule", "crbm"])
def test_an_interrupted_fit_resumes_with_its_own_rows_after_an_append(
    digits: Arrays, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    from scalelatent.data import append_rows, open_dataset

    def opened() -> Dataset:
        ds = open_dataset(tmp_path / "x")
        return ds if kind == "capsule" else ds.with_target(open_dataset(tmp_path / "v"))

    fit = make_capsule if kind == "capsule" else make_crbm
    x, y = digits[0][:200], digits[1][:200] % 5
    names = {"x": Dataset.from_arrays(x, y), "v": Dataset.from_arrays((x[:, :10] > 7).astype("u1"))}
    for name, rows in names.items():
        rows.save(tmp_path / name, shard_rows=64)
    whole = fit(opened(), None)
    with pytest.raises(KeyboardInterrupt):
        fit(opened(), tmp_path / "run", callbacks=InterruptAt(1, "pass_end"))
    append_rows(tmp_path / "x", Dataset.from_arrays(x[:30], y[:30] + 5))
    append_rows(tmp_path / "v", names["v"][:30])
    model = fit(opened(), tmp_path / "run", resume=True)
    np.testing.assert_array_equal(model.W_, whole.W_)
    assert "the fit continues with rows 0:200" in caplog.text
    with pytest.raises(RunError, match="train data"):
        fit(opened()[10:], tmp_path / "run", resume=True)


def test_a_resume_on_a_mixture_of_two_datasets_is_refused(digits: Arrays, tmp_path: Path) -> None:
    """After the interruption, a shard of x is replaced by a shard of another dataset of the same shape."""
    import shutil

    from scalelatent.data import open_dataset
    from scalelatent.errors import ShardError

    x, y = digits
    for name, shift in (("a", 0), ("b", 1)):
        Dataset.from_arrays(np.roll(x, shift, 0), y).save(tmp_path / name, chunk_rows=50, shard_rows=100)
    with pytest.raises(KeyboardInterrupt):
        make_capsule(open_dataset(tmp_path / "a"), tmp_path / "run", callbacks=InterruptAt(1, "pass_end"))
    shutil.copyfile(tmp_path / "b/x/c/3/0", tmp_path / "a/x/c/3/0")
    with pytest.raises(ShardError, match="intact, but differs from the chunk that was written"):
        make_capsule(open_dataset(tmp_path / "a"), tmp_path / "run", resume=True)
