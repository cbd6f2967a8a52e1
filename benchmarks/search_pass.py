"""Compare a search whose 16 candidates share each pass with 16 single fits.

    python benchmarks/search_pass.py FOLDER

All methods run in one process with 2 threads. The rows are streamed from disk without a cache, so that every
pass reads all rows:

    search    `sl.Search` over 16 candidates with validation rows
    singles   the same candidates, fitted one after the other; the bits must be the same
    grid      GridSearchCV over the same candidates and split; it needs the rows as one array, which is read
              into memory first and copied for the split
    folds     `sl.Search` over 4 capsule dimensions in 4 folds (16 fits); compared with `folds_grid`, which
              is GridSearchCV with the same folds on the array in memory

Seconds (wall and CPU) are the smallest of several rounds; a round runs all methods. Rows and bytes are those
that the learning passes read.
"""

from __future__ import annotations

import os

os.environ["SCALELATENT_CACHE_BYTES"] = "0"

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, stored_rows, write
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold, ParameterGrid

import scalelatent as sl

GRID = {"capsule_dim": [1, 2, 4, 8], "momentum": [0.0, 0.3, 0.6, 0.9]}


class KeepingSearch(sl.Search):
    """Search that stores the models of all candidates in ``models_``."""

    def _set_results(self, params: Any, candidates: Any, scores: Any) -> None:
        self.models_ = [candidate.model for candidate in candidates]
        super()._set_results(params, candidates, scores)


class PassReads(sl.Callback):
    """Callback that counts the passes of learning, and the rows and bytes that they read."""

    def __init__(self) -> None:
        self.passes = self.rows = self.bytes = 0

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.passes += 1
        self.rows += record["rows"]
        self.bytes += record["bytes_read"]

    def to_results(self) -> dict[str, Any]:
        """Return the counts by their names in the JSON file."""
        return {"passes": self.passes, "rows_read": self.rows, "bytes_read": self.bytes}


def read_all_rows(dataset: sl.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows as one array, which GridSearchCV needs, and their classes."""
    return dataset.read_x(0, len(dataset)), dataset.read_y(0, len(dataset))


def measure(dataset: sl.Dataset, base: sl.CapsuleRegression, rounds: int) -> dict[str, Any]:
    """Return seconds of the five methods in ``ways``, rows and bytes that they read, and ratios."""
    cut = len(dataset) * 5 // 6
    train, held = dataset[:cut], dataset[cut:]
    candidates = list(ParameterGrid(GRID))
    quiet = clone(base).set_params(n_jobs=2)
    some = {"capsule_dim": GRID["capsule_dim"]}

    def search(log: PassReads) -> Any:
        return KeepingSearch(quiet, candidates, n_jobs=2).fit(train, validation=held, callbacks=log)

    def singles(log: PassReads) -> Any:
        return [
            clone(quiet).set_params(**own).fit(train, validation=held, callbacks=log) for own in candidates
        ]

    def grid(log: PassReads) -> Any:
        split = [(np.arange(cut), np.arange(cut, len(dataset)))]
        return GridSearchCV(quiet, GRID, cv=split, refit=False).fit(*read_all_rows(dataset))

    def folds(log: PassReads) -> Any:
        return sl.Search(quiet, some, cv=4, refit=False, n_jobs=2).fit(dataset, callbacks=log)

    def folds_grid(log: PassReads) -> Any:
        return GridSearchCV(quiet, some, cv=KFold(4), refit=False).fit(*read_all_rows(dataset))

    ways = {"search": search, "singles": singles, "grid": grid, "folds": folds, "folds_grid": folds_grid}
    results: dict[str, Any] = {name: {} for name in ways}
    kept: dict[str, Any] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            log = PassReads()
            begin, busy = time.perf_counter(), time.process_time()
            kept[name] = way(log)
            seconds, busy = time.perf_counter() - begin, time.process_time() - busy
            least = {"seconds": round(seconds, 3), "cpu_seconds": round(busy, 3)}
            for key, value in least.items():
                least[key] = min(value, results[name].get(key, np.inf))
            results[name] = {**least, **(log.to_results() if log.passes else {})}
            print(name, results[name], flush=True)
    pairs = zip(kept["search"].models_, kept["singles"], strict=True)
    results["candidates_of_same_bits"] = sum(bool(np.array_equal(a.W_, b.W_)) for a, b in pairs)
    for name, over in (("singles", "search"), ("grid", "search"), ("folds_grid", "folds")):
        for key in ("seconds", "cpu_seconds"):
            results[f"{name}_over_{over}_{key}"] = round(results[name][key] / results[over][key], 2)
    results["array_bytes"] = int(np.prod((len(dataset), dataset.n_features))) * dataset.dtype.itemsize
    return results


def main() -> None:
    arguments = parser(__doc__, "search_pass")
    arguments.add_argument(
        "folder", type=Path, nargs="?", default=None, help="folder of the rows; a temporary folder by default"
    )
    arguments.add_argument("--rows", type=int, default=120_000)
    arguments.add_argument("--passes", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=2)
    options = arguments.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    dataset = stored_rows(folder, options.rows, options.seed)
    base = sl.CapsuleRegression(
        architecture="multiclass",
        nu_schedule=None,
        max_iter=options.passes,
        projection=None,
        random_state=options.seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base.fit(dataset[:20_000])  # This fit compiles the kernels.
    results = {
        "rows": options.rows,
        "features": dataset.n_features,
        "passes": options.passes,
        "candidates": len(ParameterGrid(GRID)),
        **measure(dataset, base, options.rounds),
    }
    write(options.out, options.seed, results)


if __name__ == "__main__":
    main()
