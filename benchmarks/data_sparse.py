"""Measure sparse rows: rates of importing, making, writing and reading, and peak memory by file size.

    python benchmarks/data_sparse.py [--rows 200000] [--out benchmarks/results/data_sparse.json]

The rows are documents resampled from RCV1 (with SCALELATENT_DATA) or from generated counts of the same shape.
The import of each .npz file runs in turn with a function that only reads and decompresses it. The fastest of
several rounds counts, so that the ratios also hold on a busy machine. Peak memory is that of a new process,
for one file and for a file with four times as many rows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import common
import numpy as np
import scipy.sparse as sp

from scalelatent.data import Dataset, import_csr, make_documents, open_dataset

# Python program that prints its peak resident memory in MiB after importing a file or making documents.
PEAK_PROGRAM = """
import json, pathlib, sys
from scalelatent.data import import_csr, make_documents
what, source, out, rows = sys.argv[1:]
if what == "documents":
    make_documents(out, int(rows), base=source, n_jobs=1, overwrite=True)
else:
    import_csr(source, out, overwrite=True)
status = pathlib.Path("/proc/self/status").read_text().splitlines()
print(json.dumps(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))))
"""


def load_documents(folder: Path, seed: int) -> Dataset:
    """Return a dataset of RCV1's counts or, without SCALELATENT_DATA, of random counts of the same shape."""
    real = os.environ.get("SCALELATENT_DATA")
    path = Path(real or ".") / "rcv1" / "rcv1v2_subset27613.npz"
    if real and path.exists():
        return import_csr(path, folder / "base", values="tf")
    rng = np.random.default_rng(seed)
    x = sp.random_array((27_613, 47_236), density=77.7 / 47_236, rng=rng, format="csr")
    x.data = rng.geometric(0.65, x.nnz).astype("u2")
    return Dataset.from_arrays(x).save(folder / "base")


def write_sources(folder: Path, x: sp.csr_array) -> dict[str, Path]:
    """Write the rows to an uncompressed and to a compressed .npz file; return their paths."""
    folder.mkdir()
    found = {"csr": folder / "plain.npz", "csr compressed": folder / "packed.npz"}
    sp.save_npz(found["csr"], x, compressed=False)
    sp.save_npz(found["csr compressed"], x, compressed=True)
    return found


def read_source(path: Path) -> int:
    """Read and decompress an .npz file, a megabyte at a time; return the number of decompressed bytes."""
    total = 0
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                while part := file.read(1 << 20):
                    total += len(part)
    return total


def time_into_folder(functions: dict[str, Callable[[], Any]], rounds: int, folder: Path) -> dict[str, float]:
    """Return the smallest seconds of each function; the folder is removed before each call."""
    return common.fastest(functions, rounds, lambda: shutil.rmtree(folder, ignore_errors=True))


def measure_peak(what: str, source: Path, out: Path, rows: int = 0) -> float:
    """Return the peak resident MiB of a process that imports ``source`` or makes documents from it."""
    command = [sys.executable, "-c", PEAK_PROGRAM, what, str(source), str(out), str(rows)]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, timeout=600).stdout))


def measure_importer_rates(sources: dict[str, Path], folder: Path, rounds: int) -> dict[str, Any]:
    """Return MB of decompressed content per second of importing each file, and of only reading it."""
    out = {}
    for name, path in sources.items():
        content = read_source(path) / 1e6
        times = time_into_folder(
            {
                "read": lambda path=path: read_source(path),
                "import": lambda path=path: import_csr(path, folder / "out"),
            },
            rounds,
            folder / "out",
        )
        out[name] = {
            "file_mb": round(path.stat().st_size / 1e6, 1),
            "content_mb": round(content, 1),
            "read_alone_mb_s": round(content / times["read"]),
            "import_mb_s": round(content / times["import"]),
            "share_of_reading": round(times["read"] / times["import"], 3),
        }
        print(name, out[name])
    return out


def measure_document_rates(base: Dataset, folder: Path, rows: int, seed: int) -> dict[str, Any]:
    """Return the rates of making documents, and of writing and reading them."""
    made: dict[str, Any] = {}

    def make() -> None:
        made["ds"] = make_documents(folder / "docs", rows, base=base.url or "", seed=seed)

    seconds = time_into_folder({"make": make}, 3, folder / "docs")["make"]
    ds = made["ds"]
    in_memory = Dataset.from_arrays(ds.read_x(0, min(rows, 150_000)))

    def read() -> None:
        for a, b in ds.pieces():
            ds.read_x(a, b)

    save = {"read": read, "save": lambda: in_memory.save(folder / "saved")}
    times = time_into_folder(save, 5, folder / "saved")
    stored = sum(f.stat().st_size for f in (folder / "docs").rglob("*") if f.is_file())
    return {
        "rows": rows,
        "nnz_per_row": round(ds.nnz / rows, 1),
        "documents_per_s": round(rows / seconds),
        "full_rcv1_seconds": round(804_414 * seconds / rows, 1),
        "bytes_of_an_entry_on_disk": round(stored / ds.nnz, 2),
        "read_mb_s": round(ds.nbytes / 1e6 / times["read"]),
        "save_mb_s": round(in_memory.nbytes / 1e6 / times["save"]),
    }


def main() -> None:
    parser = common.parser(__doc__, "data_sparse")
    parser.add_argument("--rows", type=int, default=200_000, help="number of documents to make")
    parser.add_argument("--imported", type=int, default=160_000, help="documents in the imported files")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = load_documents(folder, args.seed)
        results: dict[str, Any] = {
            "base": {"rows": base.n_rows, "features": base.n_features, "nnz": base.nnz}
        }
        results["rows"] = measure_document_rates(base, folder, args.rows, args.seed)
        print(results["rows"])
        x = open_dataset(folder / "docs").read_x(0, min(args.imported, args.rows))
        small, large = write_sources(folder / "1", x[: x.shape[0] // 4]), write_sources(folder / "4", x)
        results["importers"] = measure_importer_rates(large, folder, args.rounds)
        peaks = {n: [round(measure_peak(n, s[n], folder / "out")) for s in (small, large)] for n in small}
        row_counts = (args.rows // 4, args.rows)
        peaks["documents"] = [
            round(measure_peak("documents", folder / "base", folder / "out", n)) for n in row_counts
        ]
        results["peak_mib_of_one_and_of_four_times_the_rows"] = peaks
        print(peaks)
    common.write(args.out, args.seed, results)


if __name__ == "__main__":
    main()
