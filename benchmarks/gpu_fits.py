"""Fit one model from a zarr store on local disk, and measure where the seconds go.

    python benchmarks/gpu_fits.py capsule --device gpu --folder FOLDER

The result is one JSON line with these seconds:

- `decoding`: threads read the store; `waiting`: computing threads wait for rows; `staging`: rows are copied
  to page-locked memory. These three are sums over threads.
- `copying`: the GPU copies arrays; `kernels`: it runs kernels and matrix products. Both are measured by CUDA
  events.
- `idle`: the rest of the fit, in which the GPU does neither. Array expressions of CuPy count as idle.

Fits on a processor have only `decoding` and `waiting`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_parts import MODELS, append_line

# Number of rows that each model is fitted to: at full size, and with --quick.
ROWS = {
    "capsule": (120_000, 3000),
    "mbn": (10_000, 60),
    "crbm": (4000, 60),
    "hcn": (3000, 60),
    "linear_mixture": (30_000, 300),
}
FEATURES = 784


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the zarr store, which is created if needed"
    )
    parser.add_argument("--lines", type=Path, help="append the result to this file of JSON lines")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    found = measure_fit(args.model, args.device, args.folder, args.quick)
    print(json.dumps(found), flush=True)
    if args.lines:
        append_line(args.lines, found)
    return 0


def measure_fit(model: str, device: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Return the seconds of a fit from the store; an untimed fit on a few rows first compiles everything."""
    import scalelatent as sl
    from scalelatent.engine.backend import resolve_device

    store = folder / f"{model}.zarr"
    if not store.exists():
        write_store(model, store, quick)
    rows = sl.open_dataset(str(store))
    x, y = make_rows(model, 120 if not quick else 40, quick)
    with Tracer(resolve_device(device) == "gpu") as tracer:
        make_model(model, device, True).fit(x, y)
        tracer.restart()
        begin = time.perf_counter()
        make_model(model, device, quick).fit(rows)
        seconds = time.perf_counter() - begin
        split = tracer.seconds_by_activity(seconds)
    where = {"model": model, "device": device, "used": resolve_device(device), "rows": len(rows)}
    return {"name": f"fit {model}, device {device}", **where, "seconds": seconds, **split}


def write_store(model: str, store: Path, quick: bool) -> None:
    """Write the rows of a model to a zarr store."""
    import scalelatent as sl

    x, y = make_rows(model, ROWS[model][quick], quick)
    store.parent.mkdir(parents=True, exist_ok=True)
    sl.Dataset.from_arrays(x, y).save(str(store))


def make_rows(model: str, n: int, quick: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return n rows with structure, and the classes or outputs that the model needs, otherwise None."""
    rng, p = np.random.default_rng(0), 20 if quick else FEATURES
    y = np.arange(n) % 10
    if model == "hcn":
        from scalelatent.generators.images import image_set

        size, count = ((9, 8), 1) if quick else ((24, 24), 5)
        return image_set("letters", size=size, count=count, noise=0.03, seed=0).rows(0, n)[0], None
    if model == "crbm":
        clean = (np.arange(p) + rng.integers(0, 8, (n, 1))) % 8 < 3
        return (clean ^ (rng.random(clean.shape) < 0.1)).astype(np.uint8), clean.astype(np.uint8)
    means = rng.normal(size=(10, p)) * 30 + 110
    noise = rng.standard_normal((n, p), dtype=np.float32) * 40
    x = np.clip(noise + means[y], 0, 255).astype(np.uint8)
    return x, None if model == "mbn" else y


def make_model(model: str, device: str, quick: bool) -> Any:
    """Return an unfitted estimator whose fit has at most eight EM iterations or one epoch."""
    import scalelatent as sl

    common: dict[str, Any] = {"device": device, "random_state": 0}
    if model == "capsule":
        passes = 2 if quick else 8
        return sl.CapsuleRegression(architecture="multiclass", capsule_dim=2, max_iter=passes, **common)
    if model == "mbn":
        sizes = {"n_clusterings": 4, "k1": 12} if quick else {"n_clusterings": 40, "k1": 2000}
        return sl.MultilayerBootstrapNetwork(**sizes, decay=0.5, n_components=4, n_classes=4, **common)
    if model == "crbm":
        hidden, sweeps, steps = (8, 2, 2) if quick else (128, 8, 32)
        return sl.ConditionalRBM(
            n_hidden=hidden, learner="mle-bp", n_sweeps=sweeps, batch_size=20, n_epochs=1, n_chains=1,
            local_steps=steps, **common,
        )  # fmt: skip
    if model == "hcn":
        features, chains, batches = (3, 2, 2) if quick else (32, 64, 2)
        return sl.HierarchicalCompositionalNetwork(
            layers=[(features, (8, 6))], p01=1e-3, p10=1e-3, p_weight=0.3, p_sparsity=1e-4, forgetting=0.98,
            batch_size=5, n_epochs=1, n_chains=chains, chain_batches=batches,
            warmup_rows=10 if quick else None, **common,
        )  # fmt: skip
    sizes = {"n_components": 2, "n_dims": 2} if quick else {"n_components": 20, "n_dims": 8}
    passes = 2 if quick else 4
    return sl.LinearMixtureClassifier(**sizes, likelihood="error", max_iter=passes, **common)


class Tracer:
    """Context that measures reads, copies and kernels of this process by replacing their functions."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._lock = threading.Lock()
        self._undo: list[Callable[[], None]] = []
        self._host: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> Tracer:
        from scalelatent.engine import reading

        tracer = self

        class TracedMeter(reading.Meter):
            """Meter of the engine that also adds the seconds of waiting for rows to the tracer."""

            def __setattr__(self, name: str, value: Any) -> None:
                if name == "wait_seconds" and value:
                    tracer._add_seconds("waiting", value - self.wait_seconds)
                super().__setattr__(name, value)

        self._replace(reading.Reader, "_read", self._time_on_host("decoding", reading.Reader._read))
        for name in [f"scalelatent.engine.{part}" for part in ("passes", "chains", "inprocess", "mapwrite")]:
            self._replace(importlib.import_module(name), "Meter", TracedMeter)
        if self.on_gpu:
            self._trace_gpu()
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            undo()

    def restart(self) -> None:
        """Discard all times measured so far; CUDA events are timed from this call."""
        with self._lock:
            self._host.clear()
            self._events.clear()
        if self.on_gpu:
            import cupy

            cupy.cuda.runtime.deviceSynchronize()
            self._start = cupy.cuda.Event()
            self._start.record()

    def seconds_by_activity(self, seconds: float) -> dict[str, float]:
        """Return the seconds of each activity in a fit of ``seconds``; on a GPU also a count of launches."""
        out = {"decoding": self._host["decoding"], "waiting": self._host["waiting"]}
        if not self.on_gpu:
            return out
        import cupy

        cupy.cuda.runtime.deviceSynchronize()
        out["staging"] = self._host["staging"]
        intervals: dict[str, list[tuple[float, float]]] = {"copying": [], "kernels": []}
        for kind, begin, end in self._events:
            first = cupy.cuda.get_elapsed_time(self._start, begin) / 1e3
            intervals[kind].append((first, first + cupy.cuda.get_elapsed_time(begin, end) / 1e3))
        for kind, found in intervals.items():
            out[kind] = compute_union(found)
        out["idle"] = max(seconds - compute_union([*intervals["copying"], *intervals["kernels"]]), 0.0)
        out["launches_and_products"] = float(len(intervals["kernels"]))
        return out

    def _add_seconds(self, kind: str, seconds: float) -> None:
        with self._lock:
            self._host[kind] += seconds

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))

    def _time_on_host(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                self._add_seconds(kind, time.perf_counter() - begin)

        return timed

    def time_on_gpu(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with CUDA events around it; ``kind`` is the activity that the seconds count for."""
        import cupy

        def timed(*args: Any, **more: Any) -> Any:
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            result = call(*args, **more)
            end.record()
            self._events.append((kind, begin, end))
            return result

        return timed

    def _trace_gpu(self) -> None:
        import cupy

        from scalelatent.engine import backend
        from scalelatent.kernels import cuda

        tracer, real = self, backend.CupyBackend
        # Modules with kernels bind `launch` when they are imported: replace the function before.
        loaded = [name for name in sys.modules if name.startswith("scalelatent.models.") and ".gpu" in name]
        assert not loaded, f"imported before tracing: {loaded}"
        self._replace(cuda.Kernels, "launch", self.time_on_gpu("kernels", cuda.Kernels.launch))
        self._replace(cupy, "matmul", self.time_on_gpu("kernels", cupy.matmul))
        self._replace(cuda, "multiply", self.time_on_gpu("kernels", cuda.multiply))
        self._replace(backend, "multiply", cuda.multiply)
        copy_to_gpu, copy_to_host = cupy.asarray, cupy.asnumpy
        timed_move = self.time_on_gpu("copying", copy_to_gpu)

        def asarray(a: Any, *args: Any, **more: Any) -> Any:
            return (timed_move if isinstance(a, np.ndarray) else copy_to_gpu)(a, *args, **more)

        self._replace(cupy, "asarray", asarray)
        self._replace(cupy, "asnumpy", self.time_on_gpu("copying", copy_to_host))

        class TimedTarget:
            """Wrapper of a GPU array that times copies from the host to the array."""

            def __init__(self, array: Any) -> None:
                self.array, self.size, self.nbytes = array, array.size, array.nbytes
                self.data, self.set = self, tracer.time_on_gpu("copying", array.set)

            def copy_from_host_async(self, *args: Any) -> None:
                tracer.time_on_gpu("copying", self.array.data.copy_from_host_async)(*args)

        class TracedBackend(real):
            """GPU backend that times copies to the GPU (staging separately) and to the host."""

            def _upload(self, a: np.ndarray, dtype: Any, name: str, out: Any) -> Any:
                begin = time.perf_counter()
                super()._upload(a, dtype, name, TimedTarget(out))
                tracer._add_seconds("staging", time.perf_counter() - begin)
                return out

            def to_host(self, a: Any) -> np.ndarray:
                if isinstance(a, np.ndarray):
                    return a
                self._make_current()
                return tracer.time_on_gpu("copying", super().to_host)(a)

        self._replace(backend, "CupyBackend", TracedBackend)


def compute_union(intervals: list[tuple[float, float]]) -> float:
    """Return the total length of the union of the intervals (first, last)."""
    total, reached = 0.0, 0.0
    for first, last in sorted(intervals):
        total += max(last - max(first, reached), 0.0)
        reached = max(reached, last)
    return total


if __name__ == "__main__":
    sys.exit(main())
