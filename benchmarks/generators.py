"""Measure the rates of making binary image sets, and of shuffling, appending and converting rows.

    python benchmarks/generators.py [--rows 100000] [--out benchmarks/results/generators.json]

Rates "..._per_core" divide by the CPU seconds of the whole process, including helper threads and writing;
compilation is not timed. The rates "rows_images_s" are those of `ImageSet.rows`, which returns images and
writes no file. Rates of `data shuffle` and `data convert` are MB of rows per second; they are compared with
the rates of reading alone and of `Dataset.save`. Files are written to a temporary folder.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tempfile
import time
from collections.abc import Callable
from typing import Any

import common

from scalelatent.data import (
    Dataset,
    append_rows,
    convert_dataset,
    image_set,
    make_corrupted,
    make_digits,
    make_images,
    shuffle_dataset,
)
from scalelatent.generators.corrupted import CORRUPTIONS
from scalelatent.generators.images import DEFAULTS


def measure_seconds(function: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """Return the smallest wall seconds and the smallest CPU seconds of ``repeats`` calls."""
    wall, cpu = [], []
    for _ in range(repeats):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        function()
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    return min(wall), min(cpu)


def measure_image_rates(folder: str, n_rows: int, seed: int) -> dict[str, Any]:
    """Return the images per second of each kind of generated images, with and without writing."""
    out: dict[str, Any] = {}
    for kind in DEFAULTS:
        images = image_set(kind, seed=seed)
        n = n_rows // (20 if kind == "text" else 1)
        images.rows(0, 10)
        alone, _ = measure_seconds(lambda images=images, n=n: images.rows(0, n // 10))
        wall, cpu = measure_seconds(
            lambda kind=kind, n=n: make_images(f"{folder}/m", kind, n, seed=seed, overwrite=True)
        )
        out[kind] = {
            "image": "x".join(map(str, images.image_shape)),
            "rows_images_s": round(n // 10 / alone),
            "written_images_s": round(n / wall),
            "written_images_s_per_core": round(n / cpu),
        }
    return out


def measure_corruption_rates(folder: str, n_rows: int, seed: int) -> dict[str, Any]:
    """Return the pairs of a corrupted and a clean 28 x 28 image that are made per second."""
    from numpy import random, uint8

    pixels = random.default_rng(seed).integers(0, 256, (10_000, 28, 28), dtype=uint8)
    Dataset.from_arrays(pixels, pixels[:, 0, 0] % 10).save(f"{folder}/base")
    out: dict[str, Any] = {}
    for kind in CORRUPTIONS:
        arguments: dict[str, Any] = {"base": f"{folder}/base", "seed": seed, "overwrite": True}
        make_corrupted(f"{folder}/c", kind, rows=100, **arguments)
        wall, cpu = measure_seconds(
            lambda kind=kind, a=arguments: make_corrupted(f"{folder}/c", kind, rows=n_rows, **a)
        )
        out[kind] = {"pairs_s": round(n_rows / wall), "pairs_s_per_core": round(n_rows / cpu)}
    return out


def measure_order_rates(folder: str, n_rows: int, seed: int) -> dict[str, Any]:
    """Return the MB/s of reading, saving, shuffling, converting and appending 28 x 28 random uint8 images."""
    from numpy import random, uint8

    pixels = random.default_rng(seed).integers(0, 4, (n_rows, 28, 28), dtype=uint8) * 80
    ds = Dataset.from_arrays(pixels, pixels[:, 0, 0] % 10).save(f"{folder}/rows")
    del pixels
    size = ds.n_rows * ds.n_features / 1e6

    def read() -> None:
        for a, b in ds.pieces():
            ds.read_x(a, b)

    place: dict[str, Any] = {"overwrite": True}
    runs: dict[str, Callable[[], Any]] = {
        "read": read,
        "save": lambda: ds.save(f"{folder}/out", **place),
        "shuffle in memory": lambda: shuffle_dataset(ds, f"{folder}/out", seed=seed, memory=4 << 30, **place),
        "shuffle, memory a quarter of the rows": lambda: shuffle_dataset(
            ds, f"{folder}/out", seed=seed, memory=int(size * 1e6 / 4), **place
        ),
        "convert to zstd": lambda: convert_dataset(ds, f"{folder}/out", compressor="zstd", **place),
        "convert to float32": lambda: convert_dataset(ds, f"{folder}/out", dtype="f4", **place),
    }
    out = {name: round(size / measure_seconds(run)[0], 1) for name, run in runs.items()}
    ds[:1000].save(f"{folder}/grown")
    begin = time.perf_counter()
    append_rows(f"{folder}/grown", ds)
    out["append"] = round(size / (time.perf_counter() - begin), 1)
    return {"mb": round(size), "mb_s": out}


def main() -> None:
    parser = common.parser(__doc__, "generators")
    parser.add_argument("--rows", type=int, default=100_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_digits(f"{folder}/warm", 2000)
        results = {
            "rows": args.rows,
            "images": measure_image_rates(folder, args.rows, args.seed),
            "corrupted pairs, 28x28": measure_corruption_rates(folder, args.rows, args.seed),
            "order, uint8 28x28": measure_order_rates(folder, args.rows, args.seed),
        }
    for name, part in results.items():
        print(name, part)
    common.write(args.out, args.seed, results)


if __name__ == "__main__":
    main()
