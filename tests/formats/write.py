"""Write the files of this version, so that later versions can test that they open them.

    python -m tests.formats.write FOLDER

The files are a dataset, saved models, and run folders of interrupted fits with the results
that these fits would have had. ``version_0_1_0.zip`` was written by 0.1.0, before modules moved to their
present places.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

import scalelatent as sl

ROWS, FEATURES = 240, 12


def make_rows() -> tuple[np.ndarray, np.ndarray]:
    """Return float32 rows (240, 12) and their class codes 0 to 2."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, ROWS)
    return (rng.random((ROWS, FEATURES)) + 0.3 * np.eye(FEATURES)[4 * y]).astype(np.float32), y


def make_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Return binary observed rows x (240, 8) and binary outputs v (240, 4) for a conditional RBM."""
    bits = (make_rows()[0] > 0.5).astype(np.uint8)
    return bits[:, :8], bits[:, 8:]


def list_fits() -> dict[str, tuple[object, bool]]:
    """Return by name: an estimator, and whether it learns from pairs (x, v) or from rows with classes."""
    capsule = {
        "architecture": "multiclass", "capsule_dim": 2, "random_state": 0, "projection": None,
        "fit_intercept": False, "ridge": 0
    }  # fmt: skip
    return {
        "batch": (sl.CapsuleRegression(max_iter=6, **capsule), False),
        "stepwise": (sl.CapsuleRegression(algorithm="stepwise", n_epochs=3, **capsule), False),
        "crbm": (sl.ConditionalRBM(n_hidden=4, n_epochs=4, learning_rate=0.05, random_state=0), True),
    }


def list_learned(model: object) -> np.ndarray:
    return model.W_  # type: ignore[attr-defined]


class Interrupt(sl.Callback):
    """Callback that interrupts a fit after its second pass."""

    passes = 0

    def on_pass_end(self, record: dict[str, object]) -> None:
        self.passes += 1
        if self.passes == 2:
            raise KeyboardInterrupt


def write(folder: Path) -> None:
    x, y = make_rows()
    sl.Dataset.from_arrays(x, y).save(folder / "rows.zarr")
    network = sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=50, k1=8, random_state=0).fit(x)
    network.save(folder / "network.model")
    np.save(folder / "network.npy", network.transform(x))
    for name, (model, paired) in list_fits().items():
        given = make_pairs() if paired else (x, y)
        np.save(folder / f"{name}.npy", list_learned(model.fit(*given)))
        model.save(folder / f"{name}.model")
        try:
            list_fits()[name][0].fit(*given, run_dir=folder / f"{name}.run", callbacks=[Interrupt()])
        except KeyboardInterrupt:
            continue
        raise SystemExit(f"{name} was not interrupted")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary))
        shutil.make_archive(
            str(Path(sys.argv[1]) / f"version_{sl.__version__.replace('.', '_')}"), "zip", temporary
        )
