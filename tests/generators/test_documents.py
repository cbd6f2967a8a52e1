"""Resampled documents are multinomial draws that depend on seed and row alone, not on shards or threads."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from scalelatent.cli import app
from scalelatent.data import Dataset, ResampledDocuments, make_documents, open_dataset
from scalelatent.errors import DataError
from scalelatent.generators.make import make_shard
from scalelatent.kernels.streams import stream

N, TERMS = 37, 20
BASE = sp.random_array((N, TERMS), density=0.3, rng=np.random.default_rng(0), format="csr")
BASE.data = np.ceil(BASE.data * 6).astype("u1")
BASE = BASE.tolil()
BASE[5] = 0  # This document has no words.
BASE = BASE.tocsr()
TOPICS = (sp.random_array((N, 4), density=0.4, rng=np.random.default_rng(1), format="csr") > 0).astype("u1")


def make_set(**options: Any) -> ResampledDocuments:
    return ResampledDocuments(Dataset.from_arrays(BASE, np.arange(N) % 3), **options)


def assert_same(a: Any, b: Any) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert a.nnz == b.nnz
    assert (a != b).nnz == 0


def draw_in_python(seed: int, row: int, counts: np.ndarray) -> np.ndarray:
    """Draw a document in plain Python: its k-th word is chosen by the k-th number of numpy's stream."""
    total = int(counts.sum())
    sums = np.cumsum(counts.astype(int)).tolist()
    drawn = np.zeros(len(counts), int)
    raw = stream(seed, "documents", 0, row).bit_generator.random_raw(max(total, 1))
    for u in raw[:total].tolist():
        target = (u * total) >> 64
        drawn[next(j for j, s in enumerate(sums) if s > target)] += 1
    return drawn


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), start=st.integers(0, 2**62), count=st.integers(1, 80))
def test_documents_equal_the_reference_draw(seed: int, start: int, count: int) -> None:
    x, y = make_set(seed=seed).rows(start, start + count)
    dense = BASE.toarray()
    for i in {0, count // 2, count - 1}:
        base = (start + i) % N
        np.testing.assert_array_equal(x[[i]].toarray()[0], draw_in_python(seed, start + i, dense[base]))
        assert y[i] == base % 3
    assert x.has_canonical_format
    assert (x.data > 0).all()


@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 200), count=st.integers(0, 120), cut=st.integers(0, 120))
def test_any_row_is_made_from_its_index(start: int, count: int, cut: int) -> None:
    documents = ResampledDocuments(Dataset.from_arrays(BASE, TOPICS), seed=3, base_rows=(4, 30))
    cut = min(cut, count)
    whole, parts = documents.rows(start, start + count), []
    for a, b in ((start, start + cut), (start + cut, start + count)):
        parts.append(documents.rows(a, b))
    assert_same(sp.vstack([p[0] for p in parts], format="csr"), whole[0])
    assert (sp.vstack([p[1] for p in parts], format="csr") != whole[1]).nnz == 0
    base = documents.base_of(np.arange(start, start + count))
    assert ((base >= 4) & (base < 30)).all()
    assert (whole[0].sum(axis=1) == BASE[base].sum(axis=1)).all()  # Each has as many words as its base.
    assert ((whole[0] > 0) > (BASE[base] > 0)).nnz == 0  # A document has only words of its base.


def test_the_draw_is_multinomial() -> None:
    """Mean and covariance of 40,000 draws are those of a multinomial, within five standard errors."""
    counts = np.array([5, 1, 3, 11], "u1")
    documents = ResampledDocuments(Dataset.from_arrays(sp.csr_array(counts[None])), seed=11)
    draws = 40_000
    x = documents.rows(0, draws)[0].toarray().astype(float)
    n, p = counts.sum(), counts / counts.sum()
    wanted = n * (np.diag(p) - np.outer(p, p))
    assert (abs(x.mean(axis=0) - n * p) < 5 * np.sqrt(np.diag(wanted) / draws)).all()
    spread = np.sqrt((wanted**2 + np.outer(np.diag(wanted), np.diag(wanted))) / draws)
    assert (abs(np.cov(x.T) - wanted) < 5 * spread).all()


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "?", "u2"])
def test_counts_of_every_dtype_are_drawn_from(dtype: str) -> None:
    x = BASE.astype(dtype)
    found = ResampledDocuments(Dataset.from_arrays(x)).rows(0, 50)[0]
    assert found.dtype == np.uint8
    assert (found.sum(axis=1) == x[np.arange(50) % N].astype("f8").sum(axis=1)).all()
    if dtype == "u2":
        x.data[0] = 60_000
        wide = ResampledDocuments(Dataset.from_arrays(x))
        assert wide.dtype == np.uint16
        assert wide.rows(0, 1)[0].sum() == x[[0]].astype("i8").sum()


def write_base(folder: Path, y: Any = None) -> Path:
    Dataset.from_arrays(BASE, y).save(folder / "base.zarr", overwrite=True)
    return folder / "base.zarr"


def test_the_files_do_not_depend_on_threads_and_processes(tmp_path: Path) -> None:
    base = write_base(tmp_path, TOPICS)
    options: dict[str, Any] = {"base": base, "seed": 5, "shard_rows": 64, "start": 1000}
    one = make_documents(tmp_path / "one", 500, n_jobs=1, **options)
    calls: list[tuple[int, int]] = []
    two = make_documents(tmp_path / "two", 500, n_jobs=4, progress=lambda *c: calls.append(c), **options)
    assert one.fingerprint() == two.fingerprint()
    assert calls[-1] == (500, 500)
    assert_same(two.read_x(0, 500), ResampledDocuments(open_dataset(base), seed=5).rows(1000, 1500)[0])
    assert (two.read_y(0, 500) != TOPICS[np.arange(1000, 1500) % N]).nnz == 0
    assert two.attrs["provenance"]["base"] == "../base.zarr"  # A relative path stays valid if both move.
    # Another process makes a lost row group (files of some rows) from the dataset's record of its origin.
    shutil.rmtree(tmp_path / "two" / "x" / "000003")
    with pytest.raises(DataError, match=r"data repair .*` makes the lost shards again"):
        two.read_x(0, 500)
    code = "import sys; from scalelatent.generators.make import make_shard as m; m(sys.argv[1], 3)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "two")], check=True, timeout=120)
    assert_same(open_dataset(tmp_path / "two").read_x(0, 500), one.read_x(0, 500))
    assert make_documents(tmp_path / "two", 500, resume=True, **options).fingerprint() == one.fingerprint()


def test_resume_after_kill_gives_the_same_dataset(tmp_path: Path) -> None:
    base, target = write_base(tmp_path), tmp_path / "ds"
    code = (
        "import sys, time; import scalelatent.data.write.writer as w; real = w.DatasetWriter.write_shard\n"
        "def slow(*a): real(*a); time.sleep(0.2)\n"
        "w.DatasetWriter.write_shard = slow\n"
        "from scalelatent.data import make_documents\n"
        "make_documents(sys.argv[1], 3000, base=sys.argv[2], seed=2, shard_rows=100, n_jobs=1)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(target), str(base)])
    deadline = time.monotonic() + 60
    while len(list(target.glob("_shards/*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    with pytest.raises(DataError, match=r"incomplete.*`scalelatent data repair "):
        open_dataset(target)
    options: dict[str, Any] = {"base": base, "shard_rows": 100}
    with pytest.raises(DataError, match="seed was 2, now 3"):
        make_documents(target, 3000, seed=3, resume=True, **options)
    stamps = {p: p.stat().st_mtime_ns for p in target.glob("x/*/indptr/c/0")}
    found = make_documents(target, 3000, seed=2, resume=True, **options)
    # The resume rewrites at most one row group (files of some rows): the one that was being written.
    done = len(stamps) - 1
    assert sum(p.stat().st_mtime_ns == t for p, t in stamps.items()) >= done >= 2
    whole = make_documents(tmp_path / "whole", 3000, seed=2, **options)
    assert found.fingerprint() == whole.fingerprint()


def test_a_changed_base_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path)
    make_documents(tmp_path / "ds", 200, base=base, shard_rows=50)
    shutil.rmtree(tmp_path / "ds" / "x" / "000001")
    Dataset.from_arrays(BASE[::-1]).save(base, overwrite=True)
    from scalelatent.generators import make

    make._make_generator.cache_clear()
    with pytest.raises(DataError, match=r"its base \.\./base\.zarr has changed since the first shard"):
        make_shard(tmp_path / "ds", 1)


def with_value(row: int, column: int, value: float) -> sp.csr_array:
    x = BASE.astype("f8").tolil()
    x[row, column] = value
    return x.tocsr()


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (with_value(7, 3, -1), {}, "row 7, column 3 is -1.0, which is no count"),
        (with_value(7, 3, 0.5), {}, "row 7, column 3 is 0.5, which is no count.*not weights"),
        (-BASE.astype("i2"), {}, "which is no count"),
        (with_value(0, 0, 2.0**60), {}, "at most"),
        (BASE.toarray(), {}, "has dense rows; documents are made from CSR"),
        (BASE, {"base_rows": (3, 99)}, "base rows 3:99 are not inside 0:37"),
        (BASE, {"seed": -1}, "seed is -1"),
        (BASE, {"start": -1}, "documents begin at index 0"),
        (BASE, {"rows": 0}, "at least 1 row"),
    ],
)
def test_invalid_requests_leave_no_files(
    base: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    Dataset.from_arrays(base).save(tmp_path / "base")
    rows = options.pop("rows", 100)
    with pytest.raises(DataError, match=message):
        make_documents(tmp_path / "ds", rows, base=tmp_path / "base", **options)
    assert not (tmp_path / "ds").exists()


def test_indices_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match="indices are 0 to"):
        make_set().rows(-1, 3)
    x, y = make_set().rows(9, 9)
    assert x.shape == (0, TERMS)
    assert len(y) == 0


def test_the_command_makes_documents(tmp_path: Path) -> None:
    base = write_base(tmp_path, np.arange(N) % 3)
    args = ["data", "make", "documents", str(tmp_path / "ds"), "--rows", "90", "--base", str(base)]
    done = CliRunner().invoke(app, [*args, "--seed", "4", "--base-rows", "0:20", "--jobs", "1", "--json"])
    found = json.loads(done.stdout)
    assert (found["rows"], found["classes"], found["provenance"]["base_rows"]) == (90, [0, 1, 2], [0, 20])
    assert CliRunner().invoke(app, args).exit_code == 2
