"""Measure speed on a GPU within a fixed time: `benchmarks/gpu_all.sh measure`.

First the rates of the gpu_*.py scripts are measured at reduced sizes; each script has a file. Then each
model is fitted from a zarr store on local disk, with each device. The other parts run even if one part
fails or takes too long. Times of kernels and passes come with the lower bound of gpu_model.py.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gpu_model
from gpu_parts import HERE, MODELS, Parts, parse, temporary_caches

# Options of each script, and the seconds after which it starts no part.
SCRIPTS = {
    "capsule": (["--rows", "262144", "--features", "784"], 30),
    "mbn": (["--rows", "20000", "--clusterings", "100"], 24),
    "crbm": ([], 24),
    "hcn": (["--rows", "20000"], 24),
    "linear_mixture": ([], 24),
}
DEVICES = ("auto", "gpu", "cpu")
# Seconds that a script may need after its time limit, for its last part; and the time limit of a fit.
MARGIN, FIT_SECONDS = 12, 25


def main() -> int:
    args = parse(__doc__, seconds=280)
    parts = Parts(args.out.resolve(), "measure", args.seconds, args.emulate)
    quick = ["--quick"] if args.emulate else ["--repeats", "3"]
    with temporary_caches() as folder:
        compiled = parts.run("compilation", parts.python(str(HERE / "gpu_cases.py"), "compile"), 60)
        if not compiled and "no GPU:" in parts.log.read_text(encoding="utf-8"):
            print("there is no GPU: nothing was measured", file=sys.stderr)
            return 3
        for model in MODELS:
            options, seconds = SCRIPTS[model]
            out = parts.out / f"gpu_{model}.json"
            out.unlink(missing_ok=True)
            command = [str(HERE / f"gpu_{model}.py"), "--rates-only", "--out", str(out), *options, *quick]
            command += ["--seconds", str(seconds * parts.patience)]
            parts.run(f"gpu_{model}.py", parts.python(*command), seconds + MARGIN)
            if out.exists():
                for line in shares(model, json.loads(out.read_text(encoding="utf-8"))):
                    parts.add(**line)
        for model in MODELS:
            # Fits on a processor use the same code path for all models, so that a rehearsal runs only one.
            devices = DEVICES if not args.emulate else ("auto", "cpu") if model == "capsule" else ("auto",)
            for device in devices:
                fit(parts, model, device, folder)
            shutil.rmtree(folder / "stores", ignore_errors=True)
    return parts.finish()


def fit(parts: Parts, model: str, device: str, folder: Path) -> None:
    """Run a whole fit in a new process, which appends its own line."""
    command = [str(HERE / "gpu_fits.py"), model, "--device", device, "--folder", str(folder / "stores")]
    command += ["--lines", str(parts.lines), *(["--quick"] if parts.emulate else [])]
    parts.run(f"fit {model}, device {device}", parts.python(*command), FIT_SECONDS)


def shares(model: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measurements of a script with the lower bounds of their times."""
    card = gpu_model.H200 if "H200" in result["machine"]["device"] else gpu_model.H100
    settings, found = result["settings"], []

    def add(what: str, work: gpu_model.Work, seconds: float) -> None:
        share = gpu_model.share(work, seconds, card)
        found.append({"part": f"{model}: {what}", "passed": True, "measured_seconds": seconds, **share})

    if model == "capsule":
        for line in result.get("passes", []):
            rows, size, p = settings["rows"], line["block_rows"], settings["features"]
            active = None if line["nu"] == 0 else int(line["active"] * size)
            item = 1 if line["rows"].endswith("uint8") else 4
            work = gpu_model.capsule_block(
                size, p, line["D"], 1, active, item, on_card=line["rows"].startswith("device")
            )
            name = f"pass, D = {line['D']}, nu = {line['nu']}, {line['rows']}, blocks of {size}"
            add(name, work * -(-rows // size), line["seconds"])
    elif model == "mbn":
        for line in result.get("dense", []):
            rows = settings["rows"]
            work = gpu_model.mbn_nearest(rows, 784, line["columns"], line["k"], 1)
            add(f"dense rows, k = {line['k']}", work, rows / line["rows_per_s"])
        for line in result.get("codes", []):
            rows, below = settings["rows"], settings["clusterings"]
            seconds = 1e-9 * line["ns a look-up"] * rows * below
            add(f"rows of codes, k = {line['k']}", gpu_model.mbn_nearest_codes(rows, below), seconds)
    elif model == "crbm":
        for line in result.get("rates", []):
            v, h = (int(n) for n in line["graph"].split(" x "))
            pairs = line["kernel"].endswith("pairs")
            work = gpu_model.crbm_inference(v, h, line["rows"], line["sweeps"], pairs)
            add(f"{line['kernel']}, {line['graph']}, {line['rows']} rows", work, line["seconds"])
    elif model == "linear_mixture":
        for line in result.get("scan", []):
            rows, p, k = line["rows"], line["p"], line["K"]
            flops = 2.0 * p * line["columns"] * rows
            work = gpu_model.linear_mixture_nearest(rows, p, k, line["columns"] // k - 1)
            add(f"scan, p = {p}, K = {k}", work, flops / (1e12 * line["teraflops"]))
        for line in result.get("images", []):
            rows, p, k = line["rows"], line["p"], line["K"]
            work = gpu_model.linear_mixture_scatter(rows, p, min(16, p), k)
            add(f"images, p = {p}, K = {k}", work, rows / line["rows/s"])
    elif model == "hcn":
        for line in result.get("rates", []):
            if "sweep" in line and not settings["quick"]:
                work = gpu_model.hcn_sweep(line["chains"], 5, 576, 17 * 19 * 32, 48 * 32)
                pairs = 5 * 17 * 19 * 32 * 48 * line["chains"]
                add(f"sweep, {line['chains']} chains", work, pairs / line["sweep"])
    return found


if __name__ == "__main__":
    sys.exit(main())
