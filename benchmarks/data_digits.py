"""Rate of making infinite digits: the kernel alone, and `make_digits` with writing included.

    python benchmarks/data_digits.py [--rows 400000] [--out benchmarks/results]

Bases: the digits that ship with scikit-learn and, where the environment variable SCALELATENT_DATA names a
folder with `mnist/`, MNIST's training images. "images/s a core" counts CPU seconds of the whole process,
helper threads included; compiling and making the fields come before the clock starts. Files go to a temporary
folder.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from data_layouts import environment, fastest, mnist_file

from scalelatent.data import InfiniteDigits, import_idx, make_digits
from scalelatent.data.digits import N_TEST, base_digits

SEED = 0


def kernel_rate(digits: InfiniteDigits, rows: int = 16_384) -> float:
    """Deformed images per second of one thread, nothing written."""
    first = N_TEST + 1_000_000
    digits.rows(first, first + 8)
    return rows / fastest(lambda: digits.rows(first, first + rows), 5)


def writing_rate(folder: str, base: str, rows: int, jobs: int) -> dict[str, Any]:
    """Wall and CPU rate of `make_digits`."""
    make_digits(f"{folder}/warm", 2000, base=base, seed=SEED, overwrite=True)
    wall, cpu = time.perf_counter(), time.process_time()
    make_digits(f"{folder}/out", rows, base=base, seed=SEED, n_jobs=jobs, overwrite=True)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "rows": rows,
        "threads": jobs,
        "images_s": round(rows / wall),
        "images_s_per_core": round(rows / cpu),
        "seconds": round(wall, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    result: dict[str, Any] = {**environment(), "seed": SEED}
    with tempfile.TemporaryDirectory() as folder:
        bases = {"digits 8x8": ("digits", *base_digits())}
        images = mnist_file()
        if images is not None:
            ds = import_idx(images, mnist_file("train-labels-idx1-ubyte.gz"), f"{folder}/mnist")
            pixels = ds.read_x(0, len(ds)).reshape(-1, 28, 28)
            bases["MNIST 28x28"] = (f"{folder}/mnist", pixels, ds.read_y(0, len(ds)))
        for name, (base, pixels, labels) in bases.items():
            kernel = kernel_rate(InfiniteDigits(np.asarray(pixels), labels, seed=SEED))
            runs = [writing_rate(folder, base, args.rows, jobs) for jobs in sorted({1, os.cpu_count() or 1})]
            result[name] = {"kernel_images_s": round(kernel), "writing": runs}
            print(f"{name}: kernel alone {kernel:,.0f} images/s")
            for run in runs:
                print(
                    f"  {run['threads']} thread(s), writing included: {run['images_s']:,} images/s, "
                    f"{run['images_s_per_core']:,} a core ({run['seconds']} s)"
                )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "data_digits.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {args.out / 'data_digits.json'}")


if __name__ == "__main__":
    main()
