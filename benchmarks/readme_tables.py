"""Tables of benchmarks/README.md, from the files in results/: python benchmarks/readme_tables.py"""

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
    """Overlap, Dask, memory of a worker, bytes read by 45 members."""
    r = {name: part["result"] for name, part in data["parts"].items()}
    table(
        "D|read only|compute only|both|both, fresh pages|both / larger|waited for rows|CPU of the thread",
        (
            (
                o["D"],
                f"{o['read_only_s']} s",
                f"{o['compute_only_s']} s",
                f"{o['pass_s']} s",
                f"{o['pass_fresh_pages_s']} s",
                o["ratio"],
                f"{o['waited_for_rows_s']} s",
                f"{o['computing_thread_cpu_s']} s",
            )
            for o in r["overlap"]
        ),
    )
    table(
        "D|spans|in process|cluster|difference|of the fastest passes|allowed|not computing|driver CPU",
        (
            (
                o["D"],
                o["spans"],
                f"{o['in_process_s']} s",
                f"{o['cluster_s']} s",
                f"{1e3 * o['difference_s']:.0f} ms",
                f"{1e3 * o['fastest_difference_s']:.0f} ms",
                f"{1e3 * o['allowed_difference_s']:.0f} ms",
                f"{1e3 * o['not_computing_s']:.0f} ms",
                f"{1e3 * o['driver_cpu_s']:.0f} ms",
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


def online_capsule(data: dict[str, Any]) -> None:
    """Online algorithms against batch EM."""
    r = data["results"]
    table(
        "algorithm|test error|validation error|passes|rows read|of batch EM's|until within .3 points|seconds",
        (
            (
                name,
                percent(fit["test_error"]),
                percent(fit["validation_error"]),
                fit["passes"],
                f"{fit['rows_read']:,}",
                percent(r["comparison"][name]["share_of_em_rows"]),
                percent(near) if near else "not reached",
                fit["seconds"],
            )
            for name, fit in r["fits"].items()
            for near in [r["comparison"][name]["share_until_within_0.3_validation"]]
        ),
    )


def search_pass(data: dict[str, Any]) -> None:
    """A search against single fits and GridSearchCV."""
    r = data["results"]
    table(
        "way|seconds|of the processor|passes|read",
        (
            (name, f"{o['seconds']:.1f} s", f"{o['cpu_seconds']:.1f} s", o.get("passes", ""), _gigabytes(o))
            for name, o in r.items()
            if isinstance(o, dict)
        ),
    )
    same = r.get("candidates_of_same_bits", "unknown")
    print(f"{r['rows']:,} rows x {r['features']}; candidates of the same bits: {same} of {r['candidates']}\n")


def _gigabytes(read: dict[str, Any]) -> str:
    return f"{read['bytes_read'] / 1e9:.2f} GB" if "bytes_read" in read else ""


def s3_pass(data: dict[str, Any]) -> None:
    """A pass from an object store on loopback."""
    r = data["results"]
    keys = ("compute_s", "disk_s", "s3_s", "s3_one_at_a_time_s", "read_s3_mb_per_s", "server_mb_per_s")
    table("|".join(keys), [[r[k] for k in keys]])
    slow = r["delay"]
    print(f"with {slow['milliseconds']:g} ms a request: {slow['gain_of_several']} times as fast by several\n")


def minibatch_steps(data: dict[str, Any]) -> None:
    """What a step of online learning costs beside its computing."""
    r = data["results"]
    in_process = [v for o in r["in_process_ms"] for k, v in o.items() if k.endswith("threads")]
    print(f"in process: {min(in_process):.2f} - {max(in_process):.2f} ms\n")
    keys = ("chains", "state_kib", "one_beyond_computing_ms", "all_beyond_computing_ms")
    table(
        "chains|state, KiB|one worker|chains spread",
        ([o.get(k, "") for k in keys] for o in r["dask_2_workers"]),
    )


def partial_fit(data: dict[str, Any]) -> None:
    """What a call costs beside its mathematics."""
    keys = ("algorithm", "features", "rows", "call_us", "mathematics_us", "overhead_us")
    table("|".join(keys), ([r[k] for k in keys] for r in data["results"]))


def crbm_mnist(data: dict[str, Any]) -> None:
    """All and Changed errors by learner and task, and in brackets those of the paper."""
    parts = {name: part["result"] for name, part in data["parts"].items() if not name.startswith("full/")}
    tasks = list(dict.fromkeys(name.split("/")[0] for name in parts))
    learners = list(dict.fromkeys(name.split("/")[1] for name in parts))

    def cell(found: dict[str, Any] | None) -> str:
        if found is None or "failed" in found:
            return ""
        ours = f"{found['all']:.2f} / {found['changed']:.1f}"
        paper = found.get("paper")
        return ours + (f" ({paper['all']:.2f} / {paper['changed']:.1f})" if paper else "")

    rows = [[learner, *(cell(parts.get(f"{task}/{learner}")) for task in tasks)] for learner in learners]
    table("|".join(["learner", *tasks]), rows)
    for name, part in data["parts"].items():
        if name.startswith("full/"):
            print(name, cell(part["result"]), f"{part['result']['epochs']} epochs")
    commands = sorted({part["command"] for part in data["parts"].values()})
    print("\n".join(f"`{command}`" for command in commands))


def data_layouts(data: dict[str, Any]) -> None:
    """Reading and writing by compressor: from the slowest to the fastest layout."""
    keys = ("read_gb_s", "write_gb_s", "times_smaller")
    table(
        "rows|compressor|read, GB/s|written, GB/s|times smaller",
        (
            (r["rows"], name or "none", *(_range(found, key) for key in keys))
            for r in data["results"]
            for name in dict.fromkeys(o["compressor"] for o in r["layouts"])
            for found in [[o for o in r["layouts"] if o["compressor"] == name]]
        ),
    )


def _range(records: list[dict[str, Any]], key: str) -> str:
    values = [r[key] for r in records]
    return f"{min(values):.2f} - {max(values):.2f}"


def data_digits(data: dict[str, Any]) -> None:
    """Making infinite digits."""
    keys = ("threads", "images_s", "images_s_per_core")
    table(
        "base|images/s, kernel|threads|images/s, written|a core",
        (
            (r["base"], f"{r['kernel_images_s']:,}", *(f"{o[key]:,}" for key in keys))
            for r in data["results"]
            for o in r["writing"]
        ),
    )


def demo(data: dict[str, Any]) -> None:
    """The demo."""
    print(data["results"], "\n")


PRINT: dict[str, Callable[[dict[str, Any]], None]] = {
    "capsule_pass": capsule_pass,
    "streamed_pass": streamed_pass,
    "paper_capsule_dims": dims,
    "paper_capsule_architectures": dims,
    "million": million,
    "import_rates": import_rates,
    "paper_capsule_convergence": convergence,
    "paper_capsule_starts": starts,
    "online_capsule": online_capsule,
    "search_pass": search_pass,
    "s3_pass": s3_pass,
    "minibatch_steps": minibatch_steps,
    "partial_fit": partial_fit,
    "data_layouts": data_layouts,
    "data_digits": data_digits,
    "demo": demo,
    "crbm_mnist": crbm_mnist,
}

if __name__ == "__main__":
    for name, show in PRINT.items():
        path = RESULTS / f"{name}.json"
        print(f"## {name}\n")
        if path.exists():
            content = json.loads(path.read_text())
            if "parts" not in content:
                source(content)
            show(content)
        else:
            print("not run\n")
