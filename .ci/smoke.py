"""A first use of the installed package: save and open rows, and fit models in one process and on a cluster.

Usage: ``python smoke.py FOLDER``. `.ci/run` runs this file with the newest releases of all dependencies and
with the oldest that are allowed.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from sklearn.datasets import load_digits

import scalelatent as sl


def make_models() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Return a small model of each kind by name, and a function that selects the method to compare after its
    fit.
    """
    random = {"random_state": 0}
    return {
        "CapsuleRegression": (sl.CapsuleRegression(capsule_dim=2, max_iter=5, **random), lambda m: m.predict),
        "ConditionalRBM": (sl.ConditionalRBM(n_hidden=8, n_epochs=2, **random), lambda m: m.predict),
        "MultilayerBootstrapNetwork": (
            sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=20, k1=60, n_components=2, **random),
            lambda m: m.transform,
        ),
    }


def main() -> None:
    """Fit and save each model in one process and fit it on a cluster; stop with a traceback at the first
    failure.

    On the cluster, each model must give the same bits as in one process.
    """
    folder = Path(sys.argv[1])
    x, y = load_digits(return_X_y=True)
    x, y = x.astype("u1")[:600], y[:600]
    dense = sl.Dataset.from_arrays(x, y).save(folder / "dense.zarr", chunk_rows=100, shard_rows=200)
    sparse = sl.Dataset.from_arrays(scipy.sparse.csr_matrix(x, dtype="f4"), y).save(folder / "csr.zarr")
    for ds in (dense, sparse):
        rows = sl.open_dataset(ds.url).read_x(150, 450)
        np.testing.assert_array_equal(rows.toarray() if scipy.sparse.issparse(rows) else rows, x[150:450])
    bits = (x > 7).astype("f4")
    targets = sl.Dataset.from_arrays(bits, (bits[:, ::4] > 0).astype("f4")).save(folder / "bits.zarr")
    alone = {}
    for name, (model, use) in make_models().items():
        ds = targets if name == "ConditionalRBM" else dense
        model.fit(ds)
        model.save(folder / f"{name}.zarr")
        loaded = sl.load_model(folder / f"{name}.zarr")
        alone[name] = use(model)(ds.read_x(0, 50))
        np.testing.assert_array_equal(use(loaded)(ds.read_x(0, 50)), alone[name])
        print(f"{name}: fitted, saved, loaded", flush=True)
    sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=10, k1=40, n_components=2, random_state=0).fit(
        sparse
    )
    with sl.cluster("local", workers=2):
        for name, (model, use) in make_models().items():
            ds = targets if name == "ConditionalRBM" else dense
            np.testing.assert_array_equal(use(model.fit(ds))(ds.read_x(0, 50)), alone[name])
            print(f"{name}: the same on a cluster", flush=True)


if __name__ == "__main__":  # Workers import this file again.
    warnings.filterwarnings("error", module="scalelatent")
    main()
