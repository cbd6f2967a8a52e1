"""The tables of benchmarks/README.md are those of benchmarks/results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TABLES = Path(__file__).parents[1] / "benchmarks" / "tables.py"


def test_the_page_has_the_figures_of_the_files() -> None:
    done = subprocess.run(
        [sys.executable, str(TABLES), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
