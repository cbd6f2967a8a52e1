"""Kernels give the same bits on processors with wider or narrower vectors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
from scipy import sparse

from scalelatent.engine.backend import make_backend
from scalelatent.kernels import tiles
from scalelatent.kernels.jit import kernel
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.kernels.vectors import LANES
from scalelatent.models.crbm.kernels.cpu.coupling import make_coupling
from scalelatent.models.crbm.kernels.cpu.mean_field import mean_field
from scalelatent.models.crbm.kernels.cpu.sum_product import sum_product_pairs
from scalelatent.models.crbm.kernels.products import add_outer_difference, ascend_outer, write_affine_map
from scalelatent.models.crbm.kernels.update import StepArrays, StepRates
from scalelatent.models.crbm.model.energy import compute_log_loss
from scalelatent.models.mbn.kernels.cpu.dense import make_bank, nearest
from scalelatent.models.mbn.kernels.cpu.sparse import make_sparse_bank, nearest_sparse

WIDTHS = (1, 8, 15, 16, 17, 31, 33, 47, 48, 49, 97, 196)


@kernel
def compute_latents(packed, x, out):
    tiles.compute_latents(packed, x, out)


@kernel
def _add_moment(g, n, x, out):
    tiles.add_moment(g, n, x, out)


def _draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).normal(size=shape).astype("f4")


def compute_tiles(dims: int, p: int, n: int) -> list[np.ndarray]:
    w, x, g = _draw(1, dims, p), _draw(2, n, p), _draw(3, dims, n)
    h = np.empty((tiles.padded_size(dims), tiles.STRIP), dtype="f4")
    compute_latents(tiles.packed_matrix(w), x, h)
    moment = w.copy()
    _add_moment(g, n, x, moment)
    return [h[:dims, :n], moment]


def compute_codes(k: int, p: int) -> list[np.ndarray]:
    # Small whole numbers make ties of centroids: within a lane (position in a vector), between lanes, and
    # between panels (groups of centroids).
    rows = np.random.default_rng(k).integers(0, 3, (300, p)).astype("f4")
    columns, found = np.arange(p // 2, dtype=np.int32), []
    found.append(nearest(rows, columns, make_bank(rows[:k, : p // 2], "euclidean")))
    csr = sparse.csr_matrix(rows * (_draw(k, *rows.shape) > 1))
    some = csr[:k]
    banks = [CsrRows(a.data, a.indices, a.indptr, a.shape) for a in (csr, some)]
    found.append(nearest_sparse(banks[0], make_sparse_bank(banks[1], columns, "cosine")))
    return found


def compute_network(v: int, h: int) -> list[np.ndarray]:
    w, x = _draw(5, v, h), _draw(6, 20, h)
    out, none = np.empty((20, v), dtype="f4"), np.zeros((0, h), dtype="f4")
    write_affine_map(x, w, _draw(7, v), out, np)
    step = StepArrays(w, none, np.empty_like(w), none)
    ascend_outer(step, out, x, StepRates(0.1, 0.01, 0.0))
    total = np.zeros((v, h))
    add_outer_difference(out, x, w, total, make_backend("cpu"))
    graphs, pairs = (make_coupling(0.1 * w), _draw(8, 20, v), _draw(9, 20, h), 3), np.zeros(w.shape)
    found, beliefs = mean_field(*graphs), sum_product_pairs(*graphs, None, pairs)
    rest = [total, compute_log_loss(out, np.abs(np.sin(out)), np.sign(out), np)]
    return [*rest, out, step.new_theta, found.lv, found.lh, beliefs.lv, beliefs.lh, beliefs.log_z, pairs]


def compute_digests() -> dict[str, str]:
    """Return a hash of the results of each kernel and shape, by name."""
    found: dict[str, list[np.ndarray]] = {}
    for width in WIDTHS:
        found[f"tiles of {width} dimensions"] = compute_tiles(width, 196, 100)
        found[f"tiles of {width} columns"] = compute_tiles(20, width, 121)
    for k in (2, 16, 63, 64, 65, 128, 129, 257):
        found[f"{k} centroids"] = compute_codes(k, 90)
    for v, h in ((9, 30), (40, 17), (98, 64)):
        found[f"conditional RBM {v} x {h}"] = compute_network(v, h)
    digest: Any = lambda arrays: hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:12]  # noqa: E731
    return {name: digest(arrays) for name, arrays in found.items()}


def test_any_vector_width_gives_the_same_bits() -> None:
    other = str(24 - LANES)
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "SCALELATENT_LANES": other},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported.pop("lanes") == other
    assert reported == compute_digests()


if __name__ == "__main__":
    print(json.dumps({"lanes": str(LANES), **compute_digests()}))
