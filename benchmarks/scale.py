"""What a pass over a billion rows takes on 1,000 workers, from what passes here cost:

    python benchmarks/scale.py FOLDER [--again] [--kinds capsule,linear_mixture,mbn,crbm,hcn]

Passes of each kind over --rows and a fifth of them, on one worker of a local cluster, give its constants:
seconds of a row, and of a pass (online: an epoch) beside its rows. Tasks, messages and the scheduler's
seconds of a span are those of results/simulated_cluster.json. For n rows and W workers of one thread:

    batch    leaves / W, rounded up, times rows of a leaf times seconds of a row
    online   steps, one after another: rows of a chain times seconds of a row, and a step's part of its own
    both     bytes from a store at the rate of a worker; the scheduler's seconds of all spans

The longest of the three counts, for they overlap, and what a pass costs beside its rows comes on top.
``--again`` checks it by passes over 100,000, 1 and 4 million rows on 1 and 2 workers. Prices and rates of the
store are assumed (STORE). Writes results/scale.json and scale.md.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, infinite_digits, open_or, parser, write_part

import scalelatent as sl
from scalelatent.data import Dataset, make_images
from scalelatent.engine.mapwrite import PARTED_BYTES

PAGE = Path(__file__).parent / "scale.md"
BILLION, WORKERS = 10**9, 1000
# Of an object store: dollars of a thousand requests that read and that write, MB/s that a worker reads.
STORE = {"dollars_of_1000_gets": 0.0004, "dollars_of_1000_puts": 0.005, "mb_per_second_of_a_worker": 100.0}
# A leaf of a long pass: this share of its rows, rounded up to blocks times a power of two (engine/passes.py).
LEAVES = 1024
STEP_SECONDS = 0.02  # of a step on a cluster beside its chains, as plans have it
MBN: dict[str, Any] = {"n_clusterings": 100, "k1": 100}
SETTINGS = {
    "computing": "more workers; [engine] leaf_rows where leaves are fewer than workers",
    "reading": "[engine] cache: rows that stay with workers",
    "scheduler": "[engine] leaf_rows: fewer, longer spans",
    "steps": "n_chains: more of a step at once",
}


@dataclass(frozen=True)
class Case:
    """A kind: its model, its rows, the stage whose pass is meant."""

    rows: str
    stage: str
    make: Any
    online: bool = False


def crbm() -> Any:
    return sl.ConditionalRBM(
        n_hidden=64, n_epochs=2, corruption={"kind": "flip", "rate": 0.1}, random_state=0
    )


def hcn() -> Any:
    chains = {"n_chains": 8, "chain_batches": 40, "warmup_rows": 1000}
    return sl.HierarchicalCompositionalNetwork([(32, (8, 6))], n_epochs=1, random_state=0, **chains)


CASES = {
    "capsule": Case(
        "digits", "capsule_estep", lambda: sl.CapsuleRegression(capsule_dim=6, max_iter=4, random_state=0)
    ),
    "linear_mixture": Case(
        "digits",
        "linear_mixture_em",
        lambda: sl.LinearMixtureClassifier(n_components=10, n_dims=10, max_iter=4, random_state=0),
    ),
    "mbn": Case(
        "digits",
        "mbn_code-l1",
        lambda: sl.MultilayerBootstrapNetwork(**MBN, n_components=5, random_state=0),
    ),
    "crbm": Case("letters", "crbm_learn", crbm, online=True),
    "hcn": Case("letters", "hcn_learn", hcn, online=True),
}


def rows_of(folder: Path, name: str, n: int) -> Dataset:
    """Infinite digits of 28 x 28, or images of letters, made once."""
    if name == "digits":
        digits: Dataset = infinite_digits(folder, n, seed=0)[0]
        return digits
    place = folder / f"{name}-{n}.zarr"
    letters: Dataset = open_or(place, lambda: make_images(place, name, n, seed=0))
    return letters


class Seen(sl.Callback):
    """Seconds of the passes of a stage, where none is told those until the next; then it ends the fit."""

    def __init__(self, stage: str) -> None:
        self.stage, self.began, self.passes = stage, 0.0, list[dict[str, Any]]()
        self.checkpoint_bytes = 0

    def on_stage(self, info: dict[str, Any]) -> None:
        if self.began and not self.passes:
            self.passes.append({"seconds": time.perf_counter() - self.began})
        if self.passes:
            raise KeyboardInterrupt
        if info["stage"] == self.stage:
            self.began = time.perf_counter()

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["stage"] == self.stage:
            self.passes.append(record)

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        self.checkpoint_bytes = Path(info["path"]).stat().st_size

    @property
    def seconds(self) -> float:
        """The fastest: the first reads and compiles."""
        return min(float(record["seconds"]) for record in self.passes)


def passes(case: Case, ds: Dataset, workers: int) -> Seen:
    """Passes on a cluster of its own."""
    seen = Seen(case.stage)
    with sl.cluster("local", workers=workers), tempfile.TemporaryDirectory() as run:
        try:
            case.make().fit(ds, callbacks=seen, run_dir=run, engine={"checkpoint_passes": 1})
        except KeyboardInterrupt:
            if not seen.passes:
                raise
    return seen


def shape(case: Case, ds: Dataset) -> dict[str, Any]:
    """What is counted of a kind: bytes of a row, of a statistic, rows of a request, and steps or leaves."""
    stages = case.make().plan(ds).get("stages", {})
    part: dict[str, Any] = next((s for name, s in stages.items() if case.stage.endswith(name)), {})
    pieces = ds.pieces()
    found = {
        "row_bytes": ds.nbytes / len(ds),
        "rows_of_a_request": pieces[0][1] - pieces[0][0] if pieces else len(ds),
        "statistic_bytes": part.get("statistic_bytes", 0),
    }
    if case.online:
        found |= {"batch_rows": part["batch_rows"], "chains": part["chains"]}
    else:
        # Of a map a task writes a shard of its output, however many rows there are.
        shard = int(PARTED_BYTES // (found["row_bytes"] + 4 * MBN["n_clusterings"]))
        found |= {"leaf_rows": part.get("leaf_rows", shard), "leaves_grow": bool(part)}
    return found


def calibrate(name: str, folder: Path, rows: int) -> dict[str, Any]:
    """The constants of a kind."""
    case = CASES[name]
    few, many = (rows_of(folder, case.rows, n) for n in (rows // 5, rows))
    short, long = (passes(case, ds, 1) for ds in (few, many))
    row = max(long.seconds - short.seconds, 1e-9) / (len(many) - len(few))
    return {
        "seconds_of_a_row": row,
        "seconds_of_a_pass": max(0.0, long.seconds - len(many) * row),
        "checkpoint_bytes": long.checkpoint_bytes,
        **shape(case, many),
    }


def of_a_span() -> dict[str, float]:
    """Scheduler's seconds, tasks and messages of a span, merges included, with 1,000 simulated workers."""
    kept = json.loads((RESULTS / "simulated_cluster.json").read_text())["results"]
    many = max(kept["saturated"], key=lambda found: found["workers"])
    return {
        "seconds": kept["bounds"]["scheduler_cpu_ms_per_span_merges_included"] / 1e3,
        "tasks": many["tasks_per_pass"] / many["spans"],
        "messages": many["messages_per_pass"] / many["spans"],
    }


def leaf_of(constants: dict[str, Any], n: int) -> int:
    """Rows of a leaf of a pass over n rows."""
    leaf = int(constants["leaf_rows"])
    while constants["leaves_grow"] and leaf < n / LEAVES:
        leaf *= 2
    return leaf


def tell(constants: dict[str, Any], online: bool, n: int, workers: int, *, remote: bool) -> dict[str, Any]:
    """The parts of a pass and its seconds; bytes, spans, and dollars of requests."""
    row, bytes_read = constants["seconds_of_a_row"], n * constants["row_bytes"]
    parts: dict[str, float] = {}
    if online:
        steps, chains = math.ceil(n / constants["batch_rows"]), constants["chains"]
        spans, at_once = steps * chains, math.ceil(chains / workers)
        step = STEP_SECONDS if workers > 1 else 0.0  # on one worker it is a part of the seconds of a row
        parts["steps"] = steps * (constants["batch_rows"] / chains * row * at_once + step)
    else:
        leaf = leaf_of(constants, n)
        spans = math.ceil(n / leaf)
        parts["computing"] = (
            max(math.ceil(spans / workers) * min(leaf, n) if remote else 0, n / workers) * row
        )
    if remote:
        parts["reading"] = bytes_read / workers / (STORE["mb_per_second_of_a_worker"] * 1e6)
        parts["scheduler"] = spans * of_a_span()["seconds"]
    gets = n / constants["rows_of_a_request"]
    first = max(parts, key=lambda name: parts[name])
    return {
        "seconds": constants["seconds_of_a_pass"] + parts[first],
        "parts": parts,
        "longest": first,
        "setting": SETTINGS[first],
        "bytes_read": bytes_read,
        "spans": spans,
        "tasks": round(spans * of_a_span()["tasks"]),
        "messages": round(spans * of_a_span()["messages"]),
        "merge_bytes": spans * constants["statistic_bytes"],
        "checkpoint_bytes": constants["checkpoint_bytes"],
        "dollars": (gets * STORE["dollars_of_1000_gets"] + 2 * STORE["dollars_of_1000_puts"]) / 1000,
    }


def table(head: str, rows: list[list[str]]) -> list[str]:
    names = head.split("|")
    return ["", *(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))]


def page(found: dict[str, Any]) -> str:
    """scale.md."""
    lines = [
        "# A billion rows, on paper",
        "",
        "Written by `python benchmarks/scale.py FOLDER`: constants measured on one worker of this machine,",
        f"prices and rates of the store assumed ({json.dumps(STORE)}). A pass (an epoch of online kinds, the",
        f"codes of the first layer of `mbn`) over {BILLION:,} rows on {WORKERS:,} workers of a thread.",
    ]
    rows = []
    for name, r in found.items():
        told, row = r["billion"], r["constants"]["seconds_of_a_row"]
        counts = (f"{told[key]:,}" for key in ("spans", "tasks", "messages"))
        sizes = (f"{told[key] / 2**20:,.1f}" for key in ("bytes_read", "merge_bytes", "checkpoint_bytes"))
        takes = (
            f"{row * 1e6:.3g}",
            f"{told['seconds'] / 3600:.3g}",
            f"{told['parts'].get('scheduler', 0):,.0f}",
        )
        rows.append(
            [name, *takes, *counts, *sizes, f"{told['dollars']:.2f}", told["longest"], told["setting"]]
        )
    head = (
        "kind|microseconds of a row|hours|scheduler, s|spans|tasks|messages|MiB read|MiB merged|"
        "MiB of a checkpoint|dollars of requests|what takes longest|what moves it"
    )
    lines += table(head, rows)
    checked = [
        [name, f"{r['rows']:,}", str(r["workers"]), *(f"{r[key]:.2f}" for key in ("told", "took", "ratio"))]
        for name, parts in found.items()
        for r in parts.get("checked", ())
    ]
    if checked:
        lines += table("kind|rows|workers|told, s|took, s|told / took", checked)
    return "\n".join(lines) + "\n"


def check(name: str, folder: Path, constants: dict[str, Any], sizes: list[int]) -> list[dict[str, Any]]:
    """Passes that were measured, against what the model tells of them."""
    case, out = CASES[name], []
    for n in sizes:
        for workers in (1, 2):
            told: float = tell(constants, case.online, n, workers, remote=False)["seconds"]
            took = passes(case, rows_of(folder, case.rows, n), workers).seconds
            out.append({"rows": n, "workers": workers, "told": told, "took": took, "ratio": told / took})
            print(f"{name}: {n:,} rows, {workers} workers: told {told:.2f} s, took {took:.2f} s", flush=True)
    return out


def main() -> None:
    """Constants, what follows from them, and the page."""
    args = parser(__doc__, "scale")
    args.add_argument("folder", type=Path)
    args.add_argument("--kinds", default=",".join(CASES))
    args.add_argument("--rows", type=int, default=400_000)
    args.add_argument("--again", action="store_true", help="check the model by passes")
    args.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 4_000_000])
    a = args.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    for name in a.kinds.split(","):
        constants = calibrate(name, a.folder, a.rows)
        result = {
            "constants": constants,
            "billion": tell(constants, CASES[name].online, BILLION, WORKERS, remote=True),
        }
        if a.again:
            result["checked"] = check(name, a.folder, constants, a.sizes)
        write_part(a.out, name, a.seed, result)
    parts = json.loads(a.out.read_text())["parts"]
    target = PAGE if a.out.parent == RESULTS else a.out.with_suffix(".md")
    target.write_text(page({name: found["result"] for name, found in parts.items()}), encoding="utf-8")


if __name__ == "__main__":
    main()
