"""Inputs of the capsule kernels, and comparisons of their results with those of the reference kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.models.capsule.kernels import reference
from scalelatent.models.capsule.kernels.squash import squash_table
from scalelatent.models.capsule.model.members import build_members

# Largest error of h (the latent means) after the kernel, relative to the largest value of h. The kernel
# interpolates functions from a table with errors of 1e-12 and divides by the probability of a row's class,
# which magnifies these errors. In float32, h has rounding errors.
TOLERANCE = {"float64": 1e-9, "float32": 3e-6}
EDGE_ROWS = 3  # Rounding to float32 may move this many rows across a threshold, or decide their ties.
ROWS = (1, 2, 31, 127, 128, 129, 300)  # Numbers of rows; a thread block has 128 threads.
# Models by name: architecture, number of classes, and dimensions of each capsule.
ENSEMBLES = {
    "d1": ("multiclass", 2, 1),
    "d2": ("multiclass", 10, 2),
    "d8": ("multiclass", 3, 8),
    "d13": ("multiclass", 4, 13),
    "unequal": ("multiclass", 4, [1, 9, 2, 5]),
    "one_vs_all": ("one_vs_all", 5, 3),
    "all_vs_all": ("all_vs_all", 4, 4),
}


def make_case(name: str, rows: int, nu: float, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of the kernel ``residuals`` by name, for a model of ENSEMBLES.

    The columns of h have very different lengths, some columns are zero, and the weights of rows are random.
    """
    rng = np.random.default_rng((seed, rows, len(name)))
    members = build_members(*ENSEMBLES[name])
    live, classes = np.arange(members.n_members), np.arange(members.n_classes)
    # Use only members (classifiers) that distinguish class 1 from another class. All rows have class 1.
    if members.architecture == "all_vs_all":
        live, classes = np.flatnonzero(members.labels[:, 1] >= 0), np.array([1])
    dims, labels = members.dims[live], members.labels[live]
    h = rng.normal(size=(int(dims.sum()), rows)) * np.exp(rng.normal(size=rows))
    h[:, rng.random(rows) < 0.05] = 0.0
    return {
        "h": h.astype(dtype),
        "y": rng.choice(classes, rows).astype(np.int32),
        "weight": rng.gamma(1.0, size=rows),
        "dims": dims,
        "labels": labels,
        "nu": np.where(np.arange(len(live)) % 3 == 2, nu / 2, nu),
        "table": squash_table(int(dims[0].sum())),
    }


def run_reference(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Run the reference in float64; return h (the latent means), the active rows and the sums."""
    h = case["h"].astype(np.float64)
    active, sums = reference.residuals(h, *(case[k] for k in ("y", "weight", "dims", "labels", "nu")))
    return h, active, sums


def check_residuals(gpu: Any, to_device: Any, case: dict[str, Any], host_inputs: bool = True) -> None:
    """Run the device kernel on the case, and compare all results with those of the reference."""
    want_h, want_active, want_sums = run_reference(case)
    h = to_device(case["h"])
    y, weight = (case[k] if host_inputs else to_device(case[k]) for k in ("y", "weight"))
    active, sums = gpu.residuals(h, y, weight, case["dims"], case["labels"], case["nu"], case["table"])
    tolerance = TOLERANCE[case["h"].dtype.name]
    assert isinstance(sums, np.ndarray)
    assert sums.dtype == np.float64
    # Only in float32 may rounding move rows across the threshold nu, or decide a tie of two classes.
    edge = EDGE_ROWS if tolerance > 1e-6 else 0
    total = case["weight"].sum()
    np.testing.assert_allclose(sums[:, 0], want_sums[:, 0], rtol=tolerance, atol=tolerance * total)
    slack = edge * case["weight"].max(initial=0.0) + 1e-9 * total
    np.testing.assert_allclose(sums[:, 1], want_sums[:, 1], rtol=0, atol=slack)
    np.testing.assert_allclose(sums[:, 2], want_sums[:, 2], rtol=0, atol=edge)
    everything = np.arange(case["h"].shape[1])
    if want_active is None:
        assert active is None
        rows = want_rows = everything
    else:
        assert active.dtype == np.int32
        rows, want_rows = active.get(), want_active
        assert (np.diff(rows) > 0).all()
        assert len(np.setxor1d(rows, want_rows)) <= edge
    _, at, want_at = np.intersect1d(rows, want_rows, return_indices=True)
    got, want = h.get()[:, : len(rows)][:, at], want_h[:, : len(want_rows)][:, want_at]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(initial=0.0), 1e-30))
