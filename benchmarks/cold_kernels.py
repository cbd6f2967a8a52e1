"""Measure the seconds of compiling kernels, the functions that numba compiles, in the first fit of a model.

    python benchmarks/cold_kernels.py [--models "capsule;mbn"] [--functions 10]

The first ("cold") fit has an empty cache of compiled kernels; the second ("warm") finds them there. Each fit
runs in a new process on one thread. CPU seconds are those of the process after the import of the models; wall
seconds also depend on other work on the machine. The results also contain:

"bound_seconds"  The largest allowed difference between the CPU seconds of the first and of the second fit.
"stages"         The compiler's CPU seconds in type inference, lowering to LLVM's code, LLVM itself, and
                 numba's other passes.
"functions"      The functions with the most CPU seconds of the compiler, without the functions they call.

With NUMBA_CPU_NAME=haswell and SCALELATENT_LANES=8 in the environment, numba compiles for a machine without
AVX-512 (results/cold_kernels_avx2.json).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import common
from numba.core import event

BOUND_SECONDS = 6.0
MODELS = ("capsule", "linear mixture", "mbn", "mbn, CSR rows", "crbm", "crbm, mean field", "hcn")
# Name in the results ("stage") of a pass of numba's compiler. Passes that are not here are "other passes".
STAGE_OF_PASS = {
    "nopython_type_inference": "typing",
    "native_lowering": "lowering",
    "subkernel_lowering": "lowering",
}


def fit_once(model: str, seed: int) -> None:
    """Fit a small model that calls all kernels (compiled functions) of ``model``, a name in MODELS."""
    import numpy as np
    import scipy.sparse

    import scalelatent as sl

    rng = np.random.default_rng(seed)
    if model == "capsule":
        x, y = rng.normal(size=(2000, 784)).astype(np.float32), np.arange(2000) % 10
        options: dict[str, Any] = {"architecture": "multiclass"}
        sl.CapsuleRegression(max_iter=3, random_state=seed, n_jobs=1, **options).fit(x, y)
    elif model.startswith("mbn"):
        x = rng.random((1500, 100), dtype=np.float32)
        options = {"n_clusterings": 60, "k1": 100, "decay": 0.5, "n_components": 3, "n_jobs": 1}
        if model != "mbn":
            x = scipy.sparse.random_array((1500, 500), density=0.05, format="csr", rng=seed, dtype=np.float32)
            options["metric"] = "cosine"
        sl.MultilayerBootstrapNetwork(random_state=seed, **options).fit(x)
    elif model == "linear mixture":
        x, y = rng.normal(size=(2000, 64)).astype(np.float32), np.arange(2000) % 10
        sl.LinearMixtureClassifier(max_iter=3, random_state=seed, n_jobs=1).fit(x, y)
    elif model == "hcn":
        # Each image has two horizontal bars and a vertical one at random places.
        images = np.zeros((6, 24, 24), dtype=np.uint8)
        for image, (a, b, c) in zip(images, rng.integers(0, 18, (6, 3)), strict=True):
            image[a, 2:10] = image[b, 12:20] = image[c : c + 6, c] = 1
        sl.HierarchicalCompositionalNetwork(random_state=seed, n_jobs=1).fit(images)
    else:
        x, y = ((rng.random((500, n)) < 0.5).astype(np.float32) for n in (40, 30))
        options = {} if model == "crbm" else {"learner": "mle-mf"}
        sl.ConditionalRBM(n_hidden=16, n_epochs=2, random_state=seed, n_jobs=1, **options).fit(x, y)


class CompilerStages(event.Listener):
    """Listener that sums the CPU seconds of numba's compiler by function and stage.

    A stage is a pass of the compiler, or the calls of LLVM inside a pass. While the compiler compiles a
    called function, its seconds count for that function only.
    """

    def __init__(self) -> None:
        self.seconds: Counter[tuple[str, str]] = Counter()
        self._open = threading.local()

    def on_start(self, event: Any) -> None:
        """Record the start of a compiler pass or of a call of LLVM."""
        stack = self._add_elapsed_seconds()
        function, _ = stack[-1] if stack else ("", "")
        if event.kind == "numba:run_pass":
            name = event.data["name"].split(" ")[0]
            function = f"{event.data['module']}.{event.data['qualname']}".removeprefix("scalelatent.")
            stack.append((function, STAGE_OF_PASS.get(name, "other passes")))
        else:
            stack.append((function, "LLVM"))

    def on_end(self, event: Any) -> None:
        """Record the end of a compiler pass or of a call of LLVM."""
        self._add_elapsed_seconds().pop()

    def _add_elapsed_seconds(self) -> list[tuple[str, str]]:
        """Add the seconds since the last event to the innermost open stage; return all open stages."""
        now = time.thread_time()
        stack: list[tuple[str, str]] = vars(self._open).setdefault("stack", [])
        if stack:
            self.seconds[stack[-1]] += now - self._open.since
        self._open.since = now
        return stack

    def sum_by(self, key_part: int, count: int | None = None) -> dict[str, float]:
        """Return the ``count`` largest (None: all) sums of CPU seconds, by function (key_part 0) or stage."""
        sums: Counter[str] = Counter()
        for key, seconds in self.seconds.items():
            sums[key[key_part]] += seconds
        return {name: round(seconds, 2) for name, seconds in sums.most_common(count)}


def measure_fit(model: str, seed: int, functions: int) -> dict[str, Any]:
    """Fit a model in this process; return its seconds, the compiled kernels and the compiler's seconds."""
    import scalelatent as sl
    from scalelatent.kernels.compile_observers import observe_compilation

    for name in sl.__all__:
        getattr(sl, name)
    compiled: list[str] = []
    stages = CompilerStages()
    with (
        observe_compilation(lambda name, seconds: compiled.append(name) if seconds is None else None),
        event.install_listener("numba:run_pass", stages),
        event.install_listener("numba:llvm_lock", stages),
    ):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        fit_once(model, seed)
        cpu, wall = time.process_time() - begin_cpu, time.perf_counter() - begin
    return {
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "compiled": compiled,
        "stages": stages.sum_by(1),
        "functions": stages.sum_by(0, functions),
    }


def main() -> None:
    parser = common.parser(__doc__, "cold_kernels")
    parser.add_argument("--models", default=";".join(MODELS), help="names of models, separated by semicolons")
    parser.add_argument("--functions", type=int, default=5, help="number of functions to list")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_fit(options.one, options.seed, options.functions)))
        return
    results = {}
    for model in options.models.split(";"):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--one", model, "--seed", str(options.seed)]
            command += ["--functions", str(options.functions)]
            runs = [
                json.loads(
                    subprocess.run(
                        command,
                        env=os.environ | {"NUMBA_CACHE_DIR": cache},
                        check=True,
                        stdout=subprocess.PIPE,
                        text=True,
                    ).stdout.splitlines()[-1]
                )
                for _ in ("cold", "warm")
            ]
        cold, warm = runs
        difference = round(cold["cpu_seconds"] - warm["cpu_seconds"], 2)
        results[model] = {
            "kernels": len(cold["compiled"]),
            "cold": {key: cold[key] for key in ("cpu_seconds", "wall_seconds")},
            "warm": {key: warm[key] for key in ("cpu_seconds", "wall_seconds")},
            "more_cpu_seconds": difference,
            "in_bound": difference <= BOUND_SECONDS,
            "stages": cold["stages"],
            "functions": cold["functions"],
        }
        assert not warm["compiled"], warm
        print(
            f"{model:20s} {len(cold['compiled']):3d} kernels  CPU seconds: cold {cold['cpu_seconds']:6.2f}, "
            f"warm {warm['cpu_seconds']:6.2f}, difference {difference:6.2f}; wall seconds: difference "
            f"{cold['wall_seconds'] - warm['wall_seconds']:6.2f}",
            flush=True,
        )
        for part in ("stages", "functions"):
            print("    " + ", ".join(f"{name} {value:.2f}" for name, value in cold[part].items()), flush=True)
    # A load above the number of cores means that other work was running.
    load = [round(value, 2) for value in os.getloadavg()]
    found = {"bound_seconds": BOUND_SECONDS, "load_average": load, "models": results}
    common.write(options.out, options.seed, found)


if __name__ == "__main__":
    main()
