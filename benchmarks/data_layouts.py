"""Measure read and write rates of dataset layouts (chunk rows, shard rows, compression) and of numpy.memmap.

    python benchmarks/data_layouts.py [--rows 40000]

A chunk is compressed as one unit; a shard is one file of several chunks. The rows are 28 x 28 digit images in
uint8 (MNIST with SCALELATENT_DATA, otherwise enlarged built-in digits) and noise of 196 float32 numbers. One
thread reads all rows from the page cache, so that the rate is the CPU cost of a layout. A disk can only be
slower; if it is the bottleneck, compressed rows arrive faster by the factor in the column "x smaller". The
last table compares the CPU time of reading with and without comparing checksums of the rows, in turn, in the
default layouts and in chunks of 4 kB.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import digit_images, fastest, parser, write

from scalelatent.data import Dataset, create_dataset

CHUNK_ROWS = (1024, 4096, 16384)
CHUNKS_PER_SHARD = (1, 8)
COMPRESSORS = (None, "lz4", "zstd")
# Each CPU time with or without checksums is the median of twice this number of reads.
CHECKSUM_ROUNDS = 20


def measure_memmap_rate(x: np.ndarray, folder: Path) -> float:
    """Return the GB/s of copying rows from a memmap, 4,096 rows at a time."""
    np.save(folder / "rows.npy", x)
    rows = np.load(folder / "rows.npy", mmap_mode="r")
    seconds = fastest({"copy": lambda: [rows[a : a + 4096].copy() for a in range(0, len(rows), 4096)]})
    return x.nbytes / 1e9 / seconds["copy"]


def measure_layout_rate(
    x: np.ndarray, url: Path, chunk: int, shard: int, compressor: str | None
) -> dict[str, Any]:
    """Write and read rows in one layout; return the rates, and how many times smaller the files are."""
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
    write_seconds = time.perf_counter() - begin
    read = fastest({"read": lambda: [ds.read_x(a, b) for a, b in ds.pieces()]})["read"]
    size = sum(f.stat().st_size for f in url.rglob("*") if f.is_file())
    return {
        "chunk_rows": chunk,
        "shard_rows": shard,
        "compressor": compressor,
        "read_gb_s": round(x.nbytes / 1e9 / read, 3),
        "write_gb_s": round(x.nbytes / 1e9 / write_seconds, 3),
        "times_smaller": round(x.nbytes / size, 2),
    }


def measure_layouts(label: str, x: np.ndarray, folder: Path) -> dict[str, Any]:
    """Return the rates of all layouts for the rows x, called ``label``; print each line of the table."""
    memmap = measure_memmap_rate(x, folder)
    print(f"{label:<28}{'':>7}{'':>8}{'memmap':>7}{memmap:>11.2f}")
    rows = []
    for compressor in COMPRESSORS:
        for chunk in CHUNK_ROWS:
            for k in CHUNKS_PER_SHARD:
                row = measure_layout_rate(x, folder / "ds", chunk, chunk * k, compressor)
                rows.append(row)
                print(
                    f"{'':<28}{chunk:>7}{chunk * k:>8}{compressor or 'none':>7}{row['read_gb_s']:>11.2f}"
                    f"{row['write_gb_s']:>12.2f}{row['times_smaller']:>11.2f}"
                )
    return {"rows": label, "memmap_read_gb_s": round(memmap, 3), "layouts": rows}


def measure_checksums(label: str, x: np.ndarray, folder: Path) -> dict[str, Any]:
    """Return the CPU time of reading rows with checksums, divided by the time without them."""
    small = max(1, 4096 // (x.nbytes // len(x)))
    ratios = {}
    for name, layout in {"default": {}, "4 kB": {"chunk_rows": small, "shard_rows": small * 1024}}.items():
        ds = Dataset.from_arrays(x).save(folder / "ds", overwrite=True, **layout)
        rows = ds._columns.x
        table, seconds = rows._crcs, {True: [], False: []}
        for _ in range(2 * CHECKSUM_ROUNDS):
            for compared in (True, False):
                rows._crcs = table if compared else None
                begin = time.process_time()
                for a, b in ds.pieces():
                    ds.read_x(a, b)
                seconds[compared].append(time.process_time() - begin)
        ratios[name] = round(float(np.median(seconds[True]) / np.median(seconds[False])), 4)
        print(f"{label:<28} chunks: {name:<8} CPU time with checksums / without {ratios[name]:.3f}")
    return {"rows": label, "checksums_cpu_ratio": ratios}


def main() -> None:
    arguments = parser(__doc__, "data_layouts")
    arguments.add_argument("--rows", type=int, default=40_000)
    given = arguments.parse_args()
    images, what = digit_images(given.rows)
    random = np.random.Generator(np.random.Philox(given.seed))
    noise = random.standard_normal((given.rows, 196), dtype=np.float32)
    print(
        f"{'rows':<28}{'chunk':>7}{'shard':>8}{'codec':>7}{'read GB/s':>11}{'write GB/s':>12}"
        f"{'x smaller':>11}"
    )
    with tempfile.TemporaryDirectory() as folder:
        results = [
            measure_layouts(label, x, Path(folder))
            for label, x in ((f"uint8 28x28 ({what})", images), ("float32 196 (noise)", noise))
        ]
        results += [
            measure_checksums(label, x, Path(folder))
            for label, x in ((f"uint8 28x28 ({what})", images), ("float32 196 (noise)", noise))
        ]
    write(given.out, given.seed, results)


if __name__ == "__main__":
    main()
