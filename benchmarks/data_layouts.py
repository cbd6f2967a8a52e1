"""Read and write rate of dataset layouts against numpy.memmap: chunk rows x shard x codec.

    python benchmarks/data_layouts.py [--rows 40000] [--out benchmarks/results]

Rows: uint8 28x28 digit images (MNIST where the environment variable SCALELATENT_DATA names a folder with
`mnist/train-images-idx3-ubyte.gz`, else enlarged built-in digits) and float32 noise, 196 numbers wide. All
reads come from a warm page cache, on one thread: that is the rate a layout costs in CPU time; a disk can only
make it slower, and a packed layout gains there what the column "x smaller" says.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from scalelatent.data import create_dataset

CHUNK_ROWS = (1024, 4096, 16384)
CHUNKS_PER_SHARD = (1, 8)
COMPRESSORS = (None, "lz4", "zstd")


def environment() -> dict[str, Any]:
    """Machine, versions and date of a benchmark result."""
    import numba
    import numcodecs
    import zarr

    import scalelatent

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (n.split(":")[1].strip() for n in info.read_text().splitlines() if "model name" in n), model
        )
    modules = (np, zarr, numcodecs, numba, scalelatent)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": model, "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **{m.__name__: m.__version__ for m in modules}},
    }


def mnist_file(name: str = "train-images-idx3-ubyte.gz") -> Path | None:
    """A file of MNIST in the folder SCALELATENT_DATA, where there is one."""
    path = Path(os.environ.get("SCALELATENT_DATA", "/nonexistent"), "mnist", name)
    return path if path.exists() else None


def digit_images(rows: int) -> tuple[np.ndarray, str]:
    """(rows, 28, 28) uint8 images and what they are."""
    path = mnist_file()
    if path is not None:
        with gzip.open(path) as file:
            images = np.frombuffer(file.read(16 + rows * 784), np.uint8, offset=16).reshape(-1, 28, 28)
        return np.resize(images, (rows, 28, 28)), "MNIST"
    from scalelatent.data.digits import base_digits

    large = np.kron(base_digits()[0], np.ones((1, 3, 3), np.uint8))
    return np.resize(np.pad(large, ((0, 0), (2, 2), (2, 2))), (rows, 28, 28)), "built-in digits, enlarged"


def fastest(work: Any, repeats: int = 3) -> float:
    """Seconds of the fastest of a few runs."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def memmap_rate(x: np.ndarray, folder: Path) -> float:
    """GB/s of copying rows out of a memmap, 4,096 at a time."""
    np.save(folder / "rows.npy", x)
    rows = np.load(folder / "rows.npy", mmap_mode="r")
    return x.nbytes / 1e9 / fastest(lambda: [rows[a : a + 4096].copy() for a in range(0, len(rows), 4096)])


def layout_rate(x: np.ndarray, url: Path, chunk: int, shard: int, compressor: str | None) -> dict[str, Any]:
    """Write and read the rows in one layout."""
    begin = time.perf_counter()
    writer = create_dataset(
        url,
        len(x),
        x.shape[1:],
        x.dtype,
        chunk_rows=chunk,
        shard_rows=shard,
        compressor=compressor,
        overwrite=True,
    )
    for i in range(writer.n_shards):
        a, b = writer.shard_bounds(i)
        writer.write_shard(i, x[a:b])
    ds = writer.finalize()
    written = time.perf_counter() - begin
    read = fastest(lambda: [ds.read_x(a, b) for a, b in ds.pieces()])
    size = sum(f.stat().st_size for f in url.rglob("*") if f.is_file())
    return {
        "chunk_rows": chunk,
        "shard_rows": shard,
        "compressor": compressor,
        "read_gb_s": round(x.nbytes / 1e9 / read, 3),
        "write_gb_s": round(x.nbytes / 1e9 / written, 3),
        "times_smaller": round(x.nbytes / size, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    images, what = digit_images(args.rows)
    noise = np.random.Generator(np.random.Philox(0)).standard_normal((args.rows, 196), dtype=np.float32)
    result: dict[str, Any] = {
        **environment(),
        "rows": args.rows,
        "seed": 0,
        "page_cache": "warm",
        "threads": 1,
    }
    print(
        f"{'rows':<28}{'chunk':>7}{'shard':>8}{'codec':>7}{'read GB/s':>11}{'write GB/s':>12}"
        f"{'x smaller':>11}"
    )
    with tempfile.TemporaryDirectory() as name:
        for label, x in ((f"uint8 28x28 ({what})", images), ("float32 196 (noise)", noise)):
            rate = memmap_rate(x, Path(name))
            print(f"{label:<28}{'':>7}{'':>8}{'memmap':>7}{rate:>11.2f}")
            rows = []
            for compressor in COMPRESSORS:
                for chunk in CHUNK_ROWS:
                    for k in CHUNKS_PER_SHARD:
                        row = layout_rate(x, Path(name, "ds"), chunk, chunk * k, compressor)
                        rows.append(row)
                        print(
                            f"{'':<28}{chunk:>7}{chunk * k:>8}{compressor or 'none':>7}"
                            f"{row['read_gb_s']:>11.2f}"
                            f"{row['write_gb_s']:>12.2f}{row['times_smaller']:>11.2f}"
                        )
            result[label] = {"memmap_read_gb_s": round(rate, 3), "layouts": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "data_layouts.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {args.out / 'data_layouts.json'}", file=sys.stderr)


if __name__ == "__main__":
    main()
