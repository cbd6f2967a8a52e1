"""Measure the time of partial_fit with 1 or 100 rows beyond its mathematics.

    python benchmarks/partial_fit.py

`partial_fit` checks its rows, encodes the classes, calls :meth:`RunningCapsule.learn` (the mathematics), and
sets attributes. The same rows are given to `partial_fit` of a fitted model, and to `learn` of an equal model.
Times are medians over single calls. The rows have 196 or 784 features.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from common import parser, write

import scalelatent as sl
from scalelatent.models.capsule.partial_fit import get_cpu_backend, stream_options


def measure(features: int, rows: int, calls: int, seed: int, **params: Any) -> dict[str, Any]:
    """Return the median microseconds of a call of `partial_fit`, and of the same update without checks."""
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, 255, (2000, features), dtype=np.uint8), np.arange(2000) % 10
    fitted = {"max_iter": 3, "n_epochs": 1, "projection": None, "random_state": seed, "n_jobs": 1}
    fitted |= {"architecture": "multiclass", "capsule_dim": 4, "fit_intercept": False, **params}
    model = sl.CapsuleRegression(**fitted).fit(x, y)
    twin = sl.CapsuleRegression(**fitted).fit(x, y)
    # These calls compile the kernels, and recompute the inverse of the moment matrix, before the measurement.
    for m in (model, twin):
        m.partial_fit(x[:200], y[:200])
    options, whole, inner = stream_options(twin), [], []
    for i in range(calls):
        part = slice(i % 1000, i % 1000 + rows)
        begin = time.perf_counter()
        model.partial_fit(x[part], y[part])
        middle = time.perf_counter()
        whole.append(middle - begin)
        codes, dense = y[part].astype(np.int32), x[part].astype(np.float32)
        begin = time.perf_counter()
        twin._stream.learn(dense, codes, None, options, get_cpu_backend())
        inner.append(time.perf_counter() - begin)
    call, math = (1e6 * float(np.median(times)) for times in (whole, inner))
    record = {
        "features": features,
        "rows": rows,
        **params,
        "call_us": round(call, 1),
        "mathematics_us": round(math, 1),
        "overhead_us": round(call - math, 1),
    }
    print(record, flush=True)
    return record


def main() -> None:
    args = parser(__doc__, "partial_fit")
    args.add_argument("--calls", type=int, default=1000)
    a = args.parse_args()
    results = [
        measure(features, rows, a.calls, a.seed, algorithm="stepwise")
        for features, rows in ((196, 1), (784, 1), (196, 100))
    ]
    write(a.out, a.seed, results)


if __name__ == "__main__":
    main()
