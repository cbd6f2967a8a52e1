"""Measure the seconds, test error and peak memory of the command `scalelatent demo`.

    python benchmarks/demo.py

A first run with few rows compiles functions; a second run is measured. Peak memory is that of a worker.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import parser, write


def run_demo(folder: Path, rows: int) -> dict[str, Any]:
    """Run `scalelatent demo` once; return its seconds, test error and peak memory."""
    options = ["--rows", str(rows), "--out", str(folder), "--json"]
    command = [sys.executable, "-m", "scalelatent", "demo", *options]
    begin = time.perf_counter()
    reported = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "rows": rows,
        "seconds": round(time.perf_counter() - begin, 1),
        "fit_seconds": round(reported["seconds"], 1),
        "passes": reported["pass"],
        "test_error": round(reported["test_error"], 4),
        "peak_worker_mib": round(reported["peak_worker_bytes"] / 2**20),
    }


def main() -> None:
    """Run the demo twice, and write the results of the second run."""
    arguments = parser(__doc__, "demo")
    arguments.add_argument("--rows", type=int, default=1_000_000)
    a = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        first = run_demo(Path(folder) / "first", 20_000)
        result = run_demo(Path(folder) / "second", a.rows)
    results = {**result, "first_run_of_20000_rows_seconds": first["seconds"]}
    print(results)
    write(a.out, a.seed, results)


if __name__ == "__main__":
    main()
