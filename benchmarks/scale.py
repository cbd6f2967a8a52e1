"""Estimate the time of a pass over a billion rows on 1,000 workers, from the cost of measured passes.

    python benchmarks/scale.py FOLDER [--parts passes,page] [--kinds capsule,linear_mixture,mbn,crbm,hcn]
    python benchmarks/scale.py FOLDER --quickest --seconds 450
    python benchmarks/scale.py FOLDER --parts ten_million

A kind is a model. Kinds that learn in batch, such as capsules, read all rows in each pass. Kinds that learn
online take minibatches; an epoch counts as a pass. The pass of a bootstrap network (mbn) maps rows to the
codes of its first layer.

passes       Measure one pass of each kind, for several numbers of rows and of workers of a local cluster.
             Stored results are measured again only with --again, so that an interrupted run resumes. No pass
             starts that would end after --seconds.
page         Write scale.md from results/scale.json and results/simulated_cluster.json.
ten_million  Fit --rows infinite digits, and record the memory of the workers over time: stepwise capsules,
             one layer of a bootstrap network, an epoch of a conditional RBM.

``--quickest`` measures capsules and mixtures with up to a million rows and the other kinds with up to
100,000; by default the limits are ten million and four million rows. Needs SCALELATENT_DATA.

The time of a pass is predicted from two constants of a kind: the seconds per row, and the seconds of a pass
that do not depend on its rows. Two passes by one worker, over the two smallest numbers of rows, give them. A
span is the range of rows of one task. A pass takes the longest of these times, which overlap:

    batch, map  the rows of the worker with most spans, times the seconds per row
    online      steps, one after another: the rows of the worker with most chains (sequences of minibatches),
                times the seconds per row, and the cost of spreading a step over workers; or all steps on one
                worker if that is faster
    all         the bytes from a store at the rate of a worker; the scheduler's seconds of all tasks

Two times are added: the seconds that do not depend on the rows, and the time to merge the sums of the
workers, level by level of a tree, over the network. The other measured passes check the prediction. Their
workers, scheduler and driver share two processors, so the scheduler's and driver's seconds of further spans
are added, and the time to send the sums.

Prices and rates of store and network are assumptions (ASSUMED). The scheduler's cost of a span, an output
shard and a step is measured with simulated workers (simulated_cluster.py).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import RESULTS, infinite_digits, open_or_create, parser, write_part

import scalelatent as sl
from scalelatent.contract.learners import Reduction
from scalelatent.data import Dataset, make_images
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.grid import FAN_IN
from scalelatent.engine.passes import choose_grid, choose_level
from scalelatent.engine.plan import MAX_TASKS
from scalelatent.estimators.session import tile_layout
from scalelatent.models.mbn.fit import LayerCoder, plan_layers

PAGE = Path(__file__).parent / "scale.md"
# The estimate is that of a pass over this number of rows by this number of workers.
BILLION, WORKERS = 10**9, 1000
# Assumptions about an object store and a network, which were not measured: dollars of a thousand reading and
# writing requests (list prices of S3 standard), MB/s that a worker reads, MB/s of its network.
ASSUMED = {
    "dollars_of_1000_gets": 0.0004,
    "dollars_of_1000_puts": 0.005,
    "store_mb_per_second_of_a_worker": 100.0,
    "network_mb_per_second_of_a_worker": 1000.0,
}
# Setting of the job file that helps against each bottleneck of a pass.
REMEDIES = {
    "refused": "`[engine] leaf_rows`: fewer, longer leaves",
    "computing": "more workers, up to the number of spans (`[engine] leaf_rows`)",
    "reading": "`[engine] cache`: workers keep rows",
    "scheduler": "`[engine] leaf_rows`: fewer, longer spans",
    "steps": "`n_chains`, and with it the rows of a step: more chains at a time",
}
# Messages of Dask that are not counted, because their number depends on time, not on the number of tasks.
TIMED_MESSAGES = ("keep-alive", "heartbeat-client")
# Number of measured passes of a batch learner; the first one reads rows and compiles, and does not count.
PASSES = 4
# Numbers of rows of the two passes from which other passes are predicted: batch learners, and other kinds.
CONSTANT_ROWS = {"batch": (50_000, 250_000), "slow": (10_000, 50_000)}
# Numbers of rows of the passes that check the predictions, and the largest one with --quickest.
CHECK_ROWS = {
    "batch": (100_000, 1_000_000, 4_000_000, 10_000_000),
    "map": (100_000, 1_000_000, 4_000_000),
    "online": (100_000, 1_000_000, 4_000_000),
}
QUICKEST_ROWS = {"batch": 1_000_000, "map": 100_000, "online": 100_000}


@dataclass(frozen=True)
class ScaleCase:
    """Kind of model whose passes are measured."""

    loop: str  # passes of a "batch" learner, "online" steps, or a "map" of rows to codes
    rows: str  # data set: "digits" or "letters"
    stage: str  # name of the measured stage of the fit
    make: Callable[[], Any]  # returns an unfitted estimator
    passes: int  # number of passes of a typical fit
    why: str  # text on the page that explains the number `passes`

    @property
    def engine(self) -> dict[str, Any]:
        """Options of the engine; rows of batch learners are cached, as their plans suggest."""
        return {"cache": 0.3} if self.loop == "batch" else {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows: passes over the first two predict the others, which check the predictions."""
        return CONSTANT_ROWS["batch" if self.loop == "batch" else "slow"] + CHECK_ROWS[self.loop]


def make_crbm(n_hidden: int = 64) -> Any:
    corruption = {"kind": "flip", "rate": 0.1}
    return sl.ConditionalRBM(n_hidden=n_hidden, n_epochs=1, corruption=corruption, random_state=0)


def make_hcn() -> Any:
    chains = {"n_chains": 8, "chain_batches": 10, "warmup_rows": 1000}
    return sl.HierarchicalCompositionalNetwork([(32, (8, 6))], n_epochs=1, random_state=0, **chains)


def make_mbn(n_clusterings: int = 100, k1: int = 100) -> Any:
    sizes = {"n_clusterings": n_clusterings, "k1": k1, "n_components": 5}
    return sl.MultilayerBootstrapNetwork(**sizes, decay=0.5, random_state=0)


CASES = {
    "capsule": ScaleCase(
        "batch",
        "digits",
        "capsule_estep",
        lambda: sl.CapsuleRegression(
            architecture="multiclass", capsule_dim=6, algorithm="em", random_state=0
        ),
        100,
        "100, which give most of the paper's decrease of the log-loss",
    ),
    "linear_mixture": ScaleCase(
        "batch",
        "digits",
        "linear_mixture_em",
        lambda: sl.LinearMixtureClassifier(n_components=10, n_dims=10, likelihood="error", random_state=0),
        50,
        "50 of EM",
    ),
    "mbn": ScaleCase("map", "digits", "mbn_code-l1", make_mbn, 6, "six layers with the cost of the first"),
    "crbm": ScaleCase("online", "letters", "crbm_learn", make_crbm, 1, "an epoch"),
    "hcn": ScaleCase("online", "letters", "hcn_learn", make_hcn, 1, "an epoch"),
}


def open_rows(folder: Path, name: str, n: int) -> Dataset:
    """Return n rows: random deformations of MNIST digits ("digits"), or generated images ("letters").

    Use the first n rows of a stored dataset with at least n rows; create one if there is none.
    """
    made = (int(place.stem.rpartition("-")[2]) for place in folder.glob(f"{name}-*.zarr"))
    size = min((rows for rows in made if rows >= n), default=n)
    place = folder / f"{name}-{size}.zarr"

    def make() -> Dataset:
        if name == "digits":
            return infinite_digits(folder, size, seed=0)[0]
        return make_images(place, name, size, seed=0)

    found: Dataset = open_or_create(place, make)
    return found if len(found) == n else found[:n]


class MeasuredEnough(KeyboardInterrupt):
    """Exception that ends a fit after the measured passes."""


class PassSeconds(sl.Callback):
    """Callback that records the seconds of the passes of a stage, and ends the fit after them.

    A bootstrap network's map to codes reports no passes, so the seconds until the next stage are recorded.
    """

    def __init__(self, stage: str, wanted_passes: int = PASSES) -> None:
        self.stage, self.wanted, self.began, self.passes = stage, wanted_passes, 0.0, list[float]()
        self.parts = 0.0  # seconds of the reported parts of an epoch
        self.checkpoint_bytes = 0

    def on_stage(self, info: dict[str, Any]) -> None:
        if self.began:
            self.passes = self.passes or [time.perf_counter() - self.began]
            raise MeasuredEnough
        if info["stage"] == self.stage:
            self.began = time.perf_counter()

    def on_pass_end(self, record: dict[str, Any]) -> None:
        # Linear mixtures start with passes of k-means, which are cheaper and do not count.
        if record["stage"] == self.stage and record.get("phase", "em") == "em":
            self.passes.append(self.parts + float(record["seconds"]))
            self.parts = 0.0
            # The fit runs one more pass, because the checkpoint of a pass is written after its report.
            if len(self.passes) > self.wanted:
                raise MeasuredEnough

    def on_report(self, record: dict[str, Any]) -> None:
        if record["stage"] == self.stage:
            self.parts += float(record["seconds"])

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        self.checkpoint_bytes = Path(info["path"]).stat().st_size

    @property
    def seconds(self) -> float:
        """Seconds of the fastest of the passes 2 to 4; if the fit has only one pass, its seconds."""
        return min(self.passes[1:PASSES] or self.passes)


@dataclass(frozen=True)
class RowShape:
    """Stand-in for a dataset of any size, for functions of the engine that divide rows among tasks."""

    n: int
    n_features: int

    def __len__(self) -> int:
        return self.n


def divide_pass(n: int, workers: int, n_features: int, reduction: Reduction) -> dict[str, int]:
    """Return the number of spans (ranges of rows of one task) of a pass over n rows, and the rows of a span.

    "levels" is the height of the tree in which tasks merge the sums of the spans.
    """
    grid = choose_grid(RowShape(n, n_features), reduction)
    level = choose_level(grid, reduction, workers)
    rows = min(n, grid.leaf_rows * FAN_IN**level)
    return {"spans": grid.n_nodes(level), "span_rows": rows, "levels": grid.depth - level}


def divide_map(n: int, row_bytes: int, coder: LayerCoder) -> dict[str, int]:
    """Return the number of tasks ("spans") that map n rows to the codes of a layer, and their sizes.

    A task computes some columns of the codes of a range of rows, so "readings" tasks read the same row.
    "span_rows" is the number of rows of a task times its share of the columns.
    """
    tiles = tile_layout(n, row_bytes, coder)
    width = int(coder.output()[0][0])
    strips, parts = -(-n // tiles["shard_rows"]), -(-width // tiles["tile_columns"])
    rows = math.ceil(min(n, tiles["shard_rows"]) * tiles["tile_columns"] / width)
    return {"spans": strips * parts, "span_rows": rows, "levels": 0, "readings": parts}


def count_pass_parts(case: ScaleCase, ds: Dataset, run: Path, workers: int) -> dict[str, Any]:
    """Return sizes of a pass: bytes, operations, and tasks for the measured rows and for a billion rows."""
    store, pieces = EngineStore(run / "engine"), ds.pieces()
    found: dict[str, Any] = {
        "row_bytes": ds.nbytes / len(ds),
        "rows_of_a_request": pieces[0][1] - pieces[0][0],
    }
    if case.loop == "map":
        layer = plan_layers(case.make(), ds, 0.5, 0)[0]
        coder = LayerCoder(layer, None, 0, layer.n_clusterings)
        flops, statistic = layer.n_clusterings * layer.flops_per_row(), 0

        def divide_rows(n: int, workers: int) -> dict[str, int]:
            return divide_map(n, max(1, ds.nbytes // len(ds)), coder)

    elif case.loop == "online":
        latest = store.latest_state(case.stage)
        assert latest is not None
        order, learner = latest[1]["order"], store.load_stage(case.stage).online
        flops, statistic = learner.flops_per_row(), learner.layout().nbytes
        found |= {"step_rows": order.batch_rows, "chains": order.n_chains}

        def divide_rows(n: int, workers: int) -> dict[str, int]:
            return {"spans": math.ceil(n / order.batch_rows), "span_rows": order.batch_rows, "levels": 0}

    else:
        stage = store.load_stage(case.stage)
        reduction, rows = stage.reductions["train"], stage.datasets["train"]
        flops, statistic = reduction.flops_per_row(), reduction.layout().nbytes
        found["row_bytes"] = rows.nbytes / len(rows)  # The stage reads rows that an earlier stage projected.

        def divide_rows(n: int, workers: int) -> dict[str, int]:
            return divide_pass(n, workers, rows.n_features, reduction)

    found |= {"flops_of_a_row": flops, "statistic_bytes": statistic}
    return found | {"cut": divide_rows(len(ds), workers), "cut_of_a_billion": divide_rows(BILLION, WORKERS)}


def measure_busy_share() -> float:
    """Return the share of this machine's processors that programs use now, before a measurement."""
    return psutil.cpu_percent(interval=1.0) / 100


def run_measured_fit(case: ScaleCase, ds: Dataset, workers: int) -> dict[str, Any]:
    """Run a fit on the current cluster until enough passes of the stage ``case.stage`` are measured.

    Return the seconds of the fastest pass, and the bytes, operations and tasks of a pass.
    """
    seen = PassSeconds(case.stage)
    begin, others = time.perf_counter(), measure_busy_share()
    with tempfile.TemporaryDirectory() as run:
        with suppress(MeasuredEnough):
            case.make().fit(ds, callbacks=seen, run_dir=run, engine={"checkpoint_passes": 1, **case.engine})
        counted = count_pass_parts(case, ds, Path(run), workers)
    return {
        "kind": next(name for name, known in CASES.items() if known is case),
        "rows": len(ds),
        "workers": workers,
        "seconds": seen.seconds,
        "in_all": time.perf_counter() - begin,
        "busy_before": others,
        "checkpoint_bytes": seen.checkpoint_bytes,
        **counted,
    }


def list_wanted_passes(a: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Return (kind, rows, workers) of the requested passes, by number of workers, then of rows."""
    out = []
    for name in a.kinds.split(","):
        case = CASES[name]
        sizes = a.sizes or [n for n in case.sizes if not a.quickest or n <= QUICKEST_ROWS[case.loop]]
        # Passes over the two smallest numbers of rows give the two constants of the prediction (seconds per
        # row, and seconds that do not depend on rows). These passes are measured with one worker only.
        out += [(name, n, w) for i, n in enumerate(sizes) for w in a.workers if i > 1 or w == 1]
    return sorted(out, key=lambda piece: (piece[2], piece[1]))


def measure(a: argparse.Namespace) -> None:
    """Measure the requested passes that have no results, on one cluster for each number of workers."""
    begin, had = time.perf_counter(), {} if a.again else read_measured_passes(a.out)
    todo = [piece for piece in list_wanted_passes(a) if piece not in had]
    datasets = {(name, n): open_rows(a.folder, CASES[name].rows, n) for name, n, _ in todo}
    took: dict[tuple[str, int], float] = {}
    for workers in sorted({piece[2] for piece in todo}):
        with sl.cluster("local", workers=workers):
            warm: set[str] = set()
            for name, n, _ in (piece for piece in todo if piece[2] == workers):
                case = CASES[name]
                # Predict the seconds from the last fit of this kind, in proportion to the rows.
                known = [(rows, s) for (kind, rows), s in took.items() if kind == name]
                likely = max((s * max(1.0, n / rows) for rows, s in known[-1:]), default=0.0)
                left = a.seconds - (time.perf_counter() - begin)
                if likely > left:
                    print(f"{name}, {n:,} rows, {workers} workers: skipped, {left:.0f} s remain", flush=True)
                    continue
                if name not in warm:  # A small fit compiles or loads the kernels.
                    warm.add(name)
                    run_measured_fit(case, open_rows(a.folder, case.rows, 2000), workers)
                found = run_measured_fit(case, datasets[name, n], workers)
                took[name, n] = found["in_all"]
                print(f"{time.perf_counter() - begin:.0f} s: {found}", flush=True)
                write_part(a.out, f"{name}, {n:,} rows, {workers} workers", a.seed, found)


def read_measured_passes(out: Path) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Return the results of all measured passes, with their dates, by (kind, rows, workers)."""
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"] if out.exists() else {}
    return {
        (r["kind"], r["rows"], r["workers"]): r | {"date": part["machine"]["date"]}
        for part in parts.values()
        if "kind" in (r := part["result"])
    }


def compute_constants(kind: str, pieces: dict[tuple[str, int, int], dict[str, Any]]) -> dict[str, Any] | None:
    """Return the seconds per row and the other seconds of a pass, from two passes of one worker.

    Return None if there are fewer than two such passes.
    """
    own = sorted(n for name, n, workers in pieces if name == kind and workers == 1)
    if len(own) < 2:
        return None
    two = CASES[kind].sizes[:2]
    two = two if set(two) <= set(own) else tuple(own[:2])
    few, many = (pieces[kind, n, 1] for n in two)
    row = max(many["seconds"] - few["seconds"], 1e-9) / (many["rows"] - few["rows"])
    return {
        "seconds_of_a_row": row,
        "seconds_of_a_pass": max(0.0, few["seconds"] - few["rows"] * row),
        "from": two,
        "spans_of_a_pass": few["cut"]["spans"],
    }


def get_scheduler_costs(size_index: int = -1) -> dict[str, dict[str, float]]:
    """Return the scheduler's cost of a span (range of rows of one task), an output shard and a step.

    The keys are the loops "batch", "map" and "online N" with N chains. The costs were measured with several
    numbers of simulated workers; ``size_index`` is -1 for the largest and 0 for the smallest number. The
    scheduler's seconds per message come from batch passes, where few messages are heartbeats.
    """
    parts = json.loads((RESULTS / "simulated_cluster.json").read_text(encoding="utf-8"))["parts"]

    def read_loop(loop: str) -> list[dict[str, Any]]:
        found = [part["result"] for name, part in parts.items() if name.split()[0] == loop]
        return sorted(found, key=lambda r: int(r["workers"]))

    def count_messages(r: dict[str, Any]) -> int:
        reported = (r["messages_in"], r["messages_out"])
        return sum(n for ops in reported for op, n in ops.items() if op not in TIMED_MESSAGES)

    batch = read_loop("batch")[size_index]
    beats = batch["idle_scheduler_share"] * batch["seconds_per_pass"]
    seconds_of_a_message = (batch["scheduler_cpu_seconds_per_pass"] - beats) / count_messages(batch)

    def compute_costs(r: dict[str, Any], count: int) -> dict[str, float]:
        tasks, sent = r["tasks_per_pass"] / count, count_messages(r) / count
        driver = r["driver_cpu_ms_per_task"] / 1e3 * tasks
        counts = {"workers": r["workers"], "tasks": tasks, "messages": sent, "driver": driver}
        return counts | {"seconds": sent * seconds_of_a_message}

    shards = read_loop("map")[size_index]
    out = {"batch": compute_costs(batch, batch["spans"]), "map": compute_costs(shards, shards["shards"])}
    return out | {f"online {r['chains']}": compute_costs(r, r["steps"]) for r in read_loop("online")}


def get_spreading_cost(chains: int, statistic_bytes: float) -> float:
    """Return the seconds that a step takes beyond its computing if its chains run on two workers.

    It is the measured value whose number of bytes and of chains is nearest.
    """
    kept = json.loads((RESULTS / "minibatch_steps.json").read_text(encoding="utf-8"))["results"]
    spread = [r for r in kept["dask_2_workers"] if "all_beyond_computing_ms" in r]
    nearest = min(
        spread,
        key=lambda r: (abs(math.log(r["state_kib"] * 1024 / statistic_bytes)), abs(r["chains"] - chains)),
    )
    return float(nearest["all_beyond_computing_ms"]) / 1e3


def predict_pass(r: dict[str, Any], n: int, workers: int, *, remote: bool = False) -> dict[str, Any]:
    """Return the seconds of a pass and of its parts, and its bytes, tasks, messages and dollars of requests.

    ``r`` has the sizes of a pass and the constants of its kind. ``remote`` means a cluster of separate
    machines with an object store; otherwise all processes share this machine.
    """
    loop, row, shared = (
        CASES[r["kind"]].loop,
        r["seconds_of_a_row"],
        r["cut_of_a_billion" if remote else "cut"],
    )
    scheduler, parts, spans = get_scheduler_costs(), dict[str, float](), shared["spans"]
    if loop == "online":
        steps, chains = math.ceil(n / r["step_rows"]), r["chains"]
        chain_seconds = r["step_rows"] / chains * row
        at_once = math.ceil(chains / workers)
        spread = chain_seconds * at_once + get_spreading_cost(chains, r["statistic_bytes"])
        alone = chain_seconds * chains <= spread
        parts["steps"] = steps * (chain_seconds * chains if alone else spread)
        spans, reading, sent = steps, 1 if alone else min(workers, chains), 0 if alone else chains
        counted = min(
            (known for name, known in scheduler.items() if (name == "online 1") == alone and " " in name),
            key=lambda known: abs(known["tasks"] - chains),
        )
    else:
        busiest = min(n, math.ceil(spans / workers) * shared["span_rows"])
        parts["computing"] = max(busiest, n / workers) * row
        counted, reading, sent = scheduler[loop], min(workers, spans), 1
    bytes_read = n * r["row_bytes"] * shared.get("readings", 1)
    if remote:
        parts["reading"] = bytes_read / reading / (ASSUMED["store_mb_per_second_of_a_worker"] * 1e6)
        parts["scheduler"] = spans * counted["seconds"]
    first = max(parts, key=lambda name: parts[name])
    refused = loop != "online" and spans > MAX_TASKS  # Several online steps share one task.
    network = ASSUMED["network_mb_per_second_of_a_worker"] * 1e6
    if remote:
        merging = shared["levels"] * FAN_IN * r["statistic_bytes"] / network
    else:
        merging = spans * (1 - 1 / workers) * r["statistic_bytes"] / network if loop == "batch" else 0.0
    beside = 0.0
    if loop != "online" and not remote:
        known = get_scheduler_costs(0)[loop]
        beside = max(0, spans - r["spans_of_a_pass"]) * (known["seconds"] + known["driver"])
    gets = n / r["rows_of_a_request"] * shared.get("readings", 1)
    puts = spans if loop == "map" else 2
    return {
        "seconds": r["seconds_of_a_pass"] + parts[first] + merging + beside,
        "parts": parts | ({"merging": merging} if remote else {}),
        "breaks": f"refused: above {MAX_TASKS:,} tasks" if refused else first,
        "setting": REMEDIES["refused" if refused else first],
        "bytes_read": bytes_read,
        "spans": spans,
        "tasks": round(spans * counted["tasks"]),
        "messages": round(spans * counted["messages"]),
        "merge_bytes": spans * r["statistic_bytes"] * sent,
        "dollars": (gets * ASSUMED["dollars_of_1000_gets"] + puts * ASSUMED["dollars_of_1000_puts"]) / 1000,
    }


def format_table(columns: str, rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table; ``columns`` has the column names, separated by |."""
    names = columns.split("|")
    return ["", *(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))]


def format_number(number: float) -> str:
    """Return a number as text: from 100 up whole with commas, otherwise with three significant figures."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def check_predictions(pieces: dict[tuple[str, int, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return predicted and measured seconds of all passes but the two per kind that predictions use."""
    out = []
    for (kind, n, workers), r in sorted(
        pieces.items(), key=lambda item: (list(CASES).index(item[0][0]), item[0])
    ):
        constants = compute_constants(kind, pieces)
        if constants is not None and not (workers == 1 and n in constants["from"]):
            reported = predict_pass(r | constants, n, workers)["seconds"]
            same = {"kind": kind, "rows": n, "workers": workers, "predicted": reported, "took": r["seconds"]}
            out.append(same | {"ratio": reported / r["seconds"]})
    return out


def format_page(pieces: dict[tuple[str, int, int], dict[str, Any]], memory: dict[str, dict[str, Any]]) -> str:
    """Return the text of scale.md: the estimate, its check by measured passes, and memory of long fits."""
    dates = sorted({r["date"] for r in pieces.values()})
    others = sorted(r["busy_before"] for r in pieces.values())
    middle = others[len(others) // 2]
    simulated = ", ".join(f"{kind}: {r['workers']:,}" for kind, r in get_scheduler_costs().items())
    lines = [
        "# A billion rows, estimated",
        "",
        "`python benchmarks/scale.py FOLDER` writes this page; its docstring describes the model. One worker",
        f"of this machine gives the constants ({', '.join(dates)}). Before a pass, other work used",
        f"{middle:.0%} of the processors in the median and at most {others[-1]:.0%}. Simulated workers",
        f"give the scheduler's constants ({simulated}).",
        f"These values are assumed, not measured: {json.dumps(ASSUMED)}.",
    ]
    if middle > 0.1:
        lines += [
            "",
            "**Other work was running: neither the times nor the ratios are those of an idle machine.**",
        ]
    lines += ["", f"## A pass over {BILLION:,} rows by {WORKERS:,} workers of one thread"]
    rows, longest, fits = [], [], []
    for kind, case in CASES.items():
        constants = compute_constants(kind, pieces)
        if constants is None:
            continue
        r = pieces[kind, constants["from"][1], 1] | constants
        reported, row = predict_pass(r, BILLION, WORKERS, remote=True), constants["seconds_of_a_row"]
        rows.append([
            kind, format_number(row * 1e6), format_number(r["flops_of_a_row"] / row / 1e9),
            *(format_number(reported[key]) for key in ("spans", "tasks", "messages")),
            format_number(reported["bytes_read"] / 2**30), format_number(reported["merge_bytes"] / 2**20),
            format_number(r["checkpoint_bytes"] / 2**20), f"{reported['dollars']:.2f}",
        ])  # fmt: skip
        parts = reported["parts"]
        names = ("computing", "steps", "reading", "scheduler", "merging")
        seconds = [format_number(parts[name]) if name in parts else "" for name in names]
        longest.append(
            [kind, *seconds, format_number(reported["seconds"]), reported["breaks"], reported["setting"]]
        )
        hours = case.passes * reported["seconds"] / 3600
        fits.append(
            [
                kind,
                str(case.passes),
                case.why,
                format_number(hours),
                f"{case.passes * reported['dollars']:.2f}",
            ]
        )
    lines += format_table(
        "kind|microseconds per row|GFlop/s|spans or steps|tasks|messages|GiB read|MiB merged|MiB of a "
        "checkpoint|dollars of requests",
        rows,
    )
    lines += ["", "Seconds of the parts of this pass, which overlap except for merging, and the bottleneck:"]
    lines += format_table("kind|computing|steps|reading|scheduler|merging|total|bottleneck|remedy", longest)
    lines += ["", "A fit:"]
    lines += format_table("kind|passes|meaning|hours|dollars of requests", fits)
    lines += describe_step_costs()
    found = check_predictions(pieces)
    if found:
        good = sum(abs(r["ratio"] - 1) <= 0.2 for r in found)
        lines += ["", "## Predicted and measured, seconds of a pass", ""]
        lines += [f"Within 20 %: {good} of {len(found)}. Passes that gave the constants are excluded."]
        lines += format_table(
            "kind|rows|workers|predicted|measured|predicted / measured",
            [
                [
                    r["kind"],
                    f"{r['rows']:,}",
                    str(r["workers"]),
                    *(f"{r[k]:.3g}" for k in ("predicted", "took", "ratio")),
                ]
                for r in found
            ],
        )
    if memory:
        busy = {name.split(",")[0]: r["busy_before"] for name, r in memory.items() if r["busy_before"] > 0.1}
        lines += [
            "",
            "## Ten million rows, measured",
            "",
            "Fits on a local cluster of this machine, including the preparation of the rows; the fit of mbn",
            "ends when the codes of the layer are written. Peaks include the rows that workers keep between",
            "passes (`[engine] cache`, up to 30 % of their memory) and sums that wait to be merged.",
        ]
        if busy:
            least = min(busy.values())
            lines += [
                f"Other work used at least {least:.0%} of the processors before {', '.join(busy)}: **these",
                "minutes are upper bounds**. Minutes of one processor are those that the workers computed.",
            ]
        lines += format_table(
            "fit|rows|GB|workers|minutes|minutes of one processor|peak of a worker in the first, second, "
            "third, last quarter, MiB",
            [
                [
                    name, f"{r['rows']:,}", f"{r['gb']:.1f}", str(r["workers"]),
                    format_number(r["seconds"] / 60), format_number(r["processor_seconds"] / 60),
                    ", ".join(map(str, r["peaks_mib"])),
                ]
                for name, r in memory.items()
            ],
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def describe_step_costs() -> list[str]:
    """Return lines of a table: the scheduler's milliseconds of a minibatch step, by its number of chains."""
    steps = {
        int(name.split()[1]): r for name, r in get_scheduler_costs().items() if name.startswith("online")
    }
    rows = [
        [
            str(chains),
            *(format_number(r[key]) for key in ("workers", "tasks", "messages")),
            format_number(1e3 * r["seconds"]),
        ]
        for chains, r in sorted(steps.items())
    ]
    return [
        "",
        "A step with several chains, spread over simulated workers; with one chain, one task runs the steps",
        "of several seconds. Each chain receives the results of all chains of the previous step, so that",
        "transfers between workers grow with the square of the chains.",
        *format_table("chains|workers|tasks per step|messages|scheduler, ms", rows),
    ]


# A fit's time is divided into this number of equal parts; the peak memory of each part is written.
QUARTERS = 4


@dataclass
class WorkerSamples:
    """Resident size of the largest worker at each sample, and the processor seconds of all workers."""

    sizes: list[int]
    seconds: float = 0.0


@contextmanager
def sample_workers(client: Any, seconds: float = 2.0) -> Iterator[WorkerSamples]:
    """Yield an object to which a thread adds the workers' memory and CPU time every ``seconds`` seconds."""
    workers = [psutil.Process(pid) for pid in client.run(lambda: psutil.Process().pid).values()]
    seen, ended = WorkerSamples([]), threading.Event()

    def take_samples() -> None:
        while not ended.wait(seconds):
            with suppress(psutil.NoSuchProcess):
                seen.sizes.append(max(worker.memory_info().rss for worker in workers))
                times = [worker.cpu_times() for worker in workers]
                seen.seconds = sum(t.user + t.system for t in times)

    thread = threading.Thread(target=take_samples, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def add_class_outputs(folder: Path, ds: Dataset) -> Dataset:
    """Return the dataset with targets for a conditional RBM: ten columns, 1 in the column of the class."""

    def make() -> Dataset:
        classes = ds.read_y(0, len(ds))
        return Dataset.from_arrays((classes[:, None] == np.arange(10)).astype(np.uint8)).save(place)

    place = folder / f"classes-{len(ds)}.zarr"
    outputs: Dataset = open_or_create(place, make)
    return ds.with_target(outputs)


def run_ten_million(a: argparse.Namespace) -> None:
    """Run each of --fits on a local cluster; write the peak memory in each quarter of its time."""
    capsules = {"architecture": "multiclass", "capsule_dim": 6, "algorithm": "stepwise"}
    capsules |= {"projection": None, "n_epochs": 1}
    chains = {"batch_size": 100, "n_chains": 2, "local_steps": 50, "learning_rate": 1e-3, "n_epochs": 1}
    fits: dict[str, tuple[str, Callable[[], Any]]] = {
        "capsule": ("stepwise, an epoch", lambda: sl.CapsuleRegression(**capsules, random_state=0)),
        "mbn": ("a layer of 50 x 8", lambda: make_mbn(50, 8)),
        "crbm": (
            "classes by 16 hidden units, an epoch",
            lambda: sl.ConditionalRBM(n_hidden=16, **chains, random_state=0),
        ),
    }
    workers, digits = max(a.workers), open_rows(a.folder, "digits", a.rows)
    for name in a.fits.split(","):
        what, make = fits[name]
        ds, others = add_class_outputs(a.folder, digits) if name == "crbm" else digits, measure_busy_share()
        seen, begin = PassSeconds("mbn_code-l1"), time.perf_counter()
        with (
            tempfile.TemporaryDirectory(dir=a.folder) as run,
            sl.cluster("local", workers=workers, memory_limit=a.memory_limit) as client,
            sample_workers(client) as watch,
            suppress(MeasuredEnough),
        ):
            make().fit(ds, callbacks=seen, run_dir=run, engine={"cache": a.cache})
        n = len(watch.sizes)
        found = {
            "rows": len(ds),
            "gb": ds.nbytes / 1e9,
            "workers": workers,
            "seconds": time.perf_counter() - begin,
            "processor_seconds": watch.seconds,
            "busy_before": others,
            "peaks_mib": [
                round(max(watch.sizes[n * i // QUARTERS : max(n * (i + 1) // QUARTERS, 1)]) / 2**20)
                for i in range(QUARTERS)
            ],
        }
        print(name, found, flush=True)
        write_part(a.out, f"{name}, {what}, {len(ds):,} rows", a.seed, found)


def main() -> None:
    args = parser(__doc__, "scale")
    args.add_argument("folder", type=Path)
    args.add_argument("--parts", default="passes,page")
    args.add_argument("--kinds", default=",".join(CASES))
    args.add_argument(
        "--sizes", type=int, nargs="+", help="numbers of rows; the two smallest give the constants"
    )
    args.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args.add_argument(
        "--quickest",
        action="store_true",
        help="measure at most a million rows of batch learners, and 100,000 of others",
    )
    args.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="start no pass that would end after this number of seconds",
    )
    args.add_argument("--again", action="store_true", help="measure stored passes again")
    args.add_argument("--rows", type=int, default=10_000_000, help="number of rows in the part ten_million")
    args.add_argument("--fits", default="capsule,mbn,crbm", help="fits of the part ten_million")
    args.add_argument("--memory-limit", default="4GB", help="memory of a worker in the part ten_million")
    args.add_argument("--cache", default="auto", help="value of [engine] cache in the part ten_million")
    a = args.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    parts = a.parts.split(",")
    if "ten_million" in parts:
        run_ten_million(a)
    if "passes" in parts:
        measure(a)
    if "page" in parts:
        kept = json.loads(a.out.read_text(encoding="utf-8"))["parts"]
        memory = {name: part["result"] for name, part in kept.items() if "peaks_mib" in part["result"]}
        target = PAGE if a.out.parent == RESULTS else a.out.with_suffix(".md")
        target.write_text(format_page(read_measured_passes(a.out), memory), encoding="utf-8")
        print(f"written to {target}")


if __name__ == "__main__":
    main()
