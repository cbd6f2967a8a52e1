"""Each fault of a disk is injected into a fit of each model.

The result is the same bits, or one line that names the fault. A row of the table is a fault, the file
or moment of the fault, a function that damages the run folder or the dataset of an interrupted fit, and the
expected result: "same bits" after a resume, or words of the refusal. Killed processes are rows of the table,
too (slow tests). The tests in `tests/cluster` kill more processes, also on clusters.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.data import append_rows
from scalelatent.engine import cache, inprocess
from scalelatent.errors import ScalelatentError
from scalelatent.storage.disk import LocalLocation
from tests.helpers import InterruptAt

pytestmark = pytest.mark.filterwarnings("ignore:.*labels y are not learned from")

MODELS: dict[str, Callable[[], Any]] = {
    "capsule": lambda: sl.CapsuleRegression(capsule_dim=2, max_iter=4, random_state=0, n_jobs=1),
    "capsule stepwise": lambda: sl.CapsuleRegression(
        capsule_dim=2, algorithm="stepwise", n_epochs=3, batch_rows=52, random_state=0, n_jobs=1
    ),
    "mbn": lambda: sl.MultilayerBootstrapNetwork(
        n_clusterings=4, k1=20, decay=0.5, n_components=2, random_state=0, n_jobs=1
    ),
    "crbm": lambda: sl.ConditionalRBM(n_hidden=3, n_epochs=3, batch_size=50, random_state=0, n_jobs=1),
    "hcn": lambda: sl.HierarchicalCompositionalNetwork(
        [(3, (1, 12))],
        p01=0.1,
        p10=0.1,
        p_weight=0.4,
        p_sparsity=0.3,
        online=False,
        n_epochs=6,
        random_state=0,
        n_jobs=1,
    ),
    "mixture": lambda: sl.LinearMixtureClassifier(
        n_components=2, n_dims=2, max_iter=4, random_state=0, n_jobs=1
    ),
    "mixture stepwise": lambda: sl.LinearMixtureClassifier(
        n_components=2, n_dims=2, algorithm="stepwise", n_epochs=3, batch_rows=52, random_state=0, n_jobs=1
    ),
    "density": lambda: sl.LinearMixture(
        n_components=3, n_dims=2, likelihood="ppca", assignment="soft", max_iter=4, random_state=0, n_jobs=1
    ),
    "search": lambda: sl.Search(
        MODELS["mixture"](), {"n_dims": [1, 2], "likelihood": ["error", "ppca"]}, cv=2
    ),
    "search apart": lambda: sl.Search(MODELS["mbn"](), {"k1": [10, 20]}, cv=2),
}
# Batch learning of compositional networks stores messages of each leaf (range of 50 rows) in the run folder.
ENGINE: dict[str, dict[str, Any]] = {"hcn": {"leaf_rows": 50}}
# (hook, n): call n of this hook, counted from 0, interrupts the fit, with work before and after the call.
STOPS = {
    "capsule": ("pass_end", 2),
    "capsule stepwise": ("pass_end", 1),
    "mbn": ("stage", 3),
    "crbm": ("pass_end", 1),
    "hcn": ("pass_end", 1),
    "mixture": ("pass_end", 2),
    "mixture stepwise": ("pass_end", 1),
    "density": ("pass_end", 2),
    "search": ("pass_end", 2),
    "search apart": ("stage", 8),
}
STATES = "state-", "result-"  # A fit resumes from files whose names start so.
OUTPUTS = {model: "predict" if model == "crbm" else "transform" for model in MODELS}


class FitFiles(SimpleNamespace):
    """Files of a fit: its dataset, its run folder, and the last record that it wrote."""

    data: Path
    run: Path

    @property
    def shard(self) -> Path:
        return next(p for p in sorted((self.data / "x" / "c").rglob("*")) if p.is_file())

    @property
    def identity(self) -> Path:
        return next(self.run.rglob("identity.json"))

    @property
    def newest(self) -> Path:
        records = [p for p in self.run.rglob("*.rec") if p.name.startswith(STATES)]
        return max(records, key=lambda p: p.stat().st_mtime_ns)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_looping_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def copy_other(files: FitFiles, key: str) -> None:
    """Replace the files below ``key`` of the dataset by files of another dataset of the same shape."""
    ds = sl.open_dataset(files.data)
    other = sl.Dataset.from_arrays(1 - ds.read_x(0, len(ds)), ds.read_y(0, len(ds)))
    other.save(files.data.with_name("other"), chunk_rows=25, shard_rows=50)
    shutil.copytree(files.data.with_name("other") / key, files.data / key, dirs_exist_ok=True)


def append_rows_to(files: FitFiles) -> None:
    ds = sl.open_dataset(files.data)
    append_rows(files.data, ds[:60])


BETWEEN, WITHIN_A_RENAME = "between two passes", "a record half in its place"
CHECKPOINT_EACH_PASS = {"checkpoint_seconds": 0.0}
ROOT = Path(__file__).resolve().parents[2]
CHILD_PROGRAM = "import sys; from tests.faults.test_table import fit_and_die; fit_and_die(*sys.argv[1:])"


def die_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillAt(InterruptAt):
    """Callback that kills its own process at the call at which ``InterruptAt`` would interrupt the fit."""

    def _count(self, info: dict[str, Any]) -> None:
        try:
            super()._count(info)
        except KeyboardInterrupt:
            die_now()


def fit_and_die(model: str, data: str, run: str, where: str) -> None:
    """Run a fit in its own process, which is killed at a callback or while it writes its second record."""
    hook, count = STOPS[model]
    callbacks, records, replace = [], [], os.replace

    def replace_or_die(source: Any, target: Any) -> None:
        if Path(target).suffix == ".rec" and Path(target).name.startswith(STATES):
            records.append(target)
            if len(records) == 2:
                die_now()
        replace(source, target)

    if where == BETWEEN:
        callbacks.append(KillAt(count, hook))
    else:
        os.replace = replace_or_die  # type: ignore[assignment]
    engine = CHECKPOINT_EACH_PASS | ENGINE.get(model, {})
    MODELS[model]().fit(sl.open_dataset(data), run_dir=run, callbacks=callbacks, engine=engine)


Row = tuple[str, str, Callable[[FitFiles], Any], str]
FAULTS: list[Row] = [
    ("none", "between two passes", lambda files: None, "same bits"),
    ("torn file", "newest record", lambda files: cut_in_half(files.newest), "same bits"),
    ("flipped bit", "newest record", lambda files: flip_bit(files.newest), "same bits"),
    ("zero bytes", "newest record", lambda files: make_empty(files.newest), "same bits"),
    ("lost file", "newest record", lambda files: files.newest.unlink(), "same bits"),
    ("moved", "run folder", lambda files: None, "same bits"),
    ("zero bytes", "identity.json", lambda files: make_empty(files.identity), "identity.json is damaged"),
    ("null", "identity.json", lambda files: files.identity.write_text("null"), "identity.json is damaged"),
    ("lost file", "shard", lambda files: files.shard.unlink(), "x/c/"),
    ("torn file", "shard", lambda files: cut_in_half(files.shard), "x/c/"),
    ("flipped bit", "shard", lambda files: flip_bit(files.shard), "x/c/"),
    ("zero bytes", "shard", lambda files: make_empty(files.shard), "x/c/"),
    ("FIFO", "shard", lambda files: replace_by_fifo(files.shard), "x/c/"),
    ("folder", "shard", lambda files: replace_by_folder(files.shard), "x/c/"),
    ("looping link", "shard", lambda files: replace_by_looping_link(files.shard), "x/c/"),
    ("another dataset's", "shard", lambda files: copy_other(files, "x/c"), "came from another dataset"),
    ("another dataset's", "table of digests", lambda files: copy_other(files, "digest"), "table of digests"),
    ("another dataset's", "table of checksums", lambda files: copy_other(files, "crc"), "table of checksums"),
    ("more rows", "dataset", lambda files: append_rows_to(files), "same bits"),
    ("lost folder", "dataset", lambda files: shutil.rmtree(files.data), "d.zarr"),
]  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    y = np.arange(200) % 3
    x = (rng.uniform(0, 1, (3, 12))[y] + rng.normal(0, 0.2, (200, 12)) > 0.5).astype(np.uint8)
    return x, y


@pytest.fixture
def files(tmp_path: Path, rows: tuple[np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> FitFiles:
    # Without a cache, each pass reads the rows again, so a damaged file is noticed.
    monkeypatch.setattr(inprocess, "shared_cache", lambda *_: cache.PieceCache(0))
    return FitFiles(data=tmp_path / "d.zarr", run=tmp_path / "run")


@pytest.fixture(scope="module")
def uninterrupted(
    rows: tuple[np.ndarray, np.ndarray], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    """Return a function that computes the outputs of an uninterrupted fit of a model, once for each model."""
    made: dict[str, Any] = {}

    def outputs(model: str) -> Any:
        if model not in made:
            files = FitFiles(data=tmp_path_factory.mktemp("whole") / "d.zarr")
            made[model] = compute_outputs(model, _fit(model, files, rows), rows)
        return made[model]

    return outputs


def _save(model: str, files: FitFiles, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = rows
    sl.Dataset.from_arrays(x, x if model == "crbm" else y).save(files.data, chunk_rows=25, shard_rows=50)


def _fit(model: str, files: FitFiles, rows: tuple[np.ndarray, np.ndarray], **options: Any) -> Any:
    if not files.data.exists() and not options.get("resume"):
        _save(model, files, rows)
    engine = {**ENGINE.get(model, {}), **options.pop("engine", {})}
    return MODELS[model]().fit(sl.open_dataset(files.data), engine=engine, **options)


def compute_outputs(model: str, fitted: Any, rows: tuple[np.ndarray, np.ndarray]) -> Any:
    return getattr(fitted, OUTPUTS[model])(rows[0])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("fault", "where", "damage", "outcome"), FAULTS, ids=[f"{r[0]}-{r[1]}" for r in FAULTS]
)
def test_a_fault_after_an_interrupt_gives_the_declared_result(
    fault: str, where: str, damage: Callable[[FitFiles], Any], outcome: str, model: str, files: FitFiles,
    rows: tuple[np.ndarray, np.ndarray], uninterrupted: Callable[[str], Any], record_property: Any,
) -> None:  # fmt: skip
    for name, value in {"fault": fault, "model": model, "where": where}.items():
        record_property(name, value)
    hook, count = STOPS[model]
    if where == "shard" and model == "mbn":
        count = 0  # Interrupt the network earlier: it reads rows only in its first layer.
    with pytest.raises(KeyboardInterrupt):
        _fit(model, files, rows, run_dir=files.run, callbacks=[InterruptAt(count, hook)])
    damage(files)
    if fault == "moved":
        files.run = files.run.rename(files.run.with_name("elsewhere"))
    if outcome == "same bits":
        resumed = _fit(model, files, rows, run_dir=files.run, resume=True)
        np.testing.assert_array_equal(compute_outputs(model, resumed, rows), uninterrupted(model))
        record_property("outcome", "same bits")
        return
    with pytest.raises(ScalelatentError) as refused:
        _fit(model, files, rows, run_dir=files.run, resume=True)
    message = str(refused.value)
    assert outcome in message
    assert str(files.data.parent) in message
    assert "\n" not in message
    record_property("outcome", f"refused: …{outcome}…")


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("where", [BETWEEN, WITHIN_A_RENAME])
def test_a_killed_process_resumes_to_the_same_bits(
    model: str, where: str, files: FitFiles, rows: tuple[np.ndarray, np.ndarray],
    uninterrupted: Callable[[str], Any], record_property: Any,
) -> None:  # fmt: skip
    for name, value in {"fault": "SIGKILL", "model": model, "where": where}.items():
        record_property(name, value)
    _save(model, files, rows)
    child = [sys.executable, "-c", CHILD_PROGRAM, model, str(files.data), str(files.run), where]
    ended = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert files.newest.exists()
    resumed = _fit(model, files, rows, run_dir=files.run, resume=True, engine=CHECKPOINT_EACH_PASS)
    np.testing.assert_array_equal(compute_outputs(model, resumed, rows), uninterrupted(model))
    record_property("outcome", "same bits")


@contextmanager
def fill_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """Let the first ``after`` writes of small files succeed; later writes fail as on a full disk."""
    written = 0
    write = LocalLocation.write

    def fail(self: Any, key: str, data: bytes, **how: Any) -> None:
        nonlocal written
        written += 1
        if written > after:
            raise OSError(errno.ENOSPC, "No space left on device", key)
        write(self, key, data, **how)

    with monkeypatch.context() as patch:
        patch.setattr(LocalLocation, "write", fail)
        yield


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_fit_resumes_after_a_full_disk(
    model: str, after: int, files: FitFiles, rows: tuple[np.ndarray, np.ndarray],
    uninterrupted: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, record_property: Any,
) -> None:  # fmt: skip
    for name, value in {"fault": "full disk", "model": model, "where": f"write {after + 1}"}.items():
        record_property(name, value)
    _save(model, files, rows)
    ended = pytest.raises(ScalelatentError, match="[Nn]o space left|disk is full")
    with fill_disk(monkeypatch, after), ended:
        _fit(model, files, rows, run_dir=files.run)
    resumed = _fit(model, files, rows, run_dir=files.run, resume=True)
    np.testing.assert_array_equal(compute_outputs(model, resumed, rows), uninterrupted(model))
    record_property("outcome", "same bits")
