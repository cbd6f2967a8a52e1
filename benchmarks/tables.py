"""Print tables of the files in results/, or rewrite the tables of the pages in PAGES.

    python benchmarks/tables.py                 rewrite the tables of the pages
    python benchmarks/tables.py --check         write nothing; fail if a page differs from the files
    python benchmarks/tables.py --list          print the names of all tables, with their columns
    python benchmarks/tables.py NAME ...        print these tables

In a page, a table follows a line ``<!-- table: NAME -->``. A line ``<!-- table: NAME: FIRST; SECOND -->``
selects the rows that start with one of these texts. A line ``<!-- source: FILE -->`` or ``<!-- source:
FILE/PART -->`` is followed by the command, machine, date and seed of a file or of one of its parts. A line
``<!-- picture: NAME -->`` is followed by results/NAME.png, if this file exists, and its caption in papers.py.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from common import RESULTS
from papers import PAPER_SINGLE, caption
from table_text import CLUSTERED, HEADS, TABLES, TASKS, as_table, mean_of, over_seeds, percent, read

import scalelatent as sl

_ROOT = RESULTS.parent.parent
PAGES = (RESULTS.parent / "README.md", RESULTS.parent / "papers.md", _ROOT / ".docs" / "guide" / "gpu.md")
# These patterns find the marks for a table, a picture or a source in a page, and the text to replace.
_TABLE = re.compile(r"(<!-- table: (\w+)(?:: (.*))? -->\n)(?:\|.*\n)*")
_PICTURE = re.compile(r"(<!-- picture: (\w+) -->\n)(?:!\[.*\n\n.*\n)?")
_SOURCE = re.compile(r"(<!-- source: (\w+)(?:/(.*))? -->\n)(?:`python .*\n)?")


def to_mib(size: float) -> str:
    """Return a number of bytes as text in MiB."""
    return f"{size / 2**20:.0f} MiB"


def format_three_figures(number: float) -> str:
    """Return a number as text: a whole number of at most three significant figures, with commas."""
    size = 10 ** max(0, len(str(int(number))) - 3)
    return f"{round(number / size) * size:,.0f}"


def to_millions(rows: float) -> str:
    """Return a number of rows as text in millions."""
    return f"{rows / 1e6:.0f} million"


@as_table("architecture|d|test error|validation error|passes")
def capsule_dims() -> Iterable[Iterable[Any]]:
    found = read("paper_capsule_dims") + read("paper_capsule_architectures")
    # If both files have a fit of the same architecture and d, the fit of the first file counts.
    fits = {(r["architecture"], r["capsule_dim"]): r for r in reversed(found)}
    kinds = list(dict.fromkeys(r["architecture"] for r in found))
    for (kind, d), r in sorted(fits.items(), key=lambda fit: (kinds.index(fit[0][0]), fit[0][1])):
        yield kind, d, percent(r["test_error"]), percent(r["validation_error"]), r["passes"]
    for d, r in ((4, read("million")), (16, read("million_d16"))):
        name = f"all_vs_all, {r['rows']:,} infinite digits"
        yield name, d, percent(r["test_error"]), percent(r["validation_error"]), r["passes"]


@as_table("USPS: d|test error|validation error|passes")
def capsule_dims_usps() -> Iterable[Iterable[Any]]:
    for r in read("paper_capsule_dims_usps"):
        yield r["capsule_dim"], percent(r["test_error"]), percent(r["validation_error"]), r["passes"]


@as_table("momentum|nu|log-loss / log 10 after 10, 100, 1,000 passes|training error after 10, 100, 1,000")
def convergence() -> Iterable[Iterable[Any]]:
    for r in read("paper_capsule_convergence"):
        losses = ", ".join(f"{r['log_loss'][i]:.4f}" for i in (9, 99, -1))
        yield (
            f"{r['momentum']:g}",
            f"{r['nu']:g}",
            losses,
            ", ".join(percent(r["train_error"][i]) for i in (9, 99, -1)),
        )


@as_table(
    "rows|nu|passes of momentum 0.9|training error|passes to the same log-loss: EM, SQUAREM, Anderson"
    "|to the same training error"
)
def acceleration() -> Iterable[Iterable[Any]]:
    for r in read("capsule_acceleration"):
        cells = (
            ", ".join(str(r[key][way] or "-") for way in ("plain", "squarem", "anderson"))
            for key in ("passes_to_log_loss", "passes_to_error")
        )
        yield r["set"], f"{r['nu']:g}", r["passes_of_momentum"], percent(r["train_error"]), *cells


@as_table("start|lowest, median, highest of the 20")
def starts() -> Iterable[Iterable[Any]]:
    found = read("paper_capsule_starts")
    groups = {"subspace": [r["lowest_train_error"] for r in found if r["init"] == "subspace"]}
    for r in found:
        if r["init"] == "random":
            groups.setdefault(f"random, {r['init_scale']:g}", []).append(r["lowest_train_error"])
    for name, errors in groups.items():
        shown_errors = min(errors), statistics.median(errors), max(errors)
        yield name, ", ".join(percent(error) for error in dict.fromkeys(shown_errors))


@as_table("algorithm|test error|rows read|share of batch EM's rows|seconds of the fit, on a busy machine")
def online() -> Iterable[Iterable[Any]]:
    found = read("online_capsule")
    for key, name in {
        "em": "batch EM, the paper's schedule",
        "stepwise": "stepwise EM",
        "passive_aggressive": "passive-aggressive",
        "incremental": "incremental EM",
    }.items():
        if key not in found["fits"]:  # Only results of an earlier version have these algorithms.
            continue
        fit, share = found["fits"][key], found["comparison"][key]["share_of_em_rows"]
        yield (
            name,
            percent(fit["test_error"]),
            to_millions(fit["rows_read"]),
            "1" if key == "em" else percent(share, 1),
            f"{fit['seconds']:.0f} s",
        )


@as_table("|test error|validation error|passes|seconds")
def beside_sklearn() -> Iterable[Iterable[Any]]:
    found = read("choosing")["algorithms"]
    for key, name in {
        "em": "batch EM, the paper's schedule",
        "stepwise": "stepwise EM",
        "MLP, 64 units, to the error of stepwise": (
            "MLPClassifier, 64 units, until its validation error is as low as both"
        ),
    }.items():
        r = found[key]
        yield name, percent(r["test_error"]), percent(r["validation_error"]), r["passes"], r["seconds"]


@as_table(
    "D|pass / products, nu = 0|pass / products, nu = .8|active rows at nu = .8|plain numpy / pass"
    "|numpy in the form of the paper / pass, both with 2 threads"
)
def capsule_pass() -> Iterable[Iterable[Any]]:
    found = read("capsule_pass")
    for r, both in zip(found["table"], found["two threads"], strict=True):
        ratios = (f"{r[f'ratio nu={nu}']:.2f}" for nu in ("0", "0.8"))
        active = percent(r["active_share_nu_0.8"], 0)
        yield r["D"], *ratios, active, r["times faster than numpy"], both["times faster"]


@as_table(
    "D|read only|compute only, 1 thread|both|both, rows into new memory|both / slower of the two"
    "|wait for rows|CPU of the computing thread"
)
def overlap() -> Iterable[Iterable[Any]]:
    for r in read("streamed_pass")["overlap"]:
        keys = ("read_only_s", "compute_only_s", "pass_s", "pass_fresh_pages_s")

        seconds = (f"{r[key]:.2f} s" for key in keys)
        waited, cpu = f"{r['waited_for_rows_s']:.3f} s", f"{r['computing_thread_cpu_s']:.2f} s"
        yield r["D"], *seconds, f"{r['ratio']:.2f}", waited, cpu


@as_table(
    "D|spans|in process, 2 threads|LocalCluster 2 x 1|difference|difference of the fastest passes"
    "|allowed difference|cluster's pass without computing|CPU of driver and scheduler"
)
def on_dask() -> Iterable[Iterable[Any]]:
    for r in read("streamed_pass")["dask"]:
        keys = ("difference_s", "fastest_difference_s", "allowed_difference_s", "not_computing_s")
        ms = (f"{1e3 * r[key]:.0f} ms" for key in (*keys, "driver_cpu_s"))
        yield r["D"], r["spans"], f"{r['in_process_s']:.3f} s", f"{r['cluster_s']:.3f} s", *ms


@as_table("D|reading / computing|all rows cached|no rows cached|no rows / all rows cached|choice of the fit")
def kept_rows() -> Iterable[Iterable[Any]]:
    for r in read("streamed_pass")["kept"]:
        times, again = (f"{r[key]:.3f} s" for key in ("kept_s", "read_again_s")), r["read_again / kept"]
        yield (
            f"{r['D']:.0f}",
            f"{r['reading_over_computing']:.3f}",
            *times,
            f"{again:.2f}",
            f"{r['default_s']:.3f} s",
        )


def format_scores(found: dict[str, Any] | None, *, spread: bool = True, decays: Iterable[float] = ()) -> str:
    """Return NMI and accuracy as text, with standard deviations if ``spread``, and the chosen decays."""
    if found is None:
        return ""
    scores = " / ".join(
        f"{found[key]:.1f}" + (f" ± {found[f'{key}_spread']:.1f}" if spread else "")
        for key in ("nmi", "accuracy")
    )
    chosen = ", ".join(f"{decay:g}".lstrip("0") for decay in sorted(set(decays)))
    return scores + (f" ({chosen})" if chosen else "")


def format_widths(found: dict[str, Any] | None) -> tuple[str, str]:
    """Return two cells, here and in the paper: NMI of spectral clustering with a fixed and the best width."""
    if found is None:
        return "", ""
    ours = tuple(found[width]["nmi"] for width in ("fixed", "best"))
    return tuple("{:.1f} / {:.1f}".format(*pair) for pair in (ours, found["paper"]))


def format_paper(found: dict[str, Any] | None, column: str) -> str:
    """Return NMI and accuracy from the tables of the paper as text; ``column`` is a column, such as "mbn"."""
    if found is None or column not in found["nmi"]:
        return ""
    keys = {"nmi": found["nmi"], "accuracy": found["accuracy"]}
    return format_scores(
        {key: of[column] for key, of in keys.items()}
        | {f"{key}_spread": of[f"{column}_spread"] for key, of in keys.items()}
    )


@as_table(
    "set (seeds; seeds of the best decay)|raw features|PCA, 98 % of the variance"
    "|spectral, NMI: fixed / best width|paper|decay .5|paper"
    "|best decay|paper's best"
    '|`decay="auto"`'
)
def clustering() -> Iterable[Iterable[Any]]:
    found = read("mbn_clustering")
    for key, name in CLUSTERED.items():
        r = found[key]
        best, auto, seeds = r["best"], r["auto"], r["default"]["seeds"]
        several = seeds > 1
        yield (
            f"{name} ({seeds}" + (f"; {best['seeds']})" if best["seeds"] != seeds else ")"),
            format_scores(r["raw"], spread=False),
            format_scores(r["pca"], spread=False),
            *format_widths(found["spectral"].get(key)),
            format_scores(r["default"], spread=several),
            format_paper(r.get("paper"), "mbn"),
            format_scores(best, spread=several, decays=[best["decay"]]),
            format_paper(r.get("paper"), "best"),
            format_scores(auto, spread=several, decays=auto["chosen"][:seeds]),
        )


@as_table(
    "set (seeds)|rows, features|4 pools|10|20|40|80|no pools|time of the first layer: 40 pools / no pools"
)
def pools() -> Iterable[Iterable[Any]]:
    sizes = {"wine": "178, 13", "thyroid": "215, 5", "umist": "575, 10,304", "digits": "1,797, 64"}
    sizes |= {"coil20": "1,440, 1,024", "isolet1": "1,560, 617", "mnist5000": "5,000, 784"}
    sizes |= {"mnist20000": "20,000, 784", "mnist": "70,000, 784", "documents": "4,000, 2,000"}
    for name, found in read("mbn_pools").items():
        runs, means = found["runs"], found["mean_nmi"]
        seconds = {
            g: sum(run["first_layer_seconds"] for run in own.values()) / max(1, len(own))
            for g, own in runs.items()
        }
        ratio = f"{seconds['40'] / seconds['paper']:.2f}" if runs.get("40") and runs.get("paper") else "-"
        shown_means = (
            f"{means[g]:.1f}" if g in means else "-" for g in ("4", "10", "20", "40", "80", "paper")
        )
        yield f"{name} ({len(runs.get('40', {}))})", sizes[name], *shown_means, ratio


@as_table(
    'set (seeds)|decay .5|`decay="auto"`|.3, .5 and .7 together|nine together|three by agreement'
    "|three by similarity|best by labels"
)
def ensembles() -> Iterable[Iterable[Any]]:
    for name, found in read("mbn_ensemble").items():
        ways = ("0.5", "auto", "three", "nine", "agreement", "similarity", "best")
        yield f"{name} ({len(found['runs'])})", *(f"{found['mean_nmi'][way]:.1f}" for way in ways)


@as_table("set|NMI at .5|accuracy at .5|NMI at the best decay|accuracy at the best decay")
def from_the_paper() -> Iterable[Iterable[Any]]:
    found = read("mbn_clustering")
    for key, name in CLUSTERED.items():
        r = found[key]
        paper = r.get("paper", {})
        if r["default"]["seeds"] > 1 and paper:
            yield (
                name,
                *(
                    f"{(r[ours][of] - paper[of][theirs]) / paper[of][f'{theirs}_spread']:+.1f}"
                    for ours, theirs in (("default", "mbn"), ("best", "best"))
                    for of in ("nmi", "accuracy")
                ),
            )


@as_table("clusterings V|5|10|25|50|100|200|400|LSA, 28 components")
def few_clusterings() -> Iterable[Iterable[Any]]:
    nmi = read("choosing")["clusterings"]["nmi"]
    pairs = (
        ", ".join(f"{100 * nmi[f'V = {v}, seed {seed}']:.1f}" for seed in (0, 1))
        for v in (5, 10, 25, 50, 100, 200, 400)
    )
    yield "NMI, %", *pairs, f"{100 * nmi['LSA']:.1f}"


@as_table("output|first document|first 15|first 255")
def retrieval() -> Iterable[Iterable[Any]]:
    curves = read("mbn_retrieval")["curves"]
    for name in (
        "LSA, 5 components",
        "MBN, k1 = 500, 5 components",
        "MBN, k1 = 2,000, 5 components",
        "MBN, k1 = 2,000, codes",
        "counts, cosine",
        "LSA, 125 components",
    ):
        at = dict(zip(curves[name]["levels"], curves[name]["accuracy"], strict=True))
        yield name, *(f"{at[level]:.1f}" for level in (1, 15, 255))


@as_table("nearest of k centroids|rate / sgemm of the same shapes|rate / faiss `IndexFlatL2.search(x, 1)`")
def nearest() -> Iterable[Iterable[Any]]:
    for r in read("mbn_kernels")["dense"]:
        yield f"{r['k']:,}", f"{r['share of sgemm']:.2f}", f"{r['times faiss']:.2f}"


def read_layers() -> list[dict[str, Any]]:
    wanted = ("clusterings below", 400), ("clusterings at once", 8)
    found = [r for r in read("mbn_kernels")["codes"] if all(r[key] == value for key, value in wanted)]
    return [r for r in found if r["k below"] in (8000, 4000, 2000, 1000, 500, 250, 125, 62)]


@as_table("upper layer, k below to k|8,000 to 4,000|4,000|2,000|1,000|500|250|125|62 to 31")
def upper_layers() -> Iterable[Iterable[Any]]:
    yield "ns per look-up", *(f"{r['ns a look-up']:.1f}" for r in read_layers())
    name = "times faster than one-hot products"
    yield "rate / one-hot products in sgemm", *(format_three_figures(r[name]) for r in read_layers())


@as_table("rows|V, k1|layers|seconds|time per row / time of one process|peak of a worker")
def network_million() -> Iterable[Iterable[Any]]:
    found = read("mbn_million")
    for key, name in {"digits": "infinite digits", "documents": "documents, CSR"}.items():
        r = found[key]
        yield (
            f"{r['rows']:,} {name} ({r['dataset_mib']} MiB)",
            f"32, {r['ks'][0]:,}",
            len(r["ks"]),
            f"{r['seconds']:.0f}",
            f"{r['times_one_process']:.2f}",
            f"{r['peak_worker_mib']:,} MiB",
        )


@as_table("|edge updates/s|")
def propagation() -> Iterable[Iterable[Any]]:
    found = read("crbm_kernels")
    edges, pgmax = found["edges"], found["pgmax"]
    rate = {name: f"{value / 1e9:.1f}e9" for name, value in edges["edges_per_second"].items()}
    threads = f"two threads {rate['two threads']} ({edges['two threads over one']:.2f} times)"
    yield (
        "sum-product",
        f"{rate['sum_product']}; {threads}",
        f"{edges['times the matrix form']:.0f} times the paper's matrix form in numpy with AVX-512, "
        f"{pgmax['the kernel, times faster']:.0f} times PGMax {pgmax['pgmax']} ({pgmax['threads']})",
    )
    cost = f"the last sweep also computes them, for {edges['pair beliefs cost, in sweeps']:.1f} sweeps"
    yield "sum-product and pair beliefs", rate["sum_product and pairs"], cost
    yield (
        "only the two divisions per edge",
        rate["bare divisions"],
        f"{edges['time over that of the bare divisions']:.2f} times as fast as sum-product, "
        "which needs half a division per edge",
    )
    others = "; ".join(rate[name] for name in ("mixed_product", "max_product", "mean_field"))
    yield "mixed-product; max-product; mean field", others, ""


def format_errors(found: dict[str, Any] | None) -> str:
    if found is None or "failed" in found:
        return ""
    paper = found.get("paper")
    own = f"{found['all']:.2f} / {found['changed']:.1f}"
    return own + (f" ({paper['all']:.2f} / {paper['changed']:.1f})" if paper else "")


@as_table("learner|" + "|".join(TASKS.values()))
def learners() -> Iterable[Iterable[Any]]:
    found = read("crbm_mnist")
    for learner in dict.fromkeys(name.split("/")[-1] for name in found):
        for prefix in ("", "full/"):
            results = [found.get(f"{prefix}{task}/{learner}") for task in TASKS]
            kind = ", 50 epochs" if prefix else ""
            if any(r and r.get("from_logistic") for r in results):
                kind = ", from logistic regression"
            cells = [format_errors(r) for r in results]
            if any(cells):
                yield learner + kind, *cells


@as_table("task|learner|random weights, 5 epochs|random weights, longer|logistic regression|paper")
def crbm_starts() -> Iterable[Iterable[Any]]:
    """Yield errors by the start of a fit."""
    found, longer = read("crbm_mnist"), read("crbm_starts")
    for task, name in TASKS.items():
        for learner in ("cd-1", "cd-10", "cd-percloss"):
            part = f"full/{task}/{learner}"
            if part not in found:
                continue
            results = found[f"{task}/{learner}"], longer.get(part), found[part], found[part]["paper"]
            cells = ["" if r is None else f"{r['all']:.2f} / {r['changed']:.1f}" for r in results]
            if part in longer and longer[part].get("init_scale"):
                cells[1] += f", `init_scale={longer[part]['init_scale']}`"
            yield name, learner, *cells


@as_table("task|start of the fit|CD-1: outputs of the row|PCD: chain of the batch|PCD: chain of the row")
def crbm_chains() -> Iterable[Iterable[Any]]:
    for part, found in read("crbm_chains").items():
        task, start = part.split("/")
        names = ("outputs of the row", "chain of the batch", "chain of the row")
        errors = (found["errors"][name] for name in names)
        yield TASKS[task], start, *(f"{r['all']:.2f} / {r['changed']:.1f}" for r in errors)


@as_table(
    "rows per step|default chains|one chain|one chain, `local_steps=16`"
    "|the three with 32 sweeps (mean of 50 epochs)|rate of 2 threads / 1, default chains"
)
def steps() -> Iterable[Iterable[Any]]:
    found = read("crbm_steps")
    share = {
        (r["batch"], r["sweeps"], str(r["chains"]), r["local_steps"]): 100 * r["share_outside"]
        for r in found["share"]
    }
    ways = ("default", None), ("1", None), ("1", 16)
    for r in found["threads"]:
        at = {sweeps: [f"{share[r['batch'], sweeps, *way]:.0f}" for way in ways] for sweeps in (10, 32)}
        yield r["batch"], *(f"{s} %" for s in at[10]), ", ".join(at[32]) + " %", f"{r['speedup']:.2f}"


def read_mixtures(part_name: str) -> dict[str, Any]:
    """Return the results of a part of linear_mixture_paper.py, such as "table2", by data set."""
    found = read("linear_mixture_paper")
    return {
        part.removeprefix(f"{part_name}_"): r for part, r in found.items() if part.startswith(f"{part_name}_")
    }


# Names of data sets in the tables, by their names in linear_mixture_paper.py.
_ROWS = {"usps": "USPS", "mnist16": "MNIST 16 x 16", "mnist28": "MNIST 28 x 28", "usps732": "USPS, 732 rows"}


def format_setting(given: dict[str, Any]) -> str:
    """Return settings of a mixture, or of nearest neighbours, as a short text."""
    if "n_components" not in given:  # Only settings of nearest neighbours lack this key.
        return f"smoothing {given['smoothing']:g}, {len(given['tangents'])} tangents"
    words = [f"k = {given['n_components']}, h = {given['n_dims']}", f"smoothing {given['smoothing']:g}"]
    if given["likelihood"] != "error":
        words.append(given["likelihood"])
    if given["recognition_tangent_weight"]:
        words.append(f"r = {given['recognition_tangent_weight']:g}")
    return ", ".join(words)


@as_table("rows|way|settings|0 %|1 %|5 %|10 % rejected|images per class")
def mixture_errors() -> Iterable[Iterable[Any]]:
    for data, found in read_mixtures("table2").items():
        for way, r in (found | read_mixtures("neighbours").get(data, {})).items():
            if isinstance(r, dict) and "at_rejects" in r:
                errors = map(mean_of, r["at_rejects"].values())
                yield _ROWS[data], way, format_setting(r["settings"]), *errors, f"{r['images_a_class']:,}"


@as_table("rows|h|none, none|none, light|heavy, light|heavy, none|heavy, heavy")
def mixture_tangents() -> Iterable[Iterable[Any]]:
    for data, found in read_mixtures("table1").items():
        name = _ROWS.get(data, data) + (f", {found['rows']:,} rows" if data == "mnist16" else "")
        for size, ways in found.items():
            if size.startswith("n_dims"):
                first, *others = ways.values()
                rest = (f"{mean_of(r['error'])} ({r['p']:g})" for r in others)
                yield name, size.removeprefix("n_dims "), mean_of(first["error"]), *rest


@as_table("rows|k|h|none, none|none, light|heavy, none|heavy, light")
def mixture_search() -> Iterable[Iterable[Any]]:
    for data, r in read_mixtures("search").items():
        lines: dict[Any, list[str]] = {}
        for one in r["candidates"]:
            own = one["params"]
            best = " (chosen)" if own == r["best"] else ""
            line = lines.setdefault((own["n_components"], own["n_dims"]), [])
            line.append(f"{100 * one['held_out']:.2f}{best}")
        for sizes, line in lines.items():
            yield _ROWS[data], *sizes, *line


@as_table(
    "rows|rows that choose|draws|temperature|spread|log-loss of the test rows|log-loss of the worst draw"
)
def mixture_temperature() -> Iterable[Iterable[Any]]:
    for data, r in read_mixtures("temperature").items():
        for rows, of in r["draws"].items():
            losses = (f"{of[key]:.4f}" for key in ("log_loss", "worst_log_loss"))
            spread = f"{100 * of['spread']:.1f} %" if of["draws"] > 1 else ""
            yield _ROWS[data], f"{int(rows):,}", of["draws"], f"{of['temperature']:.3g}", spread, *losses


@as_table("rows|way|h|held-out error|test error|p")
def mixture_ways() -> Iterable[Iterable[Any]]:
    for what in ("extensions", "floors", "dims", "stepwise", "steps"):
        for data, found in read_mixtures(what).items():
            first, *_ = found["ways"]
            for way, r in found["ways"].items():
                h = ", ".join(map(str, r["n_dims"]))
                p = "" if way == first else f"{r['p']:g}"
                yield _ROWS[data], way, h, percent(r["held_out"]), mean_of(r["test"]) + " %", p


@as_table(
    "image|compression: ours, generator's|ratio: median, worst|paper, on its image|kinds found"
    "|images with all kinds; with all kinds placed twice|images shorter than by the true features"
    "|wrong pixels: ours, noisy image"
)
def single_images() -> Iterable[Iterable[Any]]:
    hidden = ("seconds", "nmf")
    found = {name: r for name, r in read("hcn_single").items() if not name.startswith(hidden)}
    for name, r in found.items():
        n, ratio = len(r["fits"]), ", ".join(f"{v:.2f}" for v in r["over_truth"])
        shares = (
            f"{r[key]} of {n}" for key in ("images_with_all_kinds", "images_with_all_kinds_placed_twice")
        )
        wrong, noisy = (
            statistics.median(fit[key] for fit in r["fits"]) for key in ("wrong_pixels", "noisy_pixels")
        )
        yield (
            name,
            f"{r['compression']:.3f}, {r['truth']:.3f}",
            ratio,
            "" if r["paper"] is None else f"{r['paper']:.2f}",
            f"{r['found']} of {r['kinds']}",
            "; ".join(shares),
            f"{r['images_shorter_than_by_true_features']} of {n}",
            f"{wrong:.0f}, {noisy:.0f}",
        )


@as_table(
    "image|ours: compression, CPU seconds|NMF of patches: compression, CPU seconds|kinds found: ours, NMF"
    "|paper, on its image and machine: HCN|paper: NOCA"
)
def single_images_times() -> Iterable[Iterable[Any]]:
    found = read("hcn_single")
    for name, paper in PAPER_SINGLE.items():
        ours, other = found[name], found[f"nmf, {name}"]["fits"]
        seconds, least = statistics.median(found["seconds"][name]), take_median(other, "compression")
        yield (
            name,
            f"{100 * ours['compression']:.0f} %, {seconds:.2g}",
            f"{100 * least:.0f} %, {take_median(other, 'cpu_seconds'):.2g}",
            f"{ours['found']}, {sum(fit['found'] for fit in other)} of {ours['kinds']}",
            *(f"{share} %, {minutes:g} minutes" for share, minutes in paper),
        )


@as_table(
    "image|restarts|images with all kinds|kinds found"
    "|missed kinds in images shorter than by the true features"
)
def restarts() -> Iterable[Iterable[Any]]:
    found = read("hcn_single")
    kinds = ("symbols", "letters", "noisy letters")
    for name in (f"{kind}{border}" for kind in kinds for border in ("", ", border of 2")):
        for starts in (10, 40):
            r = found.get(name if starts == 10 else f"{name}, {starts} restarts")
            if r is None:
                continue
            missed = [(f["kinds"] - f["found"], f["compression"] <= f["true_features"]) for f in r["fits"]]
            all_kinds = f"{r['images_with_all_kinds']} of {len(missed)}"
            shorter = f"{sum(n for n, short in missed if short)} of {sum(n for n, _ in missed)}"
            yield name, starts, all_kinds, f"{r['found']} of {r['kinds']}", shorter


def take_median(fits: list[dict[str, Any]], key: str) -> float:
    return statistics.median(fit[key] for fit in fits)


@as_table(
    "p01, p10 of the images|error: median, worst"
    "|images with another class than at 0.001, 0.001: median, worst"
)
def traits_read() -> Iterable[Iterable[Any]]:
    seeds = list(read("hcn_traits")["read"].values())
    for name in seeds[0]["errors"]:
        shares = ([one[key][name] for one in seeds] for key in ("errors", "changed"))
        yield name, *(f"{percent(statistics.median(of), 1)}, {percent(max(of), 1)}" for of in shares)


@as_table("images|letters found: median, fewest|seeds with all|compression / generator's compression")
def letters_online() -> Iterable[Iterable[Any]]:
    found = read("hcn_online")
    ways = dict(found["five"]["ways"])
    ways[f"26 letters: {found['alphabet']['rows']:,} images, once"] = found["alphabet"]
    for name, r in ways.items():
        letters = f"{r['found']['median']:g}, {r['found']['least']} of {r['kinds']}"
        yield name, letters, f"{r['seeds_with_all']} of {len(r['fits'])}", f"{r['over_truth']:.2f}"


@as_table("two traits|seeds|error: median, worst|paper's error|fits with restarts|weights on in each layer")
def two_traits() -> Iterable[Iterable[Any]]:
    found = read("hcn_traits")
    kinds = {
        "clusters": ("clusters, no labels", 0.006),
        "supervised": ("all labels", 0.0007),
        "few": ("4 of 100 labelled", None),
        **{part: (f"clusters, {part}", None) for part in found if part.endswith(" leaves")},
    }
    for part, (name, paper) in kinds.items():
        fits = list(found[part].values())
        errors = [fit["test_error"] for fit in fits]
        on = [fit["weights_on"] for fit in fits]
        yield (
            name,
            len(fits),
            f"{percent(statistics.median(errors))}, {percent(max(errors))}",
            "" if paper is None else percent(paper),
            f"{sum(fit['restarts'] > 0 for fit in fits)}",
            ", ".join(f"{min(layer)} - {max(layer)}" for layer in zip(*on, strict=True)),
        )


@as_table(
    "training pixels flipped|seeds|compositional: median, worst|convolutional of the same form|standard"
)
def flipped_traits() -> Iterable[Iterable[Any]]:
    for part, seeds in read("hcn_traits").items():
        if part.startswith("flips "):
            errors = [fit["errors"] for fit in seeds.values()]
            cells = []
            for name in ("compositional", "same form", "standard"):
                of = [reported[name] for reported in errors]
                cells.append(f"{percent(statistics.median(of))}, {percent(max(of))}")
            yield f"{100 * float(part.removeprefix('flips ')):g} %", len(errors), *cells


@as_table(
    "hidden halves|seeds|filled pixels within 1 of a true one: median, lowest"
    "|hidden pixels within 1 of a filled"
)
def hidden_traits() -> Iterable[Iterable[Any]]:
    fits = list(read("hcn_traits")["filled"].values())
    cells = []
    for key in ("filled_near_a_true_pixel", "hidden_near_a_filled_pixel"):
        shares = [fit[key] for fit in fits]
        cells.append(f"{percent(statistics.median(shares), 1)}, {percent(min(shares), 1)}")
    yield "1,000 test images", len(fits), *cells


@as_table("400 digits|clean|flips|border|patches|grid|line clutter|deletion|mean of the six")
def corrupted_digits() -> Iterable[Iterable[Any]]:
    found = read("hcn_digits") | read("hcn_digits_more")
    kinds = {
        f"network, {how}": [fit["errors"] for fit in found[part].values()]
        for part, how in READ_BY.items()
        if part in found
    }
    for name, fit in found.items():
        if name.startswith("rival "):
            kinds[f"{name.removeprefix('rival ')} ({fit['setting']})"] = [fit["errors"]]
    for name, errors in kinds.items():
        yield name, *(over_seeds([e[key] for e in errors]) for key in errors[0])


# Parts of results/hcn_digits.json and hcn_digits_more.json that two tables describe, and their names there.
READ_BY = {
    "hcn": "forward passes",
    "hcn, 64 features of 26 x 26": "forward passes, 64 features of 26 x 26",
}


def format_spread(values: list[float]) -> str:
    """Return the median as text and, for several values, the smallest and the largest value."""
    reported = f"{statistics.median(values):,.4g}"
    return reported if len(values) == 1 else f"{reported} ({min(values):,.4g} - {max(values):,.4g})"


@as_table(
    "network|used features|weights per feature|used templates|weights per template|"
    "edges / edges of a digit|training error|CPU ms per image"
)
def digit_templates() -> Iterable[Iterable[Any]]:
    found = read("hcn_digits") | read("hcn_digits_more")
    for part, how in READ_BY.items():
        if part in found:
            fits = list(found[part].values())
            sizes = (
                format_spread([r[key] for r in fits])
                for key in (
                    "features_used",
                    "weights_of_a_used_feature",
                    "templates_used",
                    "weights_of_a_used_template",
                    "edges_drawn_over_those",
                )
            )
            times = [r["cpu_milliseconds_an_image"] for r in fits if "cpu_milliseconds_an_image" in r]
            errors = over_seeds([r["training_error"] for r in fits])
            yield how, *sizes, errors, format_spread(times) if times else ""


@as_table("digits per class|error|edges / edges of a digit")
def more_digits() -> Iterable[Iterable[Any]]:
    for fit in read("hcn_digits_more")["more"].values():
        for name, r in fit.items():
            yield name.split()[0], percent(r["test_error"], 2), r["edges_drawn_over_those"]


@as_table("seeds|images with both digits right|digits right|digits within two pixels of their place")
def digits_side_by_side() -> Iterable[Iterable[Any]]:
    fits = list(read("hcn_digits_more")["objects"].values())
    names = ("both_right", "right", "within_two_pixels")
    yield len(fits), *(over_seeds([r[name] for r in fits]) for name in names)


@as_table("templates learned with p01, p10|images read with p01, p10|error of 2,000 held-out digits")
def noise_after_learning() -> Iterable[Iterable[Any]]:
    seeds = list(read("hcn_digits_more")["noise"].values())
    for name in seeds[0]:
        learned_by, read_by = (part.split(" by ")[1] for part in name.split("; "))
        yield learned_by, read_by, over_seeds([one[name] for one in seeds])


@as_table(
    "training set, online|epochs by default|compression after one epoch|after the default|"
    "after twice the default"
)
def online_epochs() -> Iterable[Iterable[Any]]:
    for name, r in read("hcn_epochs").items():
        ends = 0, r["default_epochs"] - 1, 2 * r["default_epochs"] - 1
        values = (", ".join(f"{one[end]:.3f}" for one in r["compression"]) for end in ends)
        yield name, r["default_epochs"], *values


@as_table("templates learned with|weights per template|edges / edges of a digit|error of 400 held-out digits")
def thinner_templates() -> Iterable[Iterable[Any]]:
    seeds = list(read("hcn_digits")["thin"].values())
    for noise in seeds[0]:
        found = [seed[noise] for seed in seeds]
        keys = ("weights_of_a_template", "edges_drawn_over_those")
        sizes = (statistics.median(r[key] for r in found) for key in keys)
        yield noise, *sizes, over_seeds([r["held_out_error"] for r in found])


@as_table("network|error of 400 held-out digits")
def digit_layers() -> Iterable[Iterable[Any]]:
    seeds = list(read("hcn_digits")["layers"].values())
    for name in seeds[0]:
        yield name, over_seeds([one[name] for one in seeds])


@as_table(
    "grey traits|images|filters|p01, p10|seeds|traits that are a feature"
    "|error of four patterns: median, worst|weights on; changed in the last ten passes"
)
def grey_traits() -> Iterable[Iterable[Any]]:
    kinds: dict[tuple[Any, ...], list[Any]] = {}
    for r in read("hcn_gray").values():
        how = not r["labels"], r["images"], r["filters"], r["filter_size"], r["p01"], r["p10"]
        kinds.setdefault(how, []).append(r)
    for (unlabelled, images, filters, size, p01, p10), fits in sorted(kinds.items()):
        own = [sum(bool(of) for of in r["features_of_traits"].values()) for r in fits]
        errors = [r["test_error"] for r in fits]
        yield (
            "no labels" if unlabelled else "labels of the four patterns",
            images,
            f"{filters} of {size} x {size}",
            f"{p01}, {p10}",
            len(fits),
            f"{', '.join(map(str, own))} of 4",
            f"{percent(statistics.median(errors), 1)}, {percent(max(errors), 1)}",
            ", ".join(f"{sum(r['weights_on'])}; {r['weights_changed']}" for r in fits),
        )


@as_table(
    "features|features that pay|compression of test images|places per image|error from places"
    "|error from pixels"
)
def digit_parts() -> Iterable[Iterable[Any]]:
    for r in read("hcn_mnist").values():
        n, size = r["features"]
        reported = f"{n} of {size} x {size}, {r['images']:,} images"
        errors = (percent(r[f"error_from_{what}"]) for what in ("places", "pixels"))
        yield (
            reported,
            r["features_used"],
            percent(r["compression_test"], 1),
            r["placed_in_a_test_image"],
            *errors,
        )


@as_table("24 x 24, 32 features of 8 x 6; 14 x 14, 5 of 6 x 6|pairs/s|")
def parts_sweeps() -> Iterable[Iterable[Any]]:
    found = read("hcn_kernels")
    sizes = [r for r in found.values() if isinstance(r, dict) and "pairs_per_second" in r]
    time, rate, two = (
        "time without messages over that of the bare loop",
        "rate with messages over that without",
        "two threads over one",
    )
    reported = {
        "without messages": (time, "of the bare loop's time"),
        "with messages": (rate, "of the rate without"),
        "two threads, without messages": (two, "times one thread"),
    }
    for name in sizes[0]["pairs_per_second"]:
        rates = "; ".join(f"{r['pairs_per_second'][name]:.1e}" for r in sizes)
        key, words = reported.get(name, ("", ""))
        yield name, rates, "; ".join(f"{r[key]:.2f}" for r in sizes) + f" {words}" if key else ""


@as_table("operations of several layers|milliseconds|ratio|to")
def parts_layers() -> Iterable[Iterable[Any]]:
    found = read("hcn_layers")
    r, reported = found["pieces"], found["pieces"]["milliseconds"]
    both = reported["ORs and pools, up"] + reported["ORs and pools, down"]
    trees = reported["trees of places and weights"]
    yield "ORs and pools, up and down", f"{both:.2f}", f"{r['ORs and pools over trees']:.2f}", "of the trees"
    yield "trees of places and weights", f"{trees:.2f}", "", ""
    times = r["trees to what they make over the bare loop"], r["a forward pass over its products"]
    yield (
        "trees to what they make",
        f"{reported['trees to what they make']:.2f}",
        f"{times[0]:.2f}",
        "a bare loop",
    )
    forward = f"{reported['a forward pass']:.2f}"
    yield "a forward pass", forward, f"{times[1]:.2f}", "its convolutions as matrix products"
    r = found["cluster"]
    name = f"{r['rows']:,} digits online, two workers"
    seconds = f"{1000 * r['seconds of two workers']:,.0f}"
    yield name, seconds, f"{r['of their rate']:.2f}", "of the rate of two threads, same bits"


@as_table(
    "64 features, 32 templates per class|p_weight|digits, leaves|passes|size at 8 bytes per pair|"
    "largest size of a pass|bytes per pair|run folder: measured, predicted|peak memory: measured, predicted"
)
def kept_messages() -> Iterable[Iterable[Any]]:
    for r in read("hcn_layers")["kept"]:
        weights = ", ".join(f"{p:g}" for p in r["p_weight"])
        sizes = f"{r['eight bytes a pair, gb']:.1f} GB", f"{r['kept gb']:.2f} GB"
        folder = f"{r['run folder gb']:.1f}, {r['run folder predicted gb']:.1f} GB"
        peak = f"{r['peak gb']:.1f}, {r['peak predicted gb']:.1f} GB"
        digits = f"{r['digits']}, {r['leaves']}"
        yield (
            r["features"],
            weights,
            digits,
            r["passes"],
            *sizes,
            f"{r['kept bytes a pair']:.2f}",
            folder,
            peak,
        )


@as_table(
    "images, two workers|seconds|seconds / (pairs / rate of two threads)|letters found|peak of a worker"
)
def letters_million() -> Iterable[Iterable[Any]]:
    found = read("hcn_million")
    r, tenth, part = found["fit"], found["memory"], found["chains"]
    ratio, peak = f"{r['over_pairs_by_rate']:.2f}", f"{r['peak_worker_mib']} MiB"
    yield f"{r['rows']:,}", f"{r['seconds']:.0f}", ratio, f"{r['letters_found']} of 26", peak
    yield f"{tenth['rows']:,}", "", "", "", f"{tenth['peak_worker_mib']} MiB"
    reported = f"{part['rate_of_in_process']:.2f} of the rate of this process"
    chain = f"{part['rows']:,}, chains of {part['seconds_of_a_chain']:.2f} s"
    yield chain, f"{part['cluster_seconds']:.0f}", reported, "", ""
    peaks = found["flat"]["peak_worker_mib"]
    sizes = "; ".join(f"{int(rows):,}" for rows in peaks)
    yield f"{sizes}, small buffers", "", "", "", "; ".join(map(str, peaks.values())) + " MiB"


@as_table("way|letters found of three, five seeds|compression|iterations")
def parts_peers() -> Iterable[Iterable[Any]]:
    found = read("hcn_peers")
    rates = found.get("pairs_per_second", {})  # The benchmark writes rates only with --timings.
    for way, fits in found["ways"].items():
        name = way + (f", {rates[way]:.1e} pairs/s" if way in rates else "")
        columns = ([fit[key] for fit in fits] for key in ("letters", "compression", "iterations"))
        letters, lengths, iterations = columns
        n = ", ".join(map(str, sorted(set(iterations))))
        yield name, ", ".join(map(str, letters)), ", ".join(f"{c:.2f}" for c in lengths), n


@as_table("rows|likelihood|components|h|training rows|test rows, nats per row")
def mixture_likelihood() -> Iterable[Iterable[Any]]:
    for part, found in read("linear_mixture_density").items():
        for r in found if part.startswith("likelihood") else ():
            sizes = r["likelihood"], r["n_components"], r["n_dims"]
            yield _ROWS["mnist" + part[-2:]], *sizes, f"{r['train']:.1f}", f"{r['test']:.1f}"


@as_table("model|test rows, nats per row")
def mixture_beside() -> Iterable[Iterable[Any]]:
    for r in read("linear_mixture_density").get("beside", ()):
        yield r["model"], " ".join(f"{one:.1f}" for one in r["test"])


@as_table("work|size|measured|ratio")
def mixture_kernels() -> Iterable[Iterable[Any]]:
    found = read("linear_mixture_kernels")
    for r in found["scan"]:
        yield (
            "scan",
            f"p = {r['p']}, {r['columns']:,} columns",
            f"{r['GF/s']:.0f} GF/s",
            f"{r['share']:.2f} of sgemm",
        )
    for r in found["images"]:
        size = f"p = {r['p']}, {r['rows a group']} rows per group"
        for work in ("images", "six tangents"):
            yield work, size, "", f"{r[f'{work}, times their products']:.2f} x their products"
    for r in found["distance"]:
        size = f"p = {r['p']}, K = {r['K']:,}"
        yield "tangent distance", size, f"{r['rows/s']:,.0f} rows/s", f"{r['times']:.2f} x without"


@as_table("fit|size|measured|ratio")
def mixture_fits() -> Iterable[Iterable[Any]]:
    found = read("linear_mixture_fit")
    for r in found["pass"]:
        share = (
            f"{r['times its products']:.2f} x its products; M-step {r['M-step, share of both']:.2f} of both"
        )
        more = f"; six tangents {r['six tangents, times their products']:.2f} x theirs"
        yield "a pass", f"p = {r['p']}, K = {r['K']:,}", f"{r['rows/s']:,.0f} rows/s", share + more
    for r in found["threads"]:
        yield "two threads", f"p = {r['p']}, K = {r['K']:,}", "", f"{r['times']:.2f} x one"
    for r in found["fits"]:
        took = f"{r['seconds']:.1f} s, {r['passes']} passes"
        yield (
            f"fit of {r['rows']}",
            f"K = {r['K']:,}",
            took,
            f"{r['at the rate of sgemm']:.2f} s at sgemm's rate",
        )
    for r in found["recognition"]:
        rates = f"{r['rows/s, tangent distance']:,.0f} rows/s"
        yield "prediction by tangent distance", f"K = {r['K']:,}", rates, f"{r['times']:.2f} x without"
    for r in found["wide"]:
        share = r["share of its products' rate"]
        yield (
            "a pass",
            f"p = {r['p']:,}, K = {r['K']}",
            f"{r['rows/s']:,.0f} rows/s",
            f"{share:.2f} of its products' rate",
        )
    for r in found["row"]:
        size = f"{r['model']}, p = {r['p']}, K = {r['K']}"
        yield "`partial_fit` of a row", size, f"{r['ms a row']:.2f} ms", ""


@as_table("other method|rows|times as fast|log-likelihood per row, or mean square: ours; theirs")
def mixture_peers() -> Iterable[Iterable[Any]]:
    found = read("linear_mixture_peers")
    for p, r in found["gaussian"].items():
        reported = r["log-likelihood of test rows"]
        name = f"GaussianMixture(10, 'full'), a pass, p = {p}"
        yield name, f"{r['rows']:,}", f"{r['times']:.0f}", f"{reported['ours']:.0f}; {reported['theirs']:.0f}"
    if "mfa" in found:
        r = found["mfa"]
        reported = "; ".join(f"{sum(of) / len(of):.1f}" for of in r["log-likelihood"].values() if of)
        yield "torch-mfa, 50 models of 6, a pass", f"{r['rows']:,}", f"{r['times']:.0f}", reported
    r = found["factors"]
    for solver in ("randomized", "lapack"):
        times = r["seconds"][solver] / r["seconds"]["ours"]
        reported = r["log-likelihood"]
        name = f"FactorAnalysis, {solver}, p = {r['p']}"
        yield name, f"{r['rows']:,}", f"{times:.1f}", f"{reported['ours']:.2f}; {reported[solver]:.2f}"
    r = found["kmeans"]
    for name, ours in (("KMeans", "n_dims=0"), ("MiniBatchKMeans", "n_dims=0, stepwise")):
        times, reported = r["seconds"][name] / r["seconds"][ours], r["mean square"]
        yield (
            f"{name}, a fit",
            f"{r['rows']:,}",
            f"{times:.1f}",
            f"{reported[ours]:.2f}; {reported[name]:.2f}",
        )
    r = found["numpy"]
    yield f"plain numpy, a pass, K = {r['K']}", f"{r['rows']:,}", f"{r['times']:.1f}", ""


@as_table("sub-classes, memory of two workers|rows|passes|peak of a worker|predicted peak")
def mixture_peaks() -> Iterable[Iterable[Any]]:
    for part, r in read("linear_mixture_million").items():
        if part.startswith("scale"):
            for i, rows in enumerate(r["rows"]):
                sizes = (f"{r[name][i]} MiB" for name in ("peak_worker_mib", "planned_mib"))
                kept = "" if r.get("cache") is None else f", cache {r['cache']}"
                which = part.removeprefix("scale, ").partition(",")[0]
                yield f"{which}, {r['memory_limit']}{kept}", f"{rows:,}", r["passes"][i], *sizes


@as_table(
    "sub-classes per class|rows|error of rows 50000:60000|error of test rows|passes|seconds per pass"
    "|read|peak of a worker"
)
def mixture_million() -> Iterable[Iterable[Any]]:
    kept = {part: r for part, r in read("linear_mixture_million").items() if "k = " in part}
    for part, r in sorted(kept.items(), key=lambda item: (item[0][0] != "k", int(item[0].split()[-1]))):
        size, _, k = part.rpartition("k = ")
        for rows, of in ((50_000, r["of 50,000 rows"]), (r["rows"], r["of all"])):
            errors = []
            for key in ("validation_error", "test_error"):
                by_tangents = of.get(f"{key}_tangent_distance")
                more = "" if by_tangents is None else f"; {100 * by_tangents:.2f} % by tangent distance"
                errors.append(f"{100 * of[key]:.2f} %{more}")
            costs = ("", "", "")
            if "gb_read" in of:
                seconds = f"{of['median_seconds_a_pass']:.1f}" if "median_seconds_a_pass" in of else ""
                costs = seconds, f"{of['gb_read']:.1f} GB", f"{of['peak_worker_mib']} MiB"
            yield k + (f", {size.strip(', ')}" if size else ""), f"{rows:,}", *errors, of["passes"], *costs


@as_table("sub-classes|seconds per pass: two threads|two workers|rate of workers / threads")
def mixture_rates() -> Iterable[Iterable[Any]]:
    for part, r in read("linear_mixture_million").items():
        if part.startswith("rates"):
            seconds = (f"{r[name]:.2f}" for name in ("seconds in process", "seconds of the workers"))
            yield part.split()[1], *seconds, f"{r['of its rate']:.2f}"


@as_table("loop|workers|unit|tasks per unit|messages per unit|scheduler, ms|driver, ms")
def simulated_loops() -> Iterable[Iterable[Any]]:
    for part, r in read("simulated_cluster").items():
        name = {"batch": "batch", "paced": "batch, spans of 1 s", "map": "map", "online": "online"}
        loop = part.split()[0]
        if loop == "online":
            pieces, what = r["steps"], f"a step of {r['chains']} chains"
            what = "a step, all on one worker" if r["chains"] == 1 else what
        else:
            pieces, what = r.get("spans", r.get("shards")), "a shard" if loop == "map" else "a span"
        beats = r["idle_scheduler_share"] * r["seconds_per_pass"]
        of_scheduler = 1e3 * (r["scheduler_cpu_seconds_per_pass"] - beats) / pieces
        of_driver = r["driver_cpu_ms_per_task"] * r["tasks_per_pass"] / pieces
        counts = (f"{r[key] / pieces:.3g}" for key in ("tasks_per_pass", "messages_per_pass"))
        yield name[loop], f"{r['workers']:,}", what, *counts, f"{of_scheduler:.2f}", f"{of_driver:.2f}"


@as_table("way, clusters|NMI|accuracy")
def mixture_clusters() -> Iterable[Iterable[Any]]:
    for part, ways in read("linear_mixture_density").items():
        for way, r in ways.items() if part.startswith("clusters") else ():
            yield way, mean_of(r["nmi"]), mean_of(r["accuracy"])


@as_table(
    "job|predicted time|measured time|predicted / measured|predicted peak|measured peak|predicted / measured"
)
def plans() -> Iterable[Iterable[Any]]:
    for name, r in read("plan_accuracy")["jobs"].items():
        took = f"{r['seconds']:.1f} s ({r['cpu_seconds']:.1f} s of CPU)"
        reported, peaks = (
            f"{r['told_seconds']:.1f} s",
            (to_mib(r["told_peak_bytes"]), to_mib(r["peak_bytes"])),
        )
        yield name, reported, took, f"{r['time_ratio']:.2f}", *peaks, f"{r['peak_ratio']:.2f}"


@as_table(
    "file|reading, MB/s|reading, hashing and packing, MB/s|import, MB/s"
    "|peak of one and of four times the rows, MiB"
)
def importers() -> Iterable[Iterable[Any]]:
    found = {r["kind"]: r for r in read("import_rates")}
    for name, kinds in {
        "idx; gzip": ("idx", "idx gzip"),
        "npy uint8; float32": ("npy", "npy float32"),
        "npz; packed": ("npz", "npz packed"),
        "hdf5; gzip; float32": ("hdf5", "hdf5 gzip", "hdf5 float32"),
        "mat 5; 7; 7.3": ("mat 5", "mat 7", "mat 7.3"),
        "png 28 x 28; jpg 256 x 256; jpg to 64 x 64": ("images png", "images jpg", "images jpg 64"),
        "csr; svmlight": ("csr", "svmlight"),
        "parquet, a column a feature; lists": ("parquet wide", "parquet lists"),
        "csv": ("csv",),
    }.items():
        if not found.keys() >= set(kinds):  # Skip kinds of files that the stored results lack.
            continue
        of = [found[kind] for kind in kinds]
        keys = ("read_mb_s", "read_hash_pack_mb_s", "import_mb_s")
        rates = ("; ".join(f"{r[key]:,.0f}" for r in of) for key in keys)
        peaks = (f"{r['peak_mib']:.0f}, {r['peak_mib_4_times_larger']:.0f}" for r in of)
        yield name, *rates, "; ".join(peaks)


@as_table("ten passes of a fit from S3|seconds|rate|503s, resets, slow answers|weights")
def s3_troubled() -> Iterable[Iterable[Any]]:
    r = read("s3_pass")["troubled"]
    yield "the server alone", r["alone_s"], f"{r['alone_mb_per_s']:.0f} MB/s", "none", ""
    troubles = ", ".join(str(r[f"times {what}"]) for what in ("503", "reset", "slow"))
    same = "the same bits" if r["same_bits"] else "other bits"
    yield "through the proxy", r["troubled_s"], f"{r['troubled_mb_per_s']:.0f} MB/s", troubles, same


@as_table(
    "set|rows x features|capsules|multiclass|capsules of the paper|linear mixtures|logistic regression"
    "|3 neighbours|RBF SVM"
)
def defaults() -> Iterable[Iterable[Any]]:
    for line in read("defaults")["errors"]:
        spread = line["splits"] > 1
        cells = (
            f"{m['error']:.1f}" + (f" ± {m['deviation']:.1f} %" if spread else " %")
            for m in line["models"].values()
        )
        yield line["set"], " x ".join(f"{size:,}" for size in line["shape"]), *cells


@as_table(
    "set|classes|error, %: multiclass, one_vs_all, all_vs_all|calibration error, %|CPU seconds of a fit"
)
def defaults_architectures() -> Iterable[Iterable[Any]]:
    digits = {"error": 1, "calibration_error": 1, "fit_seconds": 2}
    for line in read("defaults")["architectures"]:
        models = line["models"].values()
        cells = (", ".join(f"{m[key]:.{n}f}" for m in models) for key, n in digits.items())
        yield line["set"], line["classes"], *cells


@as_table("set|capsules: default|capsules: searched|linear mixtures: default|linear mixtures: searched")
def defaults_found() -> Iterable[Iterable[Any]]:
    for line in read("defaults")["best"]:
        errors = ((model["default"], model["found"]) for model in line["models"].values())
        yield line["set"], *(f"{error:.1f} %" for pair in errors for error in pair)


@as_table("set|test error|calibration error: validation rows choose|training rows choose|temperature 1")
def defaults_calibration() -> Iterable[Iterable[Any]]:
    for line in read("defaults")["calibration"]:
        hows = [line[how] for how in ("validation rows", "training rows", "temperature 1")]
        errors = (f"{how['calibration_error']:.1f} %" for how in hows)
        yield line["set"], f"{hows[1]['test_error']:.1f} %", *errors


@as_table(
    "set|capsules: mean excess|largest|multiclass: mean excess|largest|linear mixtures: mean excess|largest"
)
def defaults_subsets() -> Iterable[Iterable[Any]]:
    for line in read("defaults")["subsets"]:
        points = ((m["mean_excess"], m["largest_excess"]) for m in line["models"].values())
        yield line["set"], *(f"{value:.1f}" for pair in points for value in pair)


@as_table("set|reconstruction error|factor analysis|default|RBF SVM")
def defaults_likelihoods() -> Iterable[Iterable[Any]]:
    for line in read("defaults")["likelihoods"]:
        names = ("error", "factor analysis", "default", "RBF SVM, standardised")
        yield line["set"], *(f"{line[name]['error']:.1f} %" for name in names)


@as_table("set|bootstrap network|k-means|spectral clustering")
def defaults_clusters() -> Iterable[Iterable[Any]]:
    for line in read("defaults")["clusters"]:
        yield line["set"], *(f"{model['nmi']:.1f} %" for model in line["models"].values())


@as_table("set|compositional network, 20 templates|logistic regression|3 neighbours|largest class")
def defaults_parts() -> Iterable[Iterable[Any]]:
    for line in read("defaults")["parts"]:
        yield line["set"], *(f"{model['error']:.1f} %" for model in line["models"].values())


@as_table("task|scalelatent|other methods")
def defaults_others() -> Iterable[Iterable[Any]]:
    found = read("defaults")
    for line in found["densities"]:
        ours, *rivals = (f"{name} {value:.1f}" for name, value in line["models"].items())
        yield f"likelihood, {line['set']}", ours, ", ".join(rivals)
    for part in ("outputs", "documents"):
        for line in found[part]:
            shown_as = {name: f"{name} {model['error']:.1f} %" for name, model in line["models"].items()}
            ours = [text for name, text in shown_as.items() if hasattr(sl, name.split(",")[0])]
            rivals = [text for name, text in shown_as.items() if not hasattr(sl, name.split(",")[0])]
            yield f"errors, {line['set']}", ", ".join(ours), ", ".join(rivals)


# Column names of the methods of rivals.py, by task. The models of this package come first.
RIVALS: dict[str, dict[str, str]] = {
    "classification": {
        "CapsuleRegression": "capsules",
        "CapsuleRegression, all_vs_all": "capsules, all_vs_all",
        "LinearMixtureClassifier": "mixtures",
        "LinearMixtureClassifier, chosen": "mixtures, chosen",
        "logistic regression": "logistic",
        "k nearest neighbours": "k-NN",
        "RBF SVM": "RBF SVM",
        "LightGBM, 20 rounds": "LightGBM, 20 rounds",
        "LightGBM": "LightGBM",
        "MLP": "MLP",
    },
    "density": {
        "LinearMixture": "mixture of PPCA",
        "LinearMixture, factor analysis": "of factor analysers",
        "LinearMixture, chosen": "of PPCA, chosen",
        "GaussianMixture": "GaussianMixture",
        "PCA": "PCA",
        "kernel density": "kernel density",
        "isolation forest": "isolation forest",
    },
    "clustering": {
        "MultilayerBootstrapNetwork": "bootstrap network",
        "MultilayerBootstrapNetwork, decay .5": "decay .5",
        "k-means": "k-means",
        "UMAP + k-means": "UMAP + k-means",
        "spectral clustering": "spectral",
        "HDBSCAN": "HDBSCAN",
    },
    "denoising": {
        "ConditionalRBM": "conditional RBM",
        "ConditionalRBM, 3 epochs": "3 epochs",
        "median filter": "median filter",
        "k nearest neighbours": "k-NN",
        "logistic regression": "logistic",
        "MLP, 256 units": "MLP",
        "U-Net, 3 epochs": "U-Net, 3 epochs",
        "U-Net": "U-Net",
    },
    "labels": {
        "ConditionalRBM": "conditional RBM",
        "ConditionalRBM, 30 epochs": "30 epochs",
        "one-vs-rest logistic regression": "one-vs-rest logistic",
        "classifier chain": "chain",
        "ten classifier chains": "ten chains",
        "k nearest neighbours": "k-NN",
        "MLP, 256 units": "MLP",
    },
    "parts": {
        "HierarchicalCompositionalNetwork, 1 start": "compositional network, 1 start",
        "HierarchicalCompositionalNetwork, 10 starts": "10 starts",
        "NMF": "NMF",
        "dictionary learning": "dictionary learning",
        "dictionary learning, positive": "dictionary, positive",
    },
}


def rivals(task: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the records of a task by data set and method.

    The seeds are those that all methods within the time limit have. Records of exceeded limits are added.
    """
    found = read("rivals")
    sets = dict.fromkeys(part.split("/")[1] for part in found if part.startswith(f"{task}/"))
    out = {}
    for name in sets:
        methods = {m: found[part] for m in RIVALS[task] if (part := f"{task}/{name}/{m}") in found}
        ended = [seeds for seeds in methods.values() if not any("over_seconds" in r for r in seeds.values())]
        common = set.intersection(*map(set, ended)) if ended else set()
        out[name] = {
            method: [r for seed, r in seeds.items() if seed in common or "over_seconds" in r]
            for method, seeds in methods.items()
        }
    return out


def list_rivals(task: str, *keys: str, digits: int = 1) -> Iterable[Iterable[Any]]:
    """Yield the rows of a task's table: mean scores over the seeds, and median CPU seconds."""
    for name, methods in rivals(task).items():
        yield name, *(format_rival(methods.get(method, []), keys, digits) for method in RIVALS[task])


def format_rival(seeds: list[dict[str, Any]], keys: Iterable[str], digits: int) -> str:
    if over := [record["over_seconds"] for record in seeds if "over_seconds" in record]:
        return f"over {max(over)} s"
    means = [
        f"{statistics.mean(values):.{digits}f}"
        for key in keys
        if (values := [record[key] for record in seeds if key in record])
    ]
    if not means:
        return ""
    seconds = statistics.median(record["cpu_seconds"] for record in seeds)
    taken = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}" if seconds >= 0.01 else "< 0.01"
    return f"{' / '.join(means)} ({taken} s)"


def list_rival_columns(task: str) -> str:
    return "|".join(["set", *RIVALS[task].values()])


@as_table(list_rival_columns("classification"))
def rivals_classification() -> Iterable[Iterable[Any]]:
    return list_rivals("classification", "error")


@as_table(list_rival_columns("density"))
def rivals_density() -> Iterable[Iterable[Any]]:
    return list_rivals("density", "log_likelihood")


@as_table(list_rival_columns("density"))
def rivals_outliers() -> Iterable[Iterable[Any]]:
    return list_rivals("density", "auc_class", "auc_mixed")


@as_table(list_rival_columns("clustering"))
def rivals_clustering() -> Iterable[Iterable[Any]]:
    return list_rivals("clustering", "nmi")


@as_table(list_rival_columns("denoising"))
def rivals_denoising() -> Iterable[Iterable[Any]]:
    return list_rivals("denoising", "error", "changed_error", digits=2)


@as_table(list_rival_columns("labels"))
def rivals_labels() -> Iterable[Iterable[Any]]:
    return list_rivals("labels", "error", "f1", digits=2)


@as_table(list_rival_columns("parts"))
def rivals_parts() -> Iterable[Iterable[Any]]:
    return list_rivals("parts", "found")


# Names of predictions in results/gpu_predicted.json, by the text in the first column of the table.
_PREDICTED = {
    "capsule, a block of 65,536 uint8 rows in host memory": "capsule, D = 20, block of 65,536 uint8 rows",
    "capsule, `transform` of a block of 65,536 uint8 rows in host memory": (
        "capsule map, D = 20, block of 65,536 uint8 rows"
    ),
    "mixture, a leaf of 655,360 rows in host memory, K = 1,000": "linear mixture, leaf, rows of the host",
    "capsule, a block of 65,536 uint8 rows from the second pass on (before: rows in host memory)": (
        "capsule, D = 20, 65,536 uint8 rows, pass 2"
    ),
    "capsule, a block of 65,536 rows on the GPU, D = 20, 784 features": (
        "capsule, D = 20, 65,536 rows on the card"
    ),
    "mixture, a leaf of 655,360 rows on the GPU, K = 1,000, 784 features": (
        "linear mixture, leaf of 655,360 rows, K = 1,000"
    ),
    "conditional RBM, a step of 2 chains of 10 rows, 784 x 256 units, 32 sweeps": (
        "crbm step, 2 chains of 10 rows, 32 sweeps"
    ),
    "conditional RBM, a step of 64 chains of 20 rows": "crbm step, 64 chains of 20 rows, 32 sweeps",
    "compositional network online, a sweep of 128 chains of 5 images": "hcn sweep, 128 chains of 5 images",
    "compositional network in batch, a sweep of 128 leaves of 40 images": (
        "hcn batch, 128 leaves of 40 images"
    ),
    "bootstrap network, layer 1: 60,000 rows of 784 bytes, a pool of 16,000 centroids": (
        "mbn layer 1, pool of 16,000, 60,000 uint8 rows"
    ),
    "bootstrap network, layer 2: 60,000 rows, 32 clusterings, k = 2,000": (
        "mbn layer 2, 60,000 rows, 32 clusterings"
    ),
}


@as_table("work|H100: share of the limit before → now|H200|waits before → now")
def gpu_predictions() -> Iterable[Iterable[Any]]:
    content = json.loads((RESULTS / "gpu_predicted.json").read_text(encoding="utf-8"))
    found = {(r["example"], r["card"].split()[0]): r for r in content["predictions"]}
    for work, example in _PREDICTED.items():
        cards = [found[example, card] for card in ("H100", "H200")]
        if example.startswith("hcn sweep"):
            work += f" (now the rate of {content['hcn_cores']:.0f} processor cores)"
        shares = (f"{100 * r['before_share']:.2g} % → {100 * r['after_share']:.2g} %" for r in cards)
        yield work, *shares, f"{cards[0]['before_downloads']} → {cards[0]['after_downloads']}"


def select_rows(name: str, starts: str | None) -> str:
    """Return a table, or only its rows that start with one of the texts in ``starts``, separated by ;."""
    text = TABLES[name]()
    if starts is None:
        return text
    words = tuple(f"| {word.strip()}" for word in starts.split(";"))
    lines = text.splitlines(keepends=True)
    return "".join(lines[:2] + [line for line in lines[2:] if line.startswith(words)])


def describe_source(name: str, part: str | None) -> str:
    """Return the command, machine, date and seed of a file of results, or of one of its parts."""
    content = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    run = content["parts"][part] if part else content
    machine = run["machine"]
    return f"`{run['command']}`; {machine['cpu']}, {machine['date']}, seed {run['seed']}.\n"


def rewrite_page(page: str) -> str:
    """Return the text of a page with its tables, pictures and sources made from results/."""
    page = _PICTURE.sub(lambda found: found[1] + caption(found[2]), page)
    page = _SOURCE.sub(lambda found: found[1] + describe_source(found[2], found[3]), page)
    return _TABLE.sub(lambda found: found[1] + select_rows(found[2], found[3]), page)


def main(arguments: list[str]) -> None:
    """Print tables, or rewrite or check the pages."""
    if arguments == ["--list"]:
        for name, head in HEADS.items():
            print(f"{name}: {head}")
    elif arguments and arguments != ["--check"]:
        for name in arguments:
            if name not in TABLES:
                raise SystemExit(
                    f"there is no table {name!r}; `python benchmarks/tables.py --list` prints the names"
                )
            print(TABLES[name]())
    else:
        for page in PAGES:
            before = page.read_text(encoding="utf-8")
            after = rewrite_page(before)
            if not arguments:
                page.write_text(after, encoding="utf-8")
            elif before != after:
                name = page.relative_to(_ROOT)
                raise SystemExit(f"{name} and benchmarks/results differ: run `python benchmarks/tables.py`")


if __name__ == "__main__":
    main(sys.argv[1:])
