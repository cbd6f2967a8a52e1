"""Tables of benchmarks/README.md show benchmarks/results, and benchmarks import names that exist."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

TABLES = Path(__file__).parents[1] / "benchmarks" / "tables.py"


def test_the_page_has_the_figures_of_the_files() -> None:
    done = subprocess.run(
        [sys.executable, str(TABLES), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_benchmarks_import_names_that_the_package_has() -> None:
    missing = []
    for file in sorted(TABLES.parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("scalelatent"):
                continue
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                # A name may be a submodule. Submodules for GPUs need CuPy, so they are found, not imported.
                within = hasattr(module, "__path__") and find_spec(f"{node.module}.{name}")
                if not hasattr(module, name) and not within:
                    missing.append(f"{file.name}: {node.module}.{name}")
    assert missing == []
