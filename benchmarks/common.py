"""Shared functions of the benchmarks: load data, time functions, and write results to JSON files."""

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


def describe_machine() -> dict[str, Any]:
    """Return this machine's processor, cores and memory, versions of Python and packages, and the date."""
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


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formatter of --help that shows each option's default and keeps the description's line breaks."""


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options --out and --seed, which all benchmarks have.

    ``description`` is the module docstring of the benchmark; the default of --out is results/``name``.json.
    """
    out = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    out.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="JSON file of the results")
    out.add_argument("--seed", type=int, default=0, help="first or only seed of data and fits")
    return out


def describe_command() -> str:
    """Return this process's command line, in which absolute paths and ../ paths become names in capitals."""

    def hide_folder(word: str) -> str:
        option, equals, value = word.rpartition("=")
        outside = Path(value).is_absolute() or value.startswith("..")
        return option + equals + (Path(value).name.upper() if outside else value)

    script, *given = sys.argv
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *map(hide_folder, given)])


def write(path: Path, seed: int, results: Any) -> None:
    """Write the results of a benchmark to a JSON file, with the command, seed and machine that gave them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": describe_command(), "seed": seed, "machine": describe_machine(), "results": results}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path}")


def write_part(path: Path, part: str, seed: int, result: Any) -> None:
    """Write the result of one part of a benchmark to its JSON file, with command, seed and machine.

    Parts are measurements that can run alone. Results of other parts stay in the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}
    source = {"command": describe_command(), "seed": seed, "machine": describe_machine()}
    parts[part] = {**source, "result": result}
    path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")
    print(f"{part}: written to {path}", flush=True)


def write_png(figure: Any, path: str | Path) -> None:
    """Write a matplotlib figure to a PNG file with the settings of the package's reports of fits."""
    from scalelatent.report.style import png_bytes

    Path(path).write_bytes(png_bytes(figure))


def measure_medians(functions: dict[str, Callable[[], Any]], rounds: int = 9) -> dict[str, float]:
    """Return each function's median seconds over ``rounds`` rounds, which call all functions in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():  # The first calls may compile, so they are not timed.
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
    """Return each function's smallest seconds over ``rounds`` rounds, which call all functions in turn.

    ``before`` is called before each call of a function, and is not timed.
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
    """Return the folder of downloaded data sets that SCALELATENT_DATA names; exit without this variable."""
    folder = os.environ.get("SCALELATENT_DATA")
    if not folder:
        raise SystemExit("set SCALELATENT_DATA to the folder that contains mnist/")
    return Path(folder)


def digit_images(rows: int) -> tuple[Any, str]:
    """Return (images (rows, 28, 28) uint8, name) of MNIST or, without its files, of enlarged small digits."""
    import numpy as np

    if os.environ.get("SCALELATENT_DATA"):
        return np.resize(mnist()[0].reshape(-1, 28, 28), (rows, 28, 28)), "MNIST"
    from scalelatent.generators.bases import load_base_digits

    large = np.kron(load_base_digits()[0], np.ones((1, 3, 3), np.uint8))
    return np.resize(np.pad(large, ((0, 0), (2, 2), (2, 2))), (rows, 28, 28)), "built-in digits, enlarged"


def mnist(rows: slice = slice(None), part: str = "train") -> tuple[Any, Any]:
    """Return (images (n, 784) uint8, labels) of MNIST's "train" or "test" part from its IDX files."""
    import gzip

    import numpy as np

    names = {"train": "train", "test": "t10k"}
    with gzip.open(data_folder() / "mnist" / f"{names[part]}-images-idx3-ubyte.gz") as file:
        x = np.frombuffer(file.read(), dtype=np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(data_folder() / "mnist" / f"{names[part]}-labels-idx1-ubyte.gz") as file:
        y = np.frombuffer(file.read(), dtype=np.uint8, offset=8)
    return x[rows], y[rows]


def usps(part: str = "train") -> tuple[Any, Any]:
    """Return (images (n, 256) float32 in [0, 1], labels) of USPS's "train" or "test" part."""
    import h5py
    import numpy as np

    with h5py.File(data_folder() / "usps" / "usps.h5") as file:
        return file[f"{part}/data"][:].astype(np.float32), file[f"{part}/target"][:].astype(np.int64)


def mnist16(part: str = "train") -> tuple[Any, Any]:
    """Return (images (n, 256) float32 in [0, 1], labels) of MNIST, cropped and averaged to 16 x 16 pixels."""
    import numpy as np

    x, y = mnist(part=part)
    return shrink_to_16x16(x.astype(np.float32) / 255), y


def shrink_to_16x16(x: Any) -> Any:
    """Return images (n, 784), cropped by 2 pixels on each side and averaged to 16 x 16: (n, 256) float32."""
    from scalelatent.data import Dataset, convert_dataset

    images = Dataset.from_arrays(x.reshape(-1, 28, 28))
    small = convert_dataset(images, "memory://digits16", crop=2, resize=(16, 16), overwrite=True)
    return small.read_x(0, len(small)).reshape(-1, 256)


def rcv1_subset(n_terms: int = 2000) -> tuple[Any, Any, list[str]]:
    """Return (word counts (n, terms) CSR, topics (n, topics) CSR, topic names) of a subset of RCV1-v2.

    The terms are the ``n_terms`` most frequent ones; documents without any of them are excluded. The topics
    are those without sub-topics. The file's counts were recovered from tf-idf weights, and its topic codes
    were inferred from the order of the source's unnamed label columns.
    """
    import numpy as np
    import scipy.sparse

    found = np.load(data_folder() / "rcv1" / "rcv1v2_subset27613.npz")
    x = scipy.sparse.csr_array((found["X_tf"], found["X_indices"], found["X_indptr"]), shape=found["X_shape"])
    y_shape = tuple(found["Y_shape"])
    ones = np.ones(len(found["Y_indices"]), np.uint8)
    y = scipy.sparse.csr_array((ones, found["Y_indices"], found["Y_indptr"]), shape=y_shape)
    total = np.asarray(x.sum(axis=0), dtype=np.int64).ravel()  # Signed: the next line negates the sums.
    x = x[:, np.sort(np.argsort(-total, kind="stable")[:n_terms])]
    topics = [str(topic) for topic in found["topics"]]
    # The code of a topic starts with the code of its parent topic (C15, C151); the codes of roots end in CAT.
    narrow_topics = [topic for topic in topics if sum(other.startswith(topic) for other in topics) == 1]
    narrow_topics = [topic for topic in narrow_topics if not topic.endswith("CAT")]
    nonempty = np.flatnonzero(np.diff(x.indptr) > 0)
    return x[nonempty], y[nonempty][:, [topics.index(topic) for topic in narrow_topics]], narrow_topics


def lsa(n_components: int, seed: int) -> Any:
    """Return an estimator of latent semantic analysis (Deerwester et al., 1990): an SVD of tf-idf weights."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.pipeline import make_pipeline

    return make_pipeline(TfidfTransformer(sublinear_tf=True), TruncatedSVD(n_components, random_state=seed))


def single_topics(topics: Any) -> tuple[Any, Any]:
    """Return (row numbers, topics) of documents with one topic that at least 100 documents have alone."""
    import numpy as np

    rows = np.flatnonzero(np.diff(topics.indptr) == 1)
    y = topics[rows].indices
    common = np.isin(y, np.flatnonzero(np.bincount(y) >= 100))
    return rows[common], y[common]


def open_or_create(path: Path, make: Callable[[], Any]) -> Any:
    """Return the dataset at a path; if it does not exist, call ``make`` to create it."""
    import scalelatent as sl

    try:
        return sl.open_dataset(path)
    except ValueError:
        return make()


def infinite_digits(folder: Path, rows: int, seed: int) -> tuple[Any, Any, Any]:
    """Return training, validation and test datasets in ``folder``; create those that do not exist.

    Training rows are infinite digits, random deformations of MNIST rows 0:50000. Validation rows are MNIST
    rows 50000:60000, and test rows are MNIST's test images.
    """
    from scalelatent.data import import_idx, make_digits

    files = data_folder() / "mnist"
    folder.mkdir(parents=True, exist_ok=True)

    def imported(name: str) -> Any:
        sources = (files / f"{name}-{what}-ubyte.gz" for what in ("images-idx3", "labels-idx1"))
        return open_or_create(folder / f"{name}.zarr", lambda: import_idx(*sources, folder / f"{name}.zarr"))

    base, test = imported("train"), imported("t10k")
    options: dict[str, Any] = {"base": str(folder / "train.zarr"), "base_rows": (0, 50_000), "seed": seed}
    train = make_digits(folder / f"digits-{rows}.zarr", rows, resume=True, **options)
    return train, base[50_000:60_000], test


def stored_rows(folder: Path, n: int, seed: int, features: int = 196) -> Any:
    """Return n float32 rows of noise around ten class means, as a dataset on disk; create it if needed."""
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
    return open_or_create(path, make)
