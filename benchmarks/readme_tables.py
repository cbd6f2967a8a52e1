"""The README's tables, from the files in results/: python benchmarks/readme_tables.py"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from common import RESULTS


def table(head: str, rows: Iterable[Iterable[Any]]) -> None:
    """One markdown table."""
    names = head.split("|")
    print("| " + " | ".join(n.strip() for n in names) + " |")
    print("|" + " --- |" * len(names))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    print()


def percent(share: float) -> str:
    """A share as per cent."""
    return f"{100 * share:.2f} %"


def source(data: dict[str, Any]) -> None:
    """Where the figures come from."""
    m = data["machine"]
    versions = ", ".join(f"{name} {m[name]}" for name in ("numpy", "numba", "zarr", "distributed"))
    where = f"{m['date']}; {m['cpu']}, {m['cores']} cores, Python {m['python']}, {versions}"
    print(f"`{data['command']}`, seed {data['seed']}, {where}.\n")


def capsule_pass(data: dict[str, Any]) -> None:
    """E-step against products."""
    table(
        "D|pass / products, nu = 0|pass / products, nu = .8|active rows|products|pass|plain numpy / pass",
        (
            (
                r["D"],
                r["ratio nu=0"],
                r["ratio nu=0.8"],
                percent(r["active_share_nu_0.8"]),
                f"{r['products ms']} ms",
                f"{r['pass ms']} ms",
                r["times faster than numpy"],
            )
            for r in data["results"]["table"]
        ),
    )
    threads(data)


def threads(data: dict[str, Any]) -> None:
    """The paper's form in numpy against the engine, both with two threads."""
    keys = ("D", "numpy ms", "pass ms", "times faster")
    table(
        "D|numpy, the paper's form|pass|times faster",
        ([r[k] for k in keys] for r in data["results"]["two threads"]),
    )


def streamed_pass(data: dict[str, Any]) -> None:
    """Overlap, Dask, memory, pairs."""
    r = data["results"]
    table(
        "D|read only|compute only|both|both / larger|waited for rows|CPU of the computing thread",
        (
            (
                o["D"],
                f"{o['read_only_s']} s",
                f"{o['compute_only_s']} s",
                f"{o['pass_s']} s",
                o["ratio"],
                f"{o['waited_for_rows_s']} s",
                f"{o['computing_thread_cpu_s']} s",
            )
            for o in r["overlap"]
        ),
    )
    table(
        "D|spans|in process|cluster|difference|allowed|of the cluster's pass not computing",
        (
            (
                o["D"],
                o["spans"],
                f"{o['in_process_s']} s",
                f"{o['cluster_s']} s",
                f"{1e3 * o['difference_s']:.0f} ms",
                f"{1e3 * o['allowed_difference_s']:.0f} ms",
                f"{1e3 * o['not_computing_s']:.0f} ms",
            )
            for o in r["dask"]
        ),
    )
    print(f"memory: {r['memory']}\n\npairs: {r['pairs']}\n")


def dims(data: dict[str, Any]) -> None:
    """Errors of MNIST fits."""
    table(
        "architecture|d|test error|validation error|passes|seconds",
        (
            (
                r["architecture"],
                r["capsule_dim"],
                percent(r["test_error"]),
                percent(r["validation_error"]),
                r["passes"],
                r["seconds"],
            )
            for r in data["results"]
        ),
    )


def million(data: dict[str, Any]) -> None:
    """The million images."""
    print(data["results"], "\n")


def convergence(data: dict[str, Any]) -> None:
    """Four updates after 10, 100 and 1,000 passes."""
    table(
        "momentum|nu|log-loss / log 10 after 10, 100, 1000 passes|training error after 10, 100, 1000",
        (
            (
                r["momentum"],
                r["nu"],
                ", ".join(f"{r['log_loss'][i]:.4f}" for i in (9, 99, -1)),
                ", ".join(percent(r["train_error"][i]) for i in (9, 99, -1)),
            )
            for r in data["results"]
        ),
    )


def starts(data: dict[str, Any]) -> None:
    """Subspace against random starts."""
    scales = sorted({r["init_scale"] for r in data["results"] if r["init"] == "random"})
    groups = {"subspace": [r["lowest_train_error"] for r in data["results"] if r["init"] == "subspace"]}
    groups |= {
        f"random, {s:g}": [r["lowest_train_error"] for r in data["results"] if r.get("init_scale") == s]
        for s in scales
    }
    table(
        "start|runs|lowest|median|highest",
        (
            (k, len(v), percent(min(v)), percent(sorted(v)[len(v) // 2]), percent(max(v)))
            for k, v in groups.items()
        ),
    )


def import_rates(data: dict[str, Any]) -> None:
    """Importers against reading alone, and their peaks."""
    table(
        "source|file|read|read, hash, pack|import|import / (read, hash, pack)|peak|peak, 4 times the rows",
        (
            (
                r["kind"],
                f"{r['source_mb']:.0f} MB",
                f"{r['read_mb_s']:,.0f} MB/s",
                f"{r['read_hash_pack_mb_s']:,.0f} MB/s",
                f"{r['import_mb_s']:,.0f} MB/s",
                r["import / read_hash_pack"],
                f"{r['peak_mib']:.0f} MiB",
                f"{r['peak_mib_4_times_larger']:.0f} MiB",
            )
            for r in data["results"]
        ),
    )


PRINT: dict[str, Callable[[dict[str, Any]], None]] = {
    "capsule_pass": capsule_pass,
    "streamed_pass": streamed_pass,
    "paper_capsule_dims": dims,
    "paper_capsule_architectures": dims,
    "million": million,
    "import_rates": import_rates,
    "paper_capsule_convergence": convergence,
    "paper_capsule_starts": starts,
}

if __name__ == "__main__":
    for name, show in PRINT.items():
        path = RESULTS / f"{name}.json"
        print(f"## {name}\n")
        if path.exists():
            content = json.loads(path.read_text())
            source(content)
            show(content)
        else:
            print("not run\n")
