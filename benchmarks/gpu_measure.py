"""Measure speed on a GPU within a fixed time: `benchmarks/gpu_all.sh measure`.

First the gpu_*.py scripts measure kernels and passes at reduced sizes; each script writes a JSON file. The
results compare their times with the lower bounds of gpu_model.py. Then each model is fitted from a zarr store
on local disk, on each device. If a part fails or exceeds its time limit, the next runs; without a GPU, none.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gpu_model
from gpu_parts import HERE, MODELS, ProgramRunner, parse, temporary_caches

# Options of each gpu_*.py script, and the seconds after which the script starts no further measurement.
SCRIPTS = {
    "capsule": (["--rows", "262144", "--features", "784"], 30),
    "mbn": (["--rows", "20000", "--clusterings", "100"], 24),
    "crbm": ([], 24),
    "hcn": (["--rows", "20000"], 24),
    "linear_mixture": ([], 24),
}
DEVICES = ("auto", "gpu", "cpu")
# A script is killed this many seconds after it stops starting measurements, so that its last one can end.
LAST_MEASUREMENT_SECONDS = 12
# A fit, with the import of the package and compilation, is killed after this many seconds.
FIT_SECONDS = 25


def main() -> int:
    args = parse(__doc__, seconds=280)
    runner = ProgramRunner(args.out.resolve(), "measure", args.seconds, args.emulate)
    quick = ["--quick"] if args.emulate else ["--repeats", "3"]
    with temporary_caches() as folder:
        compiled = runner.run("compilation", runner.make_command(str(HERE / "gpu_cases.py"), "compile"), 60)
        if not compiled and "no GPU:" in runner.log.read_text(encoding="utf-8"):
            print("there is no GPU: nothing was measured", file=sys.stderr)
            return 3
        for model in MODELS:
            options, seconds = SCRIPTS[model]
            out = runner.out / f"gpu_{model}.json"
            out.unlink(missing_ok=True)
            command = [str(HERE / f"gpu_{model}.py"), "--rates-only", "--out", str(out), *options, *quick]
            command += ["--seconds", str(seconds * runner.time_factor)]
            runner.run(f"gpu_{model}.py", runner.make_command(*command), seconds + LAST_MEASUREMENT_SECONDS)
            if out.exists():
                for line in compare_with_bounds(model, json.loads(out.read_text(encoding="utf-8"))):
                    runner.record(**line)
        for model in MODELS:
            # With --emulate, device "cpu" is rehearsed with the capsule model only, because the measuring
            # code is the same for all models.
            devices = DEVICES if not args.emulate else ("auto", "cpu") if model == "capsule" else ("auto",)
            for device in devices:
                run_fit(runner, model, device, folder)
            shutil.rmtree(folder / "stores", ignore_errors=True)
    return runner.finish()


def run_fit(runner: ProgramRunner, model: str, device: str, folder: Path) -> None:
    """Measure a whole fit in a new process, which appends the measurement to the file of results."""
    command = [str(HERE / "gpu_fits.py"), model, "--device", device, "--folder", str(folder / "stores")]
    command += ["--lines", str(runner.lines), *(["--quick"] if runner.emulate else [])]
    runner.run(f"fit {model}, device {device}", runner.make_command(*command), FIT_SECONDS)


def compare_with_bounds(model: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measured seconds in the result of ``gpu_MODEL.py``, each with its lower bound."""
    card = gpu_model.H200 if "H200" in result["machine"]["device"] else gpu_model.H100
    settings, found = result["settings"], []

    def add(what: str, work: gpu_model.Work, seconds: float) -> None:
        bound = gpu_model.compare_with_bound(work, seconds, card)
        found.append({"part": f"{model}: {what}", "passed": True, "measured_seconds": seconds, **bound})

    if model == "capsule":
        for line in result.get("passes", []):
            rows, size, features = settings["rows"], line["block_rows"], settings["features"]
            active = None if line["nu"] == 0 else int(line["active_share"] * size)
            item_bytes = 1 if line["rows"].endswith("uint8") else 4
            on_card, total_dim = line["rows"].startswith("device"), line["total_dim"]
            work = gpu_model.capsule_block(size, features, total_dim, 1, active, item_bytes, on_card)
            name = f"pass, D = {total_dim}, nu = {line['nu']}, {line['rows']}, blocks of {size}"
            add(name, work * -(-rows // size), line["seconds"])
    elif model == "mbn":
        for line in result.get("dense", []):
            rows = settings["rows"]
            work = gpu_model.mbn_nearest(rows, 784, line["columns"], line["centroids"], 1, with_bytes=True)
            add(f"dense rows, k = {line['centroids']}", work, rows / line["rows_per_second"])
        for line in result.get("codes", []):
            rows, codes = settings["rows"], settings["clusterings"]
            seconds = 1e-9 * line["ns_per_code"] * rows * codes
            add(f"rows of codes, k = {line['centroids']}", gpu_model.mbn_nearest_codes(rows, codes), seconds)
    elif model == "crbm":
        for line in result.get("rates", []):
            visible, hidden = (int(units) for units in line["graph"].split(" x "))
            pairs = line["kernel"].endswith("pairs")
            work = gpu_model.crbm_inference(visible, hidden, line["rows"], line["sweeps"], pairs)
            add(f"{line['kernel']}, {line['graph']}, {line['rows']} rows", work, line["seconds"])
    elif model == "linear_mixture":
        for line in result.get("scan", []):
            rows, p, k = line["rows"], line["features"], line["components"]
            flops = 2.0 * p * line["columns"] * rows
            work = gpu_model.linear_mixture_nearest(rows, p, k, line["columns"] // k - 1)
            add(f"scan, p = {p}, K = {k}", work, flops / (1e12 * line["teraflops"]))
        for line in result.get("projections", []):
            rows, p, k = line["rows"], line["features"], line["components"]
            work = gpu_model.linear_mixture_scatter(rows, p, min(16, p), k)
            add(f"projections, p = {p}, K = {k}", work, rows / line["rows_per_second"])
    elif model == "hcn":
        for line in result.get("rates", []):
            if "sweep" in line and not settings["quick"]:
                work = gpu_model.hcn_sweep(line["chains"], 5, 576, 17 * 19 * 32, 48 * 32)
                pairs = 5 * 17 * 19 * 32 * 48 * line["chains"]
                add(f"sweep, {line['chains']} chains", work, pairs / line["sweep"])
    return found


if __name__ == "__main__":
    sys.exit(main())
