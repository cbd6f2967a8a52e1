"""Functions shared by the benchmarks: data, timing, and results with machine, versions, date and seed."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "numpy",
    "numba",
    "scipy",
    "zarr",
    "numcodecs",
    "dask",
    "distributed",
    "scikit-learn",
    "threadpoolctl",
)


def machine() -> dict[str, Any]:
    """Return the processor, cores, memory, versions of Python and packages, and the date."""
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags")).split()
        cpu += " (" + "/".join(f for f in ("avx2", "avx512f", "fma") if f in flags) + ")"
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "date": datetime.date.today().isoformat(),
    }


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help with the default of each option, and with the lines of the module docstring unchanged."""


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options of all benchmarks: --out and --seed.

    The description is a module docstring; ``name`` is that of the JSON file in results/.
    """
    out = argparse.ArgumentParser(description=description, formatter_class=_Help)
    out.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="JSON file of the results")
    out.add_argument("--seed", type=int, default=0, help="first or only seed of data and fits")
    return out


def command() -> str:
    """Return the command line of this process, with names of folders instead of their paths."""

    def shown(word: str) -> str:
        option, equals, value = word.rpartition("=")
        outside = Path(value).is_absolute() or value.startswith("..")
        return option + equals + (Path(value).name.upper() if outside else value)

    script, *given = sys.argv
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *map(shown, given)])


def write(path: Path, seed: int, results: Any) -> None:
    """Write results with their command, seed and machine to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"command": command(), "seed": seed, "machine": machine(), "results": results}, indent=1)
        + "\n"
    )
    print(f"written to {path}")


def write_part(path: Path, part: str, seed: int, result: Any) -> None:
    """Write the result of one part of a benchmark, with its command, seed and machine, to a JSON file.

    The other parts in the file stay.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}
    parts[part] = {"command": command(), "seed": seed, "machine": machine(), "result": result}
    path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    print(f"{part}: written to {path}", flush=True)


def write_png(figure: Any, path: str | Path) -> None:
    """Write a figure of matplotlib to a PNG file, in the style of the report."""
    from scalelatent.report.style import png_bytes

    Path(path).write_bytes(png_bytes(figure))


def interleaved(functions: dict[str, Callable[[], Any]], rounds: int = 9) -> dict[str, float]:
    """Return the median seconds of each function; each round calls all functions in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def fastest(
    functions: dict[str, Callable[[], Any]], rounds: int = 3, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Return the smallest seconds of each function; each round calls all functions in turn.

    ``before`` is called before each function, and its time does not count.
    """
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            before()
            begin = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def data_folder() -> Path:
    """Return the folder of real data that SCALELATENT_DATA names."""
    folder = os.environ.get("SCALELATENT_DATA")
    if not folder:
        raise SystemExit("set SCALELATENT_DATA to the folder that contains mnist/")
    return Path(folder)


def digit_images(rows: int) -> tuple[Any, str]:
    """Return digit images (rows, 28, 28) uint8 and their name: MNIST, or built-in digits without its
    folder.
    """
    import numpy as np

    if os.environ.get("SCALELATENT_DATA"):
        return np.resize(mnist()[0].reshape(-1, 28, 28), (rows, 28, 28)), "MNIST"
    from scalelatent.generators.bases import load_base_digits

    large = np.kron(load_base_digits()[0], np.ones((1, 3, 3), np.uint8))
    return np.resize(np.pad(large, ((0, 0), (2, 2), (2, 2))), (rows, 28, 28)), "built-in digits, enlarged"


def mnist(rows: slice = slice(None), part: str = "train") -> tuple[Any, Any]:
    """Return (images (n, 784) uint8, labels) of MNIST from its IDX files."""
    import gzip

    import numpy as np

    names = {"train": "train", "test": "t10k"}
    with gzip.open(data_folder() / "mnist" / f"{names[part]}-images-idx3-ubyte.gz") as file:
        x = np.frombuffer(file.read(), dtype=np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(data_folder() / "mnist" / f"{names[part]}-labels-idx1-ubyte.gz") as file:
        y = np.frombuffer(file.read(), dtype=np.uint8, offset=8)
    return x[rows], y[rows]


def usps(part: str = "train") -> tuple[Any, Any]:
    """Return (images (n, 256) float32 in [0, 1], labels) of USPS from its HDF5 file."""
    import h5py
    import numpy as np

    with h5py.File(data_folder() / "usps" / "usps.h5") as file:
        return file[f"{part}/data"][:].astype(np.float32), file[f"{part}/target"][:].astype(np.int64)


def mnist16(part: str = "train") -> tuple[Any, Any]:
    """Return (images (n, 256) float32 in [0, 1], labels): MNIST without its border, averaged to 16 x 16."""
    import numpy as np

    x, y = mnist(part=part)
    return averaged(x.astype(np.float32) / 255), y


def averaged(x: Any) -> Any:
    """Return images (n, 784) without their border of 2 pixels, averaged to 16 x 16: rows (n, 256) float32."""
    from scalelatent.data import Dataset, convert_dataset

    images = Dataset.from_arrays(x.reshape(-1, 28, 28))
    small = convert_dataset(images, "memory://digits16", crop=2, resize=(16, 16), overwrite=True)
    return small.read_x(0, len(small)).reshape(-1, 256)


def rcv1_subset(n_terms: int = 2000) -> tuple[Any, Any, list[str]]:
    """Return documents of a subset of RCV1-v2: counts (n, terms) CSR uint16, topics (n, topics) CSR, and
    names of topics.

    The terms are the most frequent ones; documents without any of them are excluded. The topics are those
    without sub-topics. The counts of the file were recovered from tf-idf weights. The codes of its topics
    were inferred from the order of the source's unnamed label columns.
    """
    import numpy as np
    import scipy.sparse

    found = np.load(data_folder() / "rcv1" / "rcv1v2_subset27613.npz")
    x = scipy.sparse.csr_array((found["X_tf"], found["X_indices"], found["X_indptr"]), shape=found["X_shape"])
    y_shape = tuple(found["Y_shape"])
    ones = np.ones(len(found["Y_indices"]), np.uint8)
    y = scipy.sparse.csr_array((ones, found["Y_indices"], found["Y_indptr"]), shape=y_shape)
    total = np.asarray(x.sum(axis=0), dtype=np.int64).ravel()  # Unsigned numbers cannot be negated.
    x = x[:, np.sort(np.argsort(-total, kind="stable")[:n_terms])]
    topics = [str(topic) for topic in found["topics"]]
    # The code of a topic starts with the code of its parent topic (C15, C151); the codes of roots end in CAT.
    leaves = [topic for topic in topics if sum(other.startswith(topic) for other in topics) == 1]
    leaves = [topic for topic in leaves if not topic.endswith("CAT")]
    held = np.flatnonzero(np.diff(x.indptr) > 0)
    return x[held], y[held][:, [topics.index(leaf) for leaf in leaves]], leaves


def lsa(n_components: int, seed: int) -> Any:
    """Return an estimator of latent semantic analysis (Deerwester et al., 1990): truncated SVD of tf-idf
    weights.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.pipeline import make_pipeline

    return make_pipeline(TfidfTransformer(sublinear_tf=True), TruncatedSVD(n_components, random_state=seed))


def single_topics(topics: Any) -> tuple[Any, Any]:
    """Return (rows, topics) of the documents that have one topic, for topics with at least 100 such
    documents.
    """
    import numpy as np

    rows = np.flatnonzero(np.diff(topics.indptr) == 1)
    y = topics[rows].indices
    common = np.isin(y, np.flatnonzero(np.bincount(y) >= 100))
    return rows[common], y[common]


def open_or(path: Path, make: Callable[[], Any]) -> Any:
    """Return the dataset at a path; if it does not exist, call ``make`` to create it."""
    import scalelatent as sl

    try:
        return sl.open_dataset(path)
    except ValueError:
        return make()


def infinite_digits(folder: Path, rows: int, seed: int) -> tuple[Any, Any, Any]:
    """Return training, validation and test datasets; create those that do not exist in the folder.

    Training rows are infinite digits (random deformations) from MNIST rows 0:50000. Validation rows are MNIST
    rows 50000:60000, and test rows are those of MNIST.
    """
    from scalelatent.data import import_idx, make_digits

    files = data_folder() / "mnist"
    folder.mkdir(parents=True, exist_ok=True)

    def imported(name: str) -> Any:
        sources = (files / f"{name}-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1"))
        return open_or(folder / f"{name}.zarr", lambda: import_idx(*sources, folder / f"{name}.zarr"))

    base, test = imported("train"), imported("t10k")
    options: dict[str, Any] = {"base": str(folder / "train.zarr"), "base_rows": (0, 50_000), "seed": seed}
    train = make_digits(folder / f"digits-{rows}.zarr", rows, resume=True, **options)
    return train, base[50_000:60_000], test


def stored_rows(folder: Path, n: int, seed: int, features: int = 196) -> Any:
    """Return a dataset on disk of n rows: float32 noise around ten means, with classes; create it if
    needed.
    """
    import numpy as np

    from scalelatent.data import create_dataset

    def make() -> Any:
        writer = create_dataset(str(path), n, (features,), "float32", y_dtype="uint8", overwrite=True)
        means = np.random.default_rng(seed).normal(size=(10, features)).astype(np.float32)
        for shard in range(writer.n_shards):
            a, b = writer.shard_bounds(shard)
            rng = np.random.default_rng((seed, shard))
            y = (np.arange(a, b) % 10).astype(np.uint8)
            writer.write_shard(shard, means[y] + rng.standard_normal((b - a, features), dtype=np.float32), y)
        return writer.finalize()

    path = folder / f"noise-{n}.zarr"
    return open_or(path, make)
