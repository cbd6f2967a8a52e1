"""A child process reads or writes data that are far larger than the memory by which it may grow."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

MB = 1 << 20
ROWS, WIDTH = 60_000, 784 * 2
MAX_GROWTH_BYTES = 40 * MB  # 60,000 rows of 1568 bytes (uint8) take 90 MB, more than twice this limit.

_CHILD_PROGRAM = """
import json, pathlib, resource, sys
import numpy as np
from scalelatent.data import (
    Dataset, append_rows, convert_dataset, import_csr, import_hdf5, import_idx, import_images, import_mat,
    import_npy, import_npz, import_svmlight, make_documents, open_dataset, shuffle_dataset
)
folder, what = sys.argv[1:]
small = {"chunk_rows": 1000, "shard_rows": 2000, "overwrite": True}
# Before the measurement, import packages and use codecs and loops once, because they take memory, too.
import h5py, PIL.Image
PIL.Image.init()
warm = Dataset.from_arrays(np.zeros((4000, 8), "u1")).save(folder + "/warm", **small)
warm.read_x(0, 4000)
if what.startswith(("svmlight", "documents")):  # Compile the parser, too.
    pathlib.Path(folder + "/warm.txt").write_text("1 1:1\\n")
    import_svmlight(folder + "/warm.txt", folder + "/counts", overwrite=True)
    make_documents(folder + "/warm", 3, base=folder + "/counts", overwrite=True)
if what == "h5ad":
    import anndata
def peak():  # On Linux, ru_maxrss starts with the peak of the parent process; VmHWM does not.
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
if what == "idx":
    import_idx(folder + "/x.idx.gz", None, folder + "/out", **small)
elif what == "npy":
    import_npy(folder + "/x.npy", folder + "/out", **small)
elif what == "npz":
    import_npz(folder + "/x.npz", folder + "/out", **small)
elif what == "hdf5":
    import_hdf5(folder + "/x.h5", folder + "/out", **small)
elif what == "mat":
    import_mat(folder + "/x.mat", folder + "/out", **small)
elif what == "images":
    import_images(folder + "/images", folder + "/out", overwrite=True, chunk_rows=1, shard_rows=1)
elif what == "read":
    ds = open_dataset(folder + "/ds")
    for a, b in ds.pieces():
        ds.read_x(a, b)
elif what == "whole":
    open_dataset(folder + "/ds").read_x(0, 60_000)
elif what == "save":
    open_dataset(folder + "/ds").save(folder + "/out", **small)
elif what in ("csr", "csr-packed"):
    import_csr(folder + f"/{what}.npz", folder + "/out", overwrite=True)
elif what == "h5ad":
    rows = anndata.read_h5ad(folder + "/x.h5ad", backed="r")
    Dataset.from_arrays(rows.X).save(folder + "/out", overwrite=True)
elif what in ("svmlight", "svmlight.gz"):
    import_svmlight(folder + f"/x.{what}", folder + "/out", overwrite=True)
elif what == "documents":
    make_documents(folder + "/out", 150_000, base=folder + "/csr", n_jobs=1, overwrite=True)
elif what == "read-csr":
    ds = open_dataset(folder + "/csr")
    for a, b in ds.pieces():
        ds.read_x(a, b)
elif what == "whole-csr":
    open_dataset(folder + "/csr").read_x(0, 300_000)
elif what == "shuffle":
    shuffle_dataset(folder + "/ds", folder + "/out", seed=0, memory=8 << 20, **small)
elif what == "convert":
    convert_dataset(folder + "/ds", folder + "/out", dtype="i2", overwrite=True)
elif what == "append":
    Dataset.from_arrays(np.zeros((9, 1568), "u1")).save(folder + "/grown", overwrite=True)
    append_rows(folder + "/grown", folder + "/ds", chunk_rows=1000, shard_rows=2000)
print(json.dumps(peak() - before))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scalelatent.data import Dataset

    path = tmp_path_factory.mktemp("large")
    rows = np.resize(np.arange(251, dtype="u1"), (ROWS, WIDTH))
    np.save(path / "x.npy", rows)
    np.savez(path / "x.npz", x=rows)
    with gzip.open(path / "x.idx.gz", "wb", compresslevel=1) as file:
        file.write(bytes([0, 0, 8, 2]) + ROWS.to_bytes(4, "big") + WIDTH.to_bytes(4, "big"))
        file.write(rows.tobytes())
    with h5py.File(path / "x.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(500, WIDTH // 2), compression="gzip", compression_opts=1)
    # A MATLAB file stores the axes of an array in reverse order.
    with h5py.File(path / "x.mat", "w", userblock_size=512) as file:
        file.create_dataset(
            "x", data=rows.T, chunks=(WIDTH // 4, 700), compression="gzip", compression_opts=1
        )
    with open(path / "x.mat", "r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file")
    (path / "images").mkdir()
    image = Image.fromarray(rows[:WIDTH])
    for i in range(40):  # Each image has 2.5 MB.
        image.save(path / "images" / f"{i}.png", compress_level=1)
    Dataset.from_arrays(rows).save(path / "ds", chunk_rows=1000, shard_rows=2000)
    return path


def measure_memory_growth(folder: Path, what: str) -> int:
    run = [sys.executable, "-c", _CHILD_PROGRAM, str(folder), what]
    return int(json.loads(subprocess.run(run, capture_output=True, timeout=120, check=True).stdout))


@pytest.mark.parametrize(
    "what",
    ["idx", "npy", "npz", "hdf5", "mat", "images", "read", "save", "shuffle", "convert", "append"],
)
@pytest.mark.slow
def test_reading_and_writing_rows_takes_the_memory_of_a_few_shards(folder: Path, what: str) -> None:
    assert measure_memory_growth(folder, what) < MAX_GROWTH_BYTES


def test_the_memory_test_detects_a_file_that_is_read_whole(folder: Path) -> None:
    assert measure_memory_growth(folder, "whole") > 2 * MAX_GROWTH_BYTES


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 300,000 rows of 60 words (216 MB of values and columns, 130 MB of text); return their folder."""
    import anndata
    import scipy.sparse as sp

    from scalelatent.data import Dataset

    path = tmp_path_factory.mktemp("sparse")
    rows, words = 300_000, 60
    rng = np.random.default_rng(0)
    columns = (rng.integers(0, 700, (rows, 1)) + np.arange(words) * 700).astype("i4")
    counts = rng.integers(1, 9, (rows, words)).astype("f8")
    x = sp.csr_array((counts.ravel(), columns.ravel(), np.arange(rows + 1) * words), shape=(rows, 47_000))
    sp.save_npz(path / "csr.npz", x, compressed=False)
    sp.save_npz(path / "csr-packed.npz", x[:100_000], compressed=True)
    anndata.AnnData(sp.csr_matrix(x)).write_h5ad(path / "x.h5ad", compression="gzip")
    Dataset.from_arrays(x).save(path / "csr")
    lines = [
        b"1 " + b" ".join(b"%d:%d" % pair for pair in zip(c, v, strict=True)) + b"\n"
        for c, v in zip(columns[:1000].tolist(), counts[:1000].astype(int).tolist(), strict=True)
    ]
    text = b"".join(lines)
    (path / "x.svmlight").write_bytes(text * 300)
    with gzip.open(path / "x.svmlight.gz", "wb", compresslevel=1) as file:
        file.write(text * 300)
    return path


SPARSE = ["csr", "csr-packed", "h5ad", "svmlight", "svmlight.gz", "documents", "read-csr"]


@pytest.mark.slow
@pytest.mark.parametrize("what", SPARSE)
def test_sparse_rows_take_the_memory_of_a_few_row_groups(sparse_folder: Path, what: str) -> None:
    assert measure_memory_growth(sparse_folder, what) < 3 * MAX_GROWTH_BYTES


@pytest.mark.slow
def test_the_memory_test_detects_sparse_rows_that_are_read_whole(sparse_folder: Path) -> None:
    assert measure_memory_growth(sparse_folder, "whole-csr") > 200 * MB
