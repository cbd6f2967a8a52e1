"""Compare the predictions of `plan` with the measured time and memory of jobs of three models.

    python benchmarks/plan_accuracy.py [--only NAME…] [--base MNIST.zarr]

Each job runs `scalelatent plan --json`, then `scalelatent fit --json`. The measured time is that of the whole
second command. Peak memory is the largest resident size of the process or of any worker. A first plan of each
job, which does not count, compiles the kernels and measures the rates of this machine. Without --only, the
peak memory of a fit of capsules is also measured with 50,000 and with 800,000 rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, write

import scalelatent as sl

CAPSULE_LINES = "kind = 'capsule'\narchitecture = 'multiclass'"
CLUSTER_LINES = "[cluster]\nworkers = 2\nthreads = 1\nmemory_limit = '3GiB'\n"
# Jobs by name: number of training rows, data set ("digits", or "bits": binary digits), and the lines of the
# job file after [model].
JOBS: dict[str, tuple[int, str, str]] = {
    "capsule em, d = 8": (50_000, "digits", f"{CAPSULE_LINES}\ncapsule_dim = 8\nmax_iter = 200"),
    "capsule em, whole schedule": (20_000, "digits", f"{CAPSULE_LINES}\ncapsule_dim = 4"),
    "capsule one_vs_all, d = 4": (
        30_000,
        "digits",
        "kind = 'capsule'\ncapsule_dim = 4\narchitecture = 'one_vs_all'\nmax_iter = 150",
    ),
    "capsule em, 2 workers": (
        200_000,
        "digits",
        f"{CAPSULE_LINES}\ncapsule_dim = 8\nmax_iter = 80\n{CLUSTER_LINES}",
    ),
    "capsule stepwise": (
        200_000,
        "digits",
        f"{CAPSULE_LINES}\ncapsule_dim = 8\nalgorithm = 'stepwise'\nn_epochs = 10",
    ),
    "network, V = 50": (
        5_000,
        "digits",
        "kind = 'mbn'\nn_clusterings = 50\nk1 = 500\nn_components = 10\nn_classes = 10",
    ),
    "network, V = 200": (
        20_000,
        "digits",
        "kind = 'mbn'\nn_clusterings = 200\nk1 = 2000\nn_components = 10\nn_classes = 10",
    ),
    "CRBM mle-bp": (
        4_000,
        "bits",
        "kind = 'crbm'\nn_hidden = 64\nn_epochs = 3\ncorruption = {kind = 'flip', rate = 0.1}",
    ),
    "CRBM cd": (
        20_000,
        "bits",
        "kind = 'crbm'\nlearner = 'cd'\nn_hidden = 128\nn_epochs = 4\nbatch_size = 40\n"
        "corruption = {kind = 'flip', rate = 0.1}",
    ),
    "CRBM mle-bp, 2 workers": (
        6_000,
        "bits",
        "kind = 'crbm'\nn_hidden = 64\nn_epochs = 3\nbatch_size = 160\n"
        f"corruption = {{kind = 'flip', rate = 0.1}}\n{CLUSTER_LINES}",
    ),
}
# Number of test rows of each job, and of validation rows of each job that is not a bootstrap network.
HELD_OUT_ROWS = 2_000
# Numbers of rows of the two fits whose peak memory is compared.
FEW_ROWS, MANY_ROWS = 50_000, 800_000


def run_command(*arguments: str) -> tuple[dict[str, Any], float, int, float]:
    """Run a command of scalelatent; return its JSON, seconds, peak bytes of its process, and CPU seconds.

    The CPU seconds include those of its workers.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "scalelatent", *arguments, "--json"], stdout=out, stderr=err
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        out.seek(0)
        err.seek(0)
        if status:
            raise RuntimeError(f"{' '.join(arguments)}: {err.read().decode()[-2000:]}")
        return json.loads(out.read()), seconds, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def make_rows(folder: Path, base: str | None) -> dict[str, Path]:
    """Write datasets "digits" (28 x 28 pixels) and "bits" (the same, binary); return their paths by name."""
    from sklearn.datasets import load_digits

    if base is None:
        x, y = load_digits(return_X_y=True)
        large = np.kron(x.reshape(-1, 8, 8), np.ones((4, 4)))[:, 2:30, 2:30] * 15
        base = str(folder / "base.zarr")
        sl.Dataset.from_arrays(large.astype("uint8"), y).save(base)
    made = {"digits": folder / "digits.zarr", "bits": folder / "bits.zarr"}
    run_command("data", "make", "digits", str(made["digits"]), "--rows", str(MANY_ROWS), "--base", base)
    x = sl.open_dataset(made["digits"]).read_x(0, 30_000).reshape(30_000, -1)
    sl.Dataset.from_arrays((x > x.max() / 2).astype("uint8")).save(made["bits"])
    return made


def write_job_file(folder: Path, name: str, rows: dict[str, Path]) -> Path:
    """Write the job file of a job in JOBS; return its path."""
    count, kind, lines = JOBS[name]
    place = str(rows[kind])
    data = [f"train = '{place}'", f"train_rows = '0:{count}'"]
    data += [f"test = '{place}'", f"test_rows = '{-HELD_OUT_ROWS}:'"]
    if "mbn" not in lines:
        data += [f"validation = '{place}'", f"validation_rows = '{-2 * HELD_OUT_ROWS}:{-HELD_OUT_ROWS}'"]
    file = folder / f"{name.replace(' ', '-').replace(',', '')}.toml"
    out = folder / f"run-{len(list(folder.iterdir()))}"
    file.write_text(f"[job]\nseed = 0\nout = '{out}'\n[data]\n" + "\n".join(data) + f"\n[model]\n{lines}\n")
    return file


def measure_job(file: Path) -> dict[str, Any]:
    """Return the predicted and the measured time and memory of a job."""
    run_command("plan", str(file))
    reported = run_command("plan", str(file))[0]["plan"]
    done, seconds, peak, cpu = run_command("fit", str(file))
    peak = done.get("peak_worker_bytes") or peak
    took = {
        "told_seconds": reported["expected_seconds"],
        "told_least": reported["expected_seconds_at_least"],
        "told_most": reported["expected_seconds_at_most"],
        "seconds": seconds,
        "cpu_seconds": cpu,
        "time_ratio": reported["expected_seconds"] / seconds,
        "told_peak_bytes": reported["peak_bytes_per_worker"],
        "peak_bytes": peak,
        "peak_ratio": reported["peak_bytes_per_worker"] / peak,
        "passes": done.get("pass"),
    }
    return took | {"stages": reported["seconds"], "summary": reported["summary"]}


# Program that prints the peak bytes of a fit; its arguments are a dataset and a number of rows.
GROWTH_PROGRAM = """
import json, sys
import scalelatent as sl
from scalelatent.deploy.probes import peak_bytes
ds = sl.open_dataset(sys.argv[1])[:int(sys.argv[2])]
sl.CapsuleRegression(architecture='multiclass', capsule_dim=8, max_iter=4, random_state=0, n_jobs=2).fit(ds)
print(json.dumps(peak_bytes()))
"""


def measure_growth(place: Path) -> dict[str, int]:
    """Return the peak bytes of a fit in one process, for few and for many rows."""
    found = {}
    for rows in (FEW_ROWS, MANY_ROWS):
        out = subprocess.run(
            [sys.executable, "-c", GROWTH_PROGRAM, str(place), str(rows)],
            capture_output=True,
            text=True,
            check=True,
        )
        found[f"{rows:,} rows"] = int(out.stdout.splitlines()[-1])
    return found


def main() -> None:
    arguments = parser(__doc__, "plan_accuracy")
    arguments.add_argument(
        "--only", nargs="*", help="run only jobs whose names contain one of these texts, and write nothing"
    )
    arguments.add_argument(
        "--base", help="dataset of images to make digits from; by default scikit-learn's digits, enlarged"
    )
    given = arguments.parse_args()
    wanted = [name for name in JOBS if given.only is None or any(part in name for part in given.only)]
    results: dict[str, Any] = {"jobs": {}}
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as temporary:
        folder = Path(temporary)
        rows = make_rows(folder, given.base)
        print("| job | predicted | took | predicted / took | predicted peak | peak | predicted / peak |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for name in wanted:
            try:
                job = results["jobs"][name] = measure_job(write_job_file(folder, name, rows))
            except (RuntimeError, KeyError, ValueError) as error:  # A failed job does not stop the others.
                results["jobs"][name] = {"error": str(error)}
                print(f"| {name} | failed: {str(error)[-400:]} |", flush=True)
                continue
            mib = [f"{job[key] / 2**20:,.0f} MiB" for key in ("told_peak_bytes", "peak_bytes")]
            took = f"{job['seconds']:.1f} s ({job['cpu_seconds']:.1f} s of CPU)"
            times = f"{job['told_seconds']:.1f} s | {took} | {job['time_ratio']:.2f}"
            print(f"| {name} | {times} | {mib[0]} | {mib[1]} | {job['peak_ratio']:.2f} |", flush=True)
        if given.only is None:
            results["peak_bytes_by_rows"] = measure_growth(rows["digits"])
            reported = (
                f"{name} {nbytes / 2**20:,.0f} MiB" for name, nbytes in results["peak_bytes_by_rows"].items()
            )
            print(f"peak of a fit of 784 pixels in one process: {', '.join(reported)}")
    if given.only is None:
        write(given.out, given.seed, results)


if __name__ == "__main__":
    main()
