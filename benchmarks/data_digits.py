"""Measure the rate of making infinite digits, by the compiled kernel alone and by `make_digits` with writing.

    python benchmarks/data_digits.py [--rows 400000]

Infinite digits are random deformations of base images: the digits of scikit-learn and, with SCALELATENT_DATA,
MNIST's training images. "images_s_per_core" divides by the CPU seconds of the whole process, including helper
threads. Compilation and the deformation fields are not timed. Files are written to a temporary folder.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import numpy as np
from common import fastest, mnist, parser, write

from scalelatent.data import Dataset, InfiniteDigits, make_digits
from scalelatent.generators.bases import load_base_digits
from scalelatent.generators.digits import N_TEST


def measure_kernel_rate(digits: InfiniteDigits, rows: int = 16_384) -> float:
    """Return the deformed images per second of one thread, without writing."""
    first = N_TEST + 1_000_000
    digits.rows(first, first + 8)
    return rows / fastest({"kernel": lambda: digits.rows(first, first + rows)}, 5)["kernel"]


def measure_writing_rate(folder: str, base: str, rows: int, jobs: int, seed: int) -> dict[str, Any]:
    """Return the images per second of `make_digits` with ``jobs`` threads, by wall time and by CPU time."""
    make_digits(f"{folder}/warm", 2000, base=base, seed=seed, overwrite=True)
    wall, cpu = time.perf_counter(), time.process_time()
    make_digits(f"{folder}/out", rows, base=base, seed=seed, n_jobs=jobs, overwrite=True)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "rows": rows,
        "threads": jobs,
        "images_s": round(rows / wall),
        "images_s_per_core": round(rows / cpu),
        "seconds": round(wall, 2),
    }


def main() -> None:
    arguments = parser(__doc__, "data_digits")
    arguments.add_argument("--rows", type=int, default=400_000)
    given = arguments.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        bases = {"digits 8x8": ("digits", *load_base_digits())}
        if os.environ.get("SCALELATENT_DATA"):
            pixels, labels = mnist()
            pixels = pixels.reshape(-1, 28, 28)
            Dataset.from_arrays(pixels, labels).save(f"{folder}/mnist")
            bases["MNIST 28x28"] = (f"{folder}/mnist", pixels, labels)
        for name, (base, pixels, labels) in bases.items():
            kernel = measure_kernel_rate(InfiniteDigits(np.asarray(pixels), labels, seed=given.seed))
            threads = sorted({1, os.cpu_count() or 1})
            runs = [measure_writing_rate(folder, base, given.rows, jobs, given.seed) for jobs in threads]
            results.append({"base": name, "kernel_images_s": round(kernel), "writing": runs})
            print(f"{name}: kernel alone {kernel:,.0f} images/s")
            for run in runs:
                print(
                    f"  {run['threads']} thread(s), including writing: {run['images_s']:,} images/s, "
                    f"{run['images_s_per_core']:,} per core ({run['seconds']} s)"
                )
    write(given.out, given.seed, results)


if __name__ == "__main__":
    main()
