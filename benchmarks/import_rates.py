"""Measure the rate and the peak memory of every importer.

    python benchmarks/import_rates.py [--mb 128] [--only npy hdf5 ...]

For each kind of file, one process measures three functions. The first reads the file with the library of its
format, on one thread. The second also hashes and compresses the rows as a dataset does, on one thread,
without writing. The third is the import by scalelatent. Rates are megabytes of rows per second,
from the fastest of a few rounds; the files are in the page cache. Peak memory is that of a child process
that imports, at one size and at four times this size.

The rows are MNIST's images with SCALELATENT_DATA, otherwise built-in digits. JPEG files are smooth colour
noise of 256 x 256 pixels; `images jpg 64` also shrinks them to 64 x 64.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import digit_images, fastest, parser, write

import scalelatent.data as data
from scalelatent.deploy.probes import peak_bytes

# Side of a digit image, and of a JPEG image, in pixels.
SIDE = 28
PHOTO = 256
# Number of bytes that a plain reader reads at a time.
BLOCK = 1 << 20
# Peak memory is measured with two files; the larger one has this many times the rows of the smaller one.
SCALE = 4


def make_digit_rows(n: int) -> np.ndarray:
    """Return digit images (n, 28, 28) uint8."""
    return digit_images(n)[0]


def make_photo(i: int) -> Any:
    """Return a smooth colour image of random noise; ``i`` is its seed."""
    from PIL import Image

    coarse = np.random.Generator(np.random.Philox(i)).integers(0, 256, (16, 16, 3)).astype("u1")
    return Image.fromarray(coarse).resize((PHOTO, PHOTO), Image.Resampling.BICUBIC)


def make_sparse_rows(n: int) -> Any:
    """Return CSR rows (n, 47236) float32 with 76 entries per row, like RCV1."""
    import scipy.sparse

    rng = np.random.Generator(np.random.Philox(1))
    columns = np.sort(rng.integers(0, 47_236 // 76, (n, 76)) + np.arange(76) * (47_236 // 76), axis=1)
    values = rng.random(n * 76, dtype=np.float32) + np.float32(0.01)
    return scipy.sparse.csr_matrix((values, columns.ravel(), np.arange(n + 1) * 76), shape=(n, 47_236))


def make_idx(path: Path, n: int) -> None:
    with gzip.open(path, "wb", 6) if path.suffix == ".gz" else open(path, "wb") as file:
        file.write(bytes([0, 0, 8, 3]) + b"".join(v.to_bytes(4, "big") for v in (n, SIDE, SIDE)))
        file.write(make_digit_rows(n).tobytes())


def make_h5(path: Path, n: int, dtype: str = "u1", **how: Any) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=make_digit_rows(n).astype(dtype), **how)


def make_mat73(path: Path, n: int) -> None:
    """Write a file as MATLAB 7.3 does: a header of 512 bytes, reversed axes, compressed chunks."""
    import h5py

    with h5py.File(path, "w", userblock_size=512) as file:
        rows = make_digit_rows(n).reshape(n, -1).T
        file.create_dataset("x", data=rows, chunks=(SIDE * SIDE, min(n, 1024)), compression=3)
    with open(path, "r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file")


def make_mat5(path: Path, n: int, packed: bool) -> None:
    from scipy.io import savemat

    savemat(path, {"x": make_digit_rows(n).reshape(n, -1)}, do_compression=packed)


def make_png(path: Path, n: int) -> None:
    from PIL import Image

    for i, pixels in enumerate(make_digit_rows(n)):
        folder = path / str(i % 10)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{i:07}.png")


def make_jpg(path: Path, n: int) -> None:
    for i in range(n):
        folder = path / str(i % 10)
        folder.mkdir(parents=True, exist_ok=True)
        make_photo(i % 50).save(folder / f"{i:07}.jpg", quality=90)


def make_csr(path: Path, n: int) -> None:
    import scipy.sparse

    scipy.sparse.save_npz(path, make_sparse_rows(n), compressed=False)


def make_svmlight(path: Path, n: int) -> None:
    from sklearn.datasets import dump_svmlight_file

    dump_svmlight_file(make_sparse_rows(n), np.arange(n) % 2, str(path))


def make_table(n: int, lists: bool) -> Any:
    """Return an Arrow table of n digits with a column per pixel, or with one column of lists."""
    import pyarrow as pa

    rows = make_digit_rows(n).reshape(n, -1)
    if lists:
        return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])})
    return pa.table({f"p{i}": np.ascontiguousarray(rows[:, i]) for i in range(rows.shape[1])})


def make_parquet(path: Path, n: int, lists: bool) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(make_table(n, lists), path, row_group_size=16_384)


def make_csv(path: Path, n: int) -> None:
    import pyarrow.csv

    pyarrow.csv.write_csv(make_table(n, False), path)


def read_file(path: Path) -> Any:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as file:
        while part := file.read(BLOCK):
            yield np.frombuffer(part, np.uint8)


def read_npz(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive, archive.open("x.npy") as file:
        while part := file.read(BLOCK):
            yield np.frombuffer(part, np.uint8)


def read_h5(path: Path, axis: int = 0) -> Any:
    import h5py

    with h5py.File(path) as file:
        x = file["x"]
        for a in range(0, x.shape[axis], 4096):
            yield np.ascontiguousarray(x[a : a + 4096] if axis == 0 else x[:, a : a + 4096].T)


def read_mat(path: Path) -> Any:
    from scipy.io import loadmat

    x = loadmat(path)["x"]
    for a in range(0, len(x), 4096):
        yield np.ascontiguousarray(x[a : a + 4096])


def read_images(path: Path, size: int | None = None) -> Any:
    from PIL import Image

    for file in sorted(path.rglob("*.*")):
        with Image.open(file) as image:
            if size:
                image.draft(None, (2 * size, 2 * size))
                yield np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))
            else:
                yield np.asarray(image)


def read_csr(path: Path) -> Any:
    import scipy.sparse

    x = scipy.sparse.load_npz(path)
    yield from (x.data, x.indices)


def read_svmlight(path: Path) -> Any:
    from sklearn.datasets import load_svmlight_file

    x = load_svmlight_file(str(path), dtype=np.float32)[0]
    yield from (x.data, x.indices)


def read_batches(batches: Any) -> Any:
    """Yield the columns of record batches of Arrow as numpy arrays."""
    for batch in batches:
        for column in batch.columns:
            flat = column.flatten() if hasattr(column, "flatten") else column
            yield flat.to_numpy(zero_copy_only=False)


def read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    yield from read_batches(pyarrow.parquet.ParquetFile(path).iter_batches(4096, use_threads=False))


def read_csv(path: Path) -> Any:
    import pyarrow.csv

    yield from read_batches(
        pyarrow.csv.open_csv(path, read_options=pyarrow.csv.ReadOptions(use_threads=False))
    )


@dataclass(frozen=True)
class SourceKind:
    """Kind of source file: its suffix, functions that write, read and import it, and the bytes of a row."""

    suffix: str
    make: Callable[[Path, int], None]
    read: Callable[[Path], Any]
    import_file: Callable[[Path, str], Any]
    row_bytes: int = SIDE * SIDE
    share: float = 1.0
    """The source has this share of --mb; it is small for formats that take long to write."""


def make_importer(name: str, **how: Any) -> Callable[[Path, str], Any]:
    def run(path: Path, out: str) -> Any:
        return getattr(data, name)(path, out, overwrite=True, **how)

    return run


def import_idx_files(path: Path, out: str) -> Any:
    return data.import_idx(path, None, out, overwrite=True)


KINDS = {
    "idx": SourceKind(".idx", make_idx, read_file, import_idx_files),
    "idx gzip": SourceKind(".gz", make_idx, read_file, import_idx_files),
    "npy": SourceKind(
        ".npy", lambda p, n: np.save(p, make_digit_rows(n)), read_file, make_importer("import_npy")
    ),
    "npy float32": SourceKind(
        ".npy",
        lambda p, n: np.save(p, make_digit_rows(n).astype("f4")),
        read_file,
        make_importer("import_npy"),
        4 * SIDE**2,
    ),
    "npz": SourceKind(
        ".npz", lambda p, n: np.savez(p, x=make_digit_rows(n)), read_npz, make_importer("import_npz")
    ),
    "npz packed": SourceKind(
        ".npz",
        lambda p, n: np.savez_compressed(p, x=make_digit_rows(n)),
        read_npz,
        make_importer("import_npz"),
    ),
    "hdf5": SourceKind(".h5", make_h5, read_h5, make_importer("import_hdf5")),
    "hdf5 gzip": SourceKind(
        ".h5",
        lambda p, n: make_h5(p, n, chunks=(512, SIDE, SIDE), compression="gzip"),
        read_h5,
        make_importer("import_hdf5"),
    ),
    "hdf5 float32": SourceKind(
        ".h5", lambda p, n: make_h5(p, n, "f4"), read_h5, make_importer("import_hdf5"), 4 * SIDE**2
    ),
    "mat 5": SourceKind(".mat", lambda p, n: make_mat5(p, n, False), read_mat, make_importer("import_mat")),
    "mat 7": SourceKind(".mat", lambda p, n: make_mat5(p, n, True), read_mat, make_importer("import_mat")),
    "mat 7.3": SourceKind(".mat", make_mat73, lambda p: read_h5(p, 1), make_importer("import_mat")),
    "images png": SourceKind("", make_png, read_images, make_importer("import_images"), share=0.15),
    "images jpg": SourceKind("", make_jpg, read_images, make_importer("import_images"), 3 * PHOTO**2),
    "images jpg 64": SourceKind(
        "",
        make_jpg,
        lambda p: read_images(p, 64),
        make_importer("import_images", size=(64, 64)),
        3 * 64**2,
        0.06,
    ),
    "csr": SourceKind(".npz", make_csr, read_csr, make_importer("import_csr"), 76 * 8),
    "svmlight": SourceKind(
        ".svm", make_svmlight, read_svmlight, make_importer("import_svmlight"), 76 * 8, 0.25
    ),
    "parquet wide": SourceKind(
        ".parquet", lambda p, n: make_parquet(p, n, False), read_parquet, make_importer("import_parquet")
    ),
    "parquet lists": SourceKind(
        ".parquet", lambda p, n: make_parquet(p, n, True), read_parquet, make_importer("import_parquet")
    ),
    "csv": SourceKind(".csv", make_csv, read_csv, make_importer("import_csv"), 8 * SIDE**2),
}
# Kinds of files whose rows are floats, which a dataset does not compress.
FLOATS = ("npy float32", "hdf5 float32", "csr", "svmlight", "csv")


def hash_and_pack(parts: Any, floats: bool) -> None:
    """Hash and compress arrays as a dataset does (SHA-256; LZ4 unless they are floats), without writing."""
    import numcodecs

    codec = numcodecs.Blosc("lz4", 5, numcodecs.Blosc.NOSHUFFLE)
    numcodecs.blosc.use_threads = False
    for part in parts:
        hashlib.sha256(part).digest()
        if not floats:
            codec.encode(part)


def measure_rates(
    kind: SourceKind, name: str, path: Path, out: str, rows: int, rounds: int
) -> dict[str, float]:
    """Return MB/s of rows for reading, for reading with hashing and packing, for importing; and ratios."""
    seconds = fastest(
        {
            "read": lambda: [None for _ in kind.read(path)],
            "read_hash_pack": lambda: hash_and_pack(kind.read(path), name in FLOATS),
            "import": lambda: kind.import_file(path, out),
        },
        rounds,
    )
    megabytes = rows * kind.row_bytes / 1e6
    found = {f"{what}_mb_s": round(megabytes / value, 1) for what, value in seconds.items()}
    return found | {
        "import / read": round(seconds["read"] / seconds["import"], 2),
        "import / read_hash_pack": round(seconds["read_hash_pack"] / seconds["import"], 2),
    }


def count_source_bytes(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())


def measure_peak(name: str, path: Path, out: str) -> float:
    """Return the peak MiB of a new process that only imports the file."""
    run = [sys.executable, __file__, "--child", name, str(path), out]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=600)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, folder: Path, mb: float, rounds: int) -> dict[str, Any]:
    """Measure one kind of source: rates at one size, peak memory at two sizes."""
    kind = KINDS[name]
    result: dict[str, Any] = {"kind": name}
    peaks = []
    for scale in (1, SCALE):
        rows = max(64, int(scale * mb * kind.share * 1e6 / kind.row_bytes))
        path = folder / f"{name.replace(' ', '-')}-{scale}{kind.suffix}"
        kind.make(path, rows)
        if scale == 1:
            result |= {"rows": rows, "rows_mb": round(rows * kind.row_bytes / 1e6, 1)}
            result["source_mb"] = round(count_source_bytes(path) / 1e6, 1)
            result |= measure_rates(kind, name, path, str(folder / "out"), rows, rounds)
        peaks.append(measure_peak(name, path, str(folder / "out")))
        subprocess.run(["rm", "-rf", str(path)], check=True)
    result["peak_mib"], result[f"peak_mib_{SCALE}_times_larger"] = (round(p, 1) for p in peaks)
    return result


def main() -> None:
    arguments = parser(__doc__, "import_rates")
    arguments.add_argument("--mb", type=float, default=128, help="megabytes of rows of the smaller source")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument(
        "--only",
        nargs="*",
        choices=list(KINDS),
        metavar="KIND",
        help="kinds of files to measure; all by default",
    )
    arguments.add_argument("--child", nargs=3, help="internal: KIND PATH OUT")
    given = arguments.parse_args()
    if given.child:
        name, path, out = given.child
        KINDS[name].import_file(Path(path), out)
        print(peak_bytes() / 2**20)
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only or KINDS:
            results.append(measure(name, Path(folder), given.mb, given.rounds))
            print(json.dumps(results[-1]), flush=True)
    write(given.out, given.seed, results)


if __name__ == "__main__":
    main()
