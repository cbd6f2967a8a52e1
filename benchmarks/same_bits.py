"""Compare the digests of one fit that runs in five settings.

    python benchmarks/same_bits.py FOLDER

Each model is fitted to the same generated images on disk: by one thread; by two threads; by two Dask
workers; by two Dask workers, one of which is killed after the second pass; and with an interruption after
the second pass and a resume. The digest covers all arrays of the saved model, so that equal digests mean
equal weights, bit for bit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import open_or_create, parser, write

import scalelatent as sl
from scalelatent.data import create_dataset

MODELS: dict[str, Callable[[int | None], Any]] = {
    "CapsuleRegression": lambda n: sl.CapsuleRegression(
        architecture="multiclass", algorithm="em", max_iter=20, random_state=0, n_jobs=n
    ),
    "LinearMixtureClassifier": lambda n: sl.LinearMixtureClassifier(random_state=0, n_jobs=n),
    "MultilayerBootstrapNetwork": lambda n: sl.MultilayerBootstrapNetwork(
        n_clusterings=40, k1=200, decay=0.5, random_state=0, n_jobs=n
    ),
    "ConditionalRBM": lambda n: sl.ConditionalRBM(
        n_hidden=32, n_epochs=4, conditional=False, learner="cd", random_state=0, n_jobs=n
    ),
    "HierarchicalCompositionalNetwork": lambda n: sl.HierarchicalCompositionalNetwork(
        online=True, n_epochs=4, batch_size=50, random_state=0, n_jobs=n
    ),
}
SETTINGS = ("one thread", "two threads", "two workers", "a worker killed", "interrupted, resumed")


class CallOnce(sl.Callback):
    """Callback that calls a function at the second pass or epoch."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.passes = act, 0

    def on_pass_end(self, record: dict[str, Any]) -> None:
        """Count the passes, and call the function at the second."""
        self.passes += 1
        if self.passes == 2:
            self.act()


def open_images(folder: Path, rows: int, seed: int) -> sl.Dataset:
    """Return noisy copies (5 % inverted pixels) of ten binary images as a dataset; create it if needed."""

    def make() -> sl.Dataset:
        rng = np.random.default_rng(seed)
        y = rng.integers(0, 10, rows).astype(np.uint8)
        x = (rng.random((10, 8, 8)) < 0.4)[y] ^ (rng.random((rows, 8, 8)) < 0.05)
        writer = create_dataset(
            str(path), rows, (8, 8), "uint8", y_dtype="uint8", chunk_rows=500, shard_rows=500
        )
        for shard in range(writer.n_shards):
            a, b = writer.shard_bounds(shard)
            writer.write_shard(shard, x[a:b].astype(np.uint8), y[a:b])
        return writer.finalize()

    path = folder / f"images-{rows}.zarr"
    return open_or_create(path, make)


def compute_digest(model: Any, folder: Path) -> str:
    """Return a digest of all arrays of the saved model, without metadata, which name the run folder."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save(folder)
    total = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"):
        total.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return total.hexdigest()[:12]


def fit_model(make: Callable[[int | None], Any], setting: str, data: sl.Dataset, run: Path) -> Any:
    """Fit a model in the setting ``setting``; return it, or a text if the interruption came too late."""
    if setting == "one thread":
        return make(1).fit(data)
    if setting == "two threads":
        return make(2).fit(data)
    if setting == "interrupted, resumed":
        stop = CallOnce(partial(signal.raise_signal, signal.SIGINT))
        try:
            make(2).fit(data, run_dir=run, callbacks=[stop])
        except KeyboardInterrupt:
            return make(2).fit(data, run_dir=run, resume=True)
        return "not interrupted"
    with sl.cluster(workers=2) as client:
        callbacks = []
        if setting == "a worker killed":
            processes = client.run(os.getpid)
            kill = partial(os.kill, next(iter(processes.values())), signal.SIGKILL)
            callbacks.append(CallOnce(kill))
        return make(None).fit(data, client=client, run_dir=run, callbacks=callbacks)


def main() -> None:
    arguments = parser(__doc__, "same_bits")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--rows", type=int, default=20_000)
    a = arguments.parse_args()
    data = open_images(a.folder, a.rows, a.seed)
    results: dict[str, dict[str, str]] = {}
    for name, make in MODELS.items():
        results[name] = {}
        for setting in SETTINGS:
            run = a.folder / f"{name}-{setting.replace(' ', '-').replace(',', '')}"
            shutil.rmtree(run, ignore_errors=True)
            model = fit_model(make, setting, data, run)
            results[name][setting] = (
                model if isinstance(model, str) else compute_digest(model, a.folder / "model")
            )
        print(name, results[name], flush=True)
    write(a.out, a.seed, {"rows": a.rows, "digests": results})


if __name__ == "__main__":
    main()
