"""Rows and captions of benchmarks/papers.md: the papers' tables and figures, compared with results/.

`python benchmarks/tables.py` writes them into the page. The numbers of the papers are constants in this file,
with their source; the numbers of this package are read from results/.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import log
from typing import Any

from common import RESULTS
from table_text import CLUSTERED, TABLES, TASKS, as_table, mean_of, percent, read

# Column names of the tables, separated by |.
COLUMNS = "in the paper|content|the paper|here|command in `benchmarks/`"
# Rows of a table; a row has one text per column of COLUMNS.
Rows = Iterable[tuple[str, str, str, str, str]]

# Test errors in Saul (2021): MNIST and Fashion-MNIST with d = 2, and a million distorted digits with d = 16.
CAPSULE_MNIST, CAPSULE_FASHION, CAPSULE_MILLION = 0.0621, 0.1514, 0.0138
# Lázaro-Gredilla et al. (2016), Table 1: (compression in percent, minutes) of their compositional network,
# and of the earlier method NOCA.
PAPER_SINGLE = {
    "bars": ((83, 0.07), (84, 0.67)),
    "symbols": ((11, 0.42), (85, 92)),
    "letters": ((38, 25), (98, 662)),
    "noisy letters": ((73, 24), (102, 716)),
    "text": ((28, 31), (84, 1222)),
}
# Test errors in Lázaro-Gredilla et al. (2016), sections 4.3.1 and 4.3.2: of the compositional network without
# and with labels, and of two convolutional networks with labels.
TRAITS = {"clusters": 0.006, "supervised": 0.0007, "same form": 0.005, "standard": 0.025}
# Hinton, Revow, Dayan (1995), Table 1: errors in percent, by weights of tangents (derivatives of an image by
# shift, rotation or scaling) in clustering and in recognition.
PAPER_TANGENTS = {"none, none": 3.10, "heavy, light": 1.45, "heavy, none": 2.25, "heavy, heavy": 4.50}
# Hinton, Revow, Dayan (1995), Table 2: (error in percent, number of images that a class stores).
PAPER_DIGITS = {"plain": (4.68, 110), "tangent distance": (4.3, 110), "nearest": (3.58, 1100)}
# Zhang (2018), Figure 12: retrieval accuracy minus that of latent semantic analysis (LSA), in percentage
# points, by number of centroids in the first layer. Figures 13 and 14: seconds to predict test rows with the
# bootstrap network, and with the small network that replaces it.
PAPER_RETRIEVAL = {"500": 8, "2,000": 13}
PAPER_COMPRESSIVE = {"mnist": (4857.45, 1.10), "rcv1": (190574.74, 88.80)}

FASHION = "Fashion-MNIST was not available"


def cite(command: str) -> str:
    """Return a command of this folder as Markdown; fail if its script does not exist."""
    if not (RESULTS.parent / command.split()[0]).is_file():
        raise SystemExit(f"benchmarks/papers.py names {command.split()[0]}, which is not in benchmarks/")
    return f"`{command}`"


def say_not_run(reason: str) -> str:
    """Return the text of a table cell whose result was not measured."""
    return f"not run: {reason}"


def median_and_worst(errors: Iterable[float], digits: int = 2) -> str:
    """Return the median and the largest error over seeds as text."""
    values = list(errors)
    return f"{percent(statistics.median(values), digits)} (worst {percent(max(values), digits)})"


def has_picture(name: str) -> bool:
    """Return True if results/NAME.png exists."""
    return (RESULTS / f"{name}.png").is_file()


def read_capsule_errors() -> dict[tuple[str, int], float]:
    found = read("paper_capsule_dims") + read("paper_capsule_architectures")
    return {(r["architecture"], r["capsule_dim"]): r["test_error"] for r in found}


def list_dims(kind: str) -> str:
    errors = read_capsule_errors()
    return f"{percent(errors[kind, 1])} at d = 1, {percent(errors[kind, 16])} at d = 16"


def read_updates(key: str) -> dict[str, float]:
    """Return the value of ``key`` after the last pass, for the four updates in Figures 6 and 7."""
    names = {(0, 0): "EM", (0.9, 0): "momentum", (0, 0.8): "threshold", (0.9, 0.8): "both"}
    return {names[r["momentum"], r["nu"]]: r[key][-1] for r in read("paper_capsule_convergence")}


def say_same(holds: bool) -> str:
    return "as in the paper" if holds else "unlike the paper"


def list_log_losses() -> str:
    v = read_updates("log_loss")
    same = v["momentum"] < v["EM"] and v["both"] < v["threshold"] and v["EM"] < v["threshold"]
    return ", ".join(f"{name} {value:.3f}" for name, value in v.items()) + f"; {say_same(same)}"


def list_training_errors() -> str:
    v = read_updates("train_error")
    same = v["momentum"] < v["EM"] and v["both"] < v["threshold"] < v["EM"]
    return ", ".join(f"{name} {percent(value)}" for name, value in v.items()) + f"; {say_same(same)}"


def list_starts() -> str:
    found = read("paper_capsule_starts")
    subspace = min(r["lowest_train_error"] for r in found if r["init"] == "subspace")
    others = [r["lowest_train_error"] for r in found if r["init"] == "random"]
    text = f"subspace {percent(subspace)}, best of {len(others)} random starts {percent(min(others))}"
    return f"{text}; {say_same(subspace < min(others))}"


@as_table(COLUMNS)
def paper_capsule() -> Rows:
    """Yield the rows of the table that compares with Saul (2021)."""
    errors, million, large = read_capsule_errors(), read("million"), read("million_d16")
    usps = {r["capsule_dim"]: r["test_error"] for r in read("paper_capsule_dims_usps")}
    dims = cite("paper_capsule.py dims")
    yield (
        "Figure 2, section 3.2",
        "test error of MNIST, multiclass, d = 2",
        percent(CAPSULE_MNIST),
        percent(errors["multiclass", 2]),
        dims,
    )
    yield (
        "Figure 4, left",
        "prototypes of MNIST, d = 8",
        "figure only",
        "drawn below",
        cite("paper_capsule.py latents"),
    )
    curve = "figure only"
    yield "Figure 5, left", "test error by d, multiclass", curve, list_dims("multiclass"), dims
    for kind, name in (("one_vs_all", "one-versus-all"), ("all_vs_all", "all-versus-all")):
        command = cite("paper_capsule.py architectures")
        yield "Figure 5, left", f"test error by d, {name}", curve, list_dims(kind), command
    yield (
        "Figure 5, left",
        f"all-versus-all on {million['rows']:,} distorted digits",
        f"{percent(CAPSULE_MILLION)} at d = 16",
        f"{percent(large['test_error'])} at d = 16, with other distortions; "
        f"{percent(million['test_error'])} at d = 4",
        cite("million.py FOLDER --dim 16"),
    )
    yield (
        "Figure 5, right",
        "test error by d, Fashion-MNIST",
        curve,
        f"USPS instead: {percent(usps[1])} at d = 1, {percent(usps[16])} at d = 16",
        cite("paper_capsule.py dims --data usps"),
    )
    passes = cite("paper_capsule.py convergence")
    yield (
        "Figure 6, left",
        "log-loss / log 10 after 1,000 passes",
        "momentum is lower, the threshold higher",
        list_log_losses(),
        passes,
    )
    yield (
        "Figure 7, left",
        "training error after 1,000 passes",
        "momentum and the threshold are lower",
        list_training_errors(),
        passes,
    )
    yield (
        "Figure 8, left",
        "lowest training error by start",
        "subspace is better than every random start",
        list_starts(),
        cite("paper_capsule.py starts"),
    )
    name = "test error of Fashion-MNIST, multiclass, d = 2"
    yield "Figure 3, section 3.2", name, percent(CAPSULE_FASHION), "", say_not_run(FASHION)
    name = "other parts of these figures, for Fashion-MNIST"
    yield "Figures 4, 6, 7, 8, right", name, "figure only", "", say_not_run(FASHION)


def read_longest(task: str, learner: str) -> dict[str, Any]:
    """Return the result of the fit of 50 epochs (``full/…``), or of the short fit if that one is missing."""
    found = read("crbm_mnist")
    long = found.get(f"full/{task}/{learner}", {"failed": True})
    return found[f"{task}/{learner}"] if "failed" in long else long


def format_pixels(found: dict[str, Any]) -> str:
    return f"{found['all']:.2f} / {found['changed']:.1f}"


def list_crbm_errors(task: str) -> str:
    """Return as text the errors of mle-bp, the learners over 5 % above the paper, and the largest gap."""
    found, best = read("crbm_mnist"), read_longest(task, "mle-bp")
    names = [name.split("/")[1] for name in found if name.startswith(f"{task}/")]
    compared = {name: r for name in names if "paper" in (r := read_longest(task, name))}
    above = [name for name, r in compared.items() if r["all"] > 1.05 * r["paper"]["all"]]
    rest = f"more than 5 % above the paper: {', '.join(above)}" if above else "none is 5 % above the paper"
    name, worst = max(compared.items(), key=lambda item: item[1]["changed"] / item[1]["paper"]["changed"])
    changed = f"{name} {worst['changed']:.1f} instead of {worst['paper']['changed']:.1f}"
    return (
        f"mle-bp {format_pixels(best)} ({best['epochs']} epochs). Of {len(compared)} learners, {rest}. "
        f"Largest gap among the changed: {changed}"
    )


def list_square_sizes() -> str:
    sizes = (
        f"{TASKS[task]}: mle-bp {read_longest(task, 'mle-bp')['all']:.2f}, "
        f"cd-10 {read_longest(task, 'cd-10')['all']:.2f} %"
        for task in ("occluded8", "occluded12")
    )
    return "; ".join(sizes) + "; other sizes were not fitted"


def list_converged(task: str) -> str:
    history = read_longest(task, "mle-bp")["history"]
    shares = [record["converged"] for record in history]
    least = min(range(len(shares)), key=shares.__getitem__)
    return (
        f"{TASKS[task]}: {percent(shares[least], 0)} in epoch {least + 1}, "
        f"{percent(shares[-1], 0)} in epoch {len(shares)}"
    )


@as_table(COLUMNS)
def paper_crbm() -> Rows:
    """Yield the rows of the table that compares with Ping and Ihler (2017)."""
    for task, name in TASKS.items():
        paper = read_longest(task, "mle-bp")["paper"]
        yield (
            f"Table {1 if task.startswith('noisy') else 2}",
            f"MNIST, {name}: % of wrong pixels / among the changed",
            f"mle-bp {format_pixels(paper)}",
            list_crbm_errors(task),
            cite("crbm_mnist.py"),
        )
    absent = say_not_run("data were not available")
    yield "Table 3", "Caltech101 Silhouettes", "mle-bp 5.45 and 4.55", "", absent
    drawn = [TASKS[task] for task in ("noisy10", "occluded8") if has_picture(f"crbm_{task}_restored")]
    yield (
        "Figure 2",
        "restored images, 10 % flipped and 8 x 8 occluded",
        "figure only",
        "drawn below: " + ", ".join(drawn),
        cite("crbm_mnist.py --full --run-dir RUN"),
    )
    yield (
        "Figure 3",
        "wrong pixels by size of the hidden square",
        "mle-bp is better than cd-10 unless nearly all is hidden",
        list_square_sizes(),
        cite("crbm_mnist.py"),
    )
    with_history = [task for task in ("noisy10", "occluded8") if "history" in read_longest(task, "mle-bp")]
    yield (
        "Figure 4",
        "share of rows whose belief propagation converged",
        "8 x 8 occluded: a change around epoch 3, then the majority",
        "; ".join(list_converged(task) for task in with_history),
        cite("crbm_mnist.py --full --run-dir RUN"),
    )


def list_trait_errors(part: str) -> str:
    return median_and_worst(fit["test_error"] for fit in read("hcn_traits")[part].values())


def read_flipped(share: str) -> dict[str, float]:
    """Return median test errors of three kinds of networks, if a share of the training pixels is flipped."""
    fits = [fit["errors"] for fit in read("hcn_traits")[f"flips {share}"].values()]
    return {name: statistics.median(fit[name] for fit in fits) for name in fits[0]}


def list_grey(labels: bool, size: int) -> str | None:
    """Return as text the results on grey images with filters of ``size`` pixels; None if there are none."""
    images = 100 if labels else 200
    fits = [
        r
        for r in read("hcn_gray").values()
        if (r["labels"], r["filter_size"], r["images"]) == (labels, size, images)
    ]
    if not fits:
        return None
    found = [sum(map(bool, r["features_of_traits"].values())) for r in fits]
    errors = ", ".join(percent(r["test_error"], 1) for r in fits)
    return f"{', '.join(map(str, found))} of 4 traits are a feature, errors {errors} ({len(fits)} fits)"


def list_grey_sizes(labels: bool) -> str:
    cells = {size: list_grey(labels, size) for size in (3, 7)}
    return "; ".join(f"{size} x {size}: {cell}" for size, cell in cells.items() if cell)


def read_digit_error(kind: str) -> float:
    """Return the median error of networks fitted to 400 digits; ``kind`` is a key such as "clean"."""
    return statistics.median(fit["errors"][kind] for fit in read("hcn_digits")["hcn"].values())


def list_digit_errors(kind: str) -> str:
    found = read("hcn_digits")
    rivals = {
        "same form": found["rival convolutional, same form"]["errors"][kind],
        "standard": found["rival convolutional, standard"]["errors"][kind],
    }
    cells = {"network": read_digit_error(kind)} | {
        f"convolutional, {k}": error for k, error in rivals.items()
    }
    return ", ".join(f"{name} {percent(error, 1)}" for name, error in cells.items())


def read_wide_error() -> float:
    return read("hcn_digits_more")["hcn, 64 features of 26 x 26"]["0"]["errors"]["clean"]


def count_seeds(way: str) -> str:
    found = read("hcn_online")["five"]["ways"][way]
    return f"{found['seeds_with_all']} of {len(found['fits'])} seeds"


@as_table(COLUMNS)
def paper_hcn() -> Rows:
    """Yield the rows of the table that compares with Lázaro-Gredilla et al. (2016)."""
    single = read("hcn_single")
    for name, ((share, minutes), (other, longer)) in PAPER_SINGLE.items():
        ours = single[name]
        seconds = statistics.median(single["seconds"][name])
        yield (
            "Table 1, Figure 5",
            f"{name}: compression, time",
            f"{share} %, {minutes:g} min (NOCA {other} %, {longer:,g} min)",
            f"{100 * ours['compression']:.0f} %, {seconds:.1f} s (generator's features "
            f"{100 * ours['truth']:.0f} %); {ours['found']} of {ours['kinds']} features found",
            cite("hcn_single.py"),
        )
    online = ("30 images, messages kept", "30 images, 100 times", "3,000 images, once")
    yield (
        "Figure 6",
        "all five letters found: batch; online, 30 images; online, 3,000 images",
        "figure only, one run each",
        "; ".join(count_seeds(way) for way in online),
        cite("hcn_online.py --parts five"),
    )
    yield (
        "Figure 7 (b), section 4.3.1",
        "two traits: test error without labels",
        percent(TRAITS["clusters"]),
        list_trait_errors("clusters"),
        cite("hcn_traits.py --parts clusters --seeds 10"),
    )
    filled = [fit["filled_near_a_true_pixel"] for fit in read("hcn_traits")["filled"].values()]
    yield (
        "Figure 7 (c)",
        "two traits: hidden pixels filled in",
        "figure only",
        f"{percent(statistics.median(filled), 0)} of the filled pixels are within one pixel of a true one",
        cite("hcn_traits.py --parts filled"),
    )
    yield (
        "Figure 8, section 4.3.2",
        "two traits: test error with labels",
        percent(TRAITS["supervised"]),
        list_trait_errors("supervised"),
        cite("hcn_traits.py --parts supervised --seeds 10"),
    )
    clean = read_flipped("0")
    yield (
        "section 4.3.2",
        "the same for convolutional networks: same form, standard",
        ", ".join(percent(TRAITS[name]) for name in ("same form", "standard")),
        ", ".join(percent(clean[name]) for name in ("same form", "standard")),
        cite("hcn_traits.py --parts flips --seeds 3"),
    )
    levels = {f"{100 * float(share):g} %": read_flipped(share) for share in ("0.01", "0.03", "0.1")}
    yield (
        "Figure 8 (c)",
        "the same by share of flipped training pixels: network, same form, standard",
        "figure only",
        "; ".join(f"{name}: {', '.join(percent(e, 1) for e in of.values())}" for name, of in levels.items()),
        cite("hcn_traits.py --parts flips --seeds 3"),
    )
    digits = cite("hcn_digits.py")
    yield (
        "Figure 9 (a), (b)",
        "first weights of both kinds of network, 400 digits",
        "64 features of 26 x 26: parts of digits",
        "drawn below: edges, not parts of digits; with 64 features of 26 x 26 the error is "
        f"{percent(read_wide_error(), 1)} instead of {percent(read_digit_error('clean'), 1)}",
        digits,
    )
    curve = "figure only: better than convolutional"
    yield "Figure 9 (c)", "error of clean digits", curve, list_digit_errors("clean"), digits
    yield (
        "Figure 9 (c)",
        "mean error of six corruptions",
        curve,
        list_digit_errors("mean of corruptions"),
        digits,
    )
    without = list_grey_sizes(labels=False)
    yield (
        "Figure 10",
        "grey traits, learned without labels",
        "figure only, 200 images, 16 filters; diagonals are harder with 7 x 7",
        without,
        cite("hcn_gray.py --unlabelled") if without else say_not_run("not measured yet"),
    )
    yield (
        "Figure 10",
        "the same with labels, 100 images, 8 filters",
        "not in the paper",
        list_grey_sizes(labels=True),
        cite("hcn_gray.py"),
    )
    yield "Figure 12", "the six corruptions", "figure only", "drawn below, by our own generator", digits


@as_table(COLUMNS)
def paper_mixtures() -> Rows:
    """Yield the rows of the table that compares with Hinton, Revow and Dayan (1995)."""
    found = read("linear_mixture_paper")
    parts = {"table1_usps732": "USPS", "table1_usps": "USPS", "table1_mnist16": "MNIST"}
    for weights, error in PAPER_TANGENTS.items():
        cells = (
            f"{found[part]['rows']:,} rows of {name} {mean_of(found[part]['n_dims 10'][weights]['error'])} %"
            for part, name in parts.items()
        )
        yield (
            "Table 1",
            f"error by tangents in clustering, recognition: {weights}",
            f"{error:.2f} %",
            "; ".join(cells),
            cite("linear_mixture_paper.py --parts table1_usps732,table1_usps,table1_mnist16"),
        )
    names = {"plain": "linear models", "tangent distance": "with tangent distance"}
    for way, name in names.items():
        r, (error, images) = found["table2_usps"][way], PAPER_DIGITS[way]
        yield (
            "Table 2",
            f"test error, {name}; images to store per class",
            f"{error} %; {images}",
            f"{mean_of(r['at_rejects']['0'])} %; {r['images_a_class']}",
            cite("linear_mixture_paper.py --parts table2_usps"),
        )
    r, (error, images) = found["neighbours_usps"]["nearest, two-sided"], PAPER_DIGITS["nearest"]
    yield (
        "Table 2",
        "tangent distance to all training images",
        f"{error} %; {images:,}",
        f"{mean_of(r['at_rejects']['0'])} %; {r['images_a_class']:,}",
        cite("linear_mixture_paper.py --parts neighbours_usps"),
    )
    drawn = cite("linear_mixture_paper.py --parts figures_usps")
    yield "Figure 2", "ten means of twos without and with tangents", "figure only", "drawn below", drawn
    yield "Figure 3", "a 2 reconstructed as a 2 and as a 0", "figure only", "drawn below", drawn


def list_differences(key: str, ours: str, theirs: str) -> str:
    """Return as text the score ``key`` here minus that of the paper, in percentage points, by data set."""
    cells = []
    for part, name in CLUSTERED.items():
        r = read("mbn_clustering")[part]
        paper = r.get("paper", {}).get(key, {})
        if theirs in paper:
            cells.append(f"{name.split(',')[0]} {r[ours][key] - paper[theirs]:+.1f}")
    return ", ".join(cells)


def list_nmi(parameter: str, values: Iterable[str]) -> str:
    found = read("mbn_clustering")["sweeps"][parameter]
    return ", ".join(f"{found[value]['nmi']:.1f} at {value}" for value in values)


def read_first_accuracy(name: str) -> float:
    return read("mbn_retrieval")["curves"][name]["accuracy"][0]


def list_paper_retrieval() -> str:
    return ", ".join(f"k1 = {k1}: over {points}" for k1, points in PAPER_RETRIEVAL.items())


def list_retrieval() -> str:
    small = read_first_accuracy("LSA, 5 components")
    cells = (
        f"k1 = {k1}: {read_first_accuracy(f'MBN, k1 = {k1}, 5 components') - small:+.1f}"
        for k1 in PAPER_RETRIEVAL
    )
    wide, codes = read_first_accuracy("LSA, 125 components"), read_first_accuracy("MBN, k1 = 2,000, codes")
    return f"{', '.join(cells)}; LSA with 125 components has {wide:.1f} %, the codes of MBN {codes:.1f} %"


def format_scores_and_seconds(scores: str, seconds: tuple[float, float]) -> str:
    return f"{scores}; predictions take {seconds[0]:,.2f} s and {seconds[1]:,.2f} s"


@as_table(COLUMNS)
def paper_mbn() -> Rows:
    """Yield the rows of the table that compares with Zhang (2018)."""
    clustering = cite("mbn_clustering.py")
    for number, key, name in (("Table 3", "nmi", "NMI"), ("Table 4", "accuracy", "accuracy")):
        for ours, theirs, how in (("default", "mbn", "decay 0.5"), ("best", "best", "best decay")):
            yield (
                number,
                f"{name} of clusters, {how}: points above the paper",
                "[values](README.md#1-errors-compared-with-the-papers)",
                list_differences(key, ours, theirs),
                clustering,
            )
    half = read("mbn_clustering").get("half_mnist", {})
    full = read("mbn_clustering")["mnist"]["paper"]
    yield (
        "Tables 3, 4",
        "MNIST (full), NMI / accuracy, k1 = half of the rows",
        f"{full['nmi']['mbn']:.1f} / {full['accuracy']['mbn']:.1f}",
        "; ".join(f"{how}: {of['nmi']:.1f} / {of['accuracy']:.1f}" for how, of in half.items()),
        cite("mbn_clustering.py --parts half_mnist") if half else say_not_run("not measured yet"),
    )
    absent = say_not_run("these four sets were not available")
    yield "Tables 3, 4", "Dermatology, COIL100, ORL, 20-Newsgroups", "values", "", absent
    drawn = cite("mbn_clustering.py --parts figures")
    yield "Figure 5", "output for four point sets", "figure only", "drawn below", drawn
    yield "Figure 6", "two Gaussians with an outlier", "figure only", "drawn below", drawn
    yield "Figure 7", "AML-ALL biomedical data", "figure only", "", say_not_run("data were not available")
    flat = read("mbn_clustering")["plane"]
    yield (
        "Figure 8",
        "MNIST (small) in two dimensions; NMI of k-means",
        "figure only",
        f"{flat['nmi']:.1f} %, drawn below without the six other methods",
        cite("mbn_clustering.py --parts plane"),
    )
    layers = say_not_run("MNIST (full) was fitted but not drawn; MNIST (small) is below")
    yield "Figures 9, 16", "test images of MNIST (full), and each layer", "figure only", "", layers
    yield (
        "Figure 10",
        "scores by decay on nine sets",
        "no decay is best for all; 0.5 is safe",
        f"{sum('decays' in read('mbn_clustering')[part] for part in CLUSTERED)} sets, drawn below",
        clustering,
    )
    sweeps = cite("mbn_clustering.py --parts sweeps")
    documents = sum(read("mbn_retrieval")[part] for part in ("train", "test"))
    yield (
        "Figure 11",
        "NMI by clusterings V, MNIST (small)",
        "V should be at least 100",
        list_nmi("V", ("25", "50", "100", "400")),
        sweeps,
    )
    yield (
        "Figure 11",
        "NMI by share of features a, MNIST (small)",
        "a should not be very small",
        list_nmi("a", ("0.1", "0.2", "0.5", "1.0")),
        sweeps,
    )
    yield (
        "Figure 12",
        f"retrieval of RCV1 ({documents:,} documents here): points above LSA, first document",
        list_paper_retrieval(),
        list_retrieval(),
        cite("mbn_retrieval.py"),
    )
    found = read("mbn_compressive")
    r, compressed = found["mnist"]["2 components"], found["rcv1"]
    yield (
        "Figure 13",
        "compressive network, MNIST in two dimensions",
        format_scores_and_seconds("identical to MBN on training images", PAPER_COMPRESSIVE["mnist"]),
        format_scores_and_seconds(
            f"explains {percent(r['explained_train'], 1)} of the training and "
            f"{percent(r['explained_test'], 1)} of the test output",
            (found["mnist"]["network_predict_seconds"], r["predict_seconds"]),
        ),
        cite("mbn_compressive.py --parts mnist"),
    )
    first = (compressed[kind]["accuracy"][0] for kind in ("network", "compressive"))
    yield (
        "Figure 14",
        "compressive network, retrieval of RCV1",
        format_scores_and_seconds("almost identical to MBN", PAPER_COMPRESSIVE["rcv1"]),
        format_scores_and_seconds(
            "first document: {:.1f} % by MBN, {:.1f} % by the compressive network".format(*first),
            (compressed["network_predict_seconds"], compressed["predict_seconds"]),
        ),
        cite("mbn_compressive.py --parts rcv1"),
    )
    times = {int(v): of["seconds_per_fit"] for v, of in read("mbn_clustering")["sweeps"]["V"].items()}
    power = log(times[400] / times[100]) / log(4)
    yield (
        "Figure 15",
        "seconds of a fit by V, MNIST (small)",
        "grow like V",
        f"{times[100]:.0f} s at V = 100, {times[400]:.0f} s at V = 400: like V to the power {power:.1f}",
        sweeps,
    )


def count_measured(table: str) -> str:
    """Return as text how many rows of a table have measured results."""
    lines = TABLES[table]().splitlines()[2:]
    return f"{sum('| not run: ' not in line for line in lines)} of {len(lines)}"


@as_table("model|rows run|main result|the paper|here|largest gap")
def paper_overview() -> Iterable[Iterable[str]]:
    """Yield the main result and the largest gap of each paper."""
    million = read("million_d16")
    yield (
        "[capsule regression](#capsule-regression)",
        count_measured("paper_capsule"),
        "test error of MNIST, d = 2",
        percent(CAPSULE_MNIST),
        percent(read_capsule_errors()["multiclass", 2]),
        f"all-versus-all on a million digits: {percent(CAPSULE_MILLION)} in the paper, "
        f"{percent(million['test_error'])} here with other distortions",
    )
    noisy = read_longest("noisy10", "mle-bp")
    short = {name: r for name, r in read("crbm_mnist").items() if "paper" in r and name.count("/") == 1}
    tasks = {name: read_longest(*name.split("/")) for name in short}
    name, r = max(tasks.items(), key=lambda item: item[1]["all"] / item[1]["paper"]["all"])
    task, learner = name.split("/")
    yield (
        "[conditional RBMs](#conditional-rbms)",
        count_measured("paper_crbm"),
        "wrong pixels of MNIST, 10 % flipped, mle-bp",
        f"{noisy['paper']['all']:.2f} %",
        f"{noisy['all']:.2f} %",
        f"{learner}, {TASKS[task]}: {r['paper']['all']:.2f} % in the paper, "
        f"{r['all']:.2f} % here after {r['epochs']} epochs",
    )
    yield (
        "[compositional networks](#hierarchical-compositional-networks)",
        count_measured("paper_hcn"),
        "two traits, error without labels",
        percent(TRAITS["clusters"]),
        list_trait_errors("clusters"),
        f"digits with the paper's feature size: {percent(read_wide_error(), 1)} errors, "
        f"{percent(read_digit_error('clean'), 1)} with small features",
    )
    found = read("linear_mixture_paper")
    tangents = found["table1_usps"]["n_dims 10"]
    yield (
        "[mixtures of linear models](#mixtures-of-linear-models)",
        count_measured("paper_mixtures"),
        "test error of digits (other digits here)",
        f"{PAPER_DIGITS['plain'][0]} %",
        f"{mean_of(found['table2_usps']['plain']['at_rejects']['0'])} %",
        f"tangents lower {PAPER_TANGENTS['none, none']:.2f} % to {PAPER_TANGENTS['heavy, light']:.2f} % in "
        f"the paper, {mean_of(tangents['none, none']['error'])} % to "
        f"{mean_of(tangents['heavy, light']['error'])} % here",
    )
    small = read("mbn_clustering")["mnist5000"]
    first = [read("mbn_compressive")["rcv1"][kind]["accuracy"][0] for kind in ("network", "compressive")]
    yield (
        "[bootstrap networks](#multilayer-bootstrap-networks)",
        count_measured("paper_mbn"),
        "NMI of MNIST (small), decay 0.5",
        f"{small['paper']['nmi']['mbn']:.1f} %",
        f"{small['default']['nmi']:.1f} %",
        f"compressive network for retrieval: almost identical in the paper, {first[0]:.1f} % to "
        f"{first[1]:.1f} % here",
    )


def caption_restored(task: str) -> str:
    paper, r = read_longest(task, "mle-bp")["paper"], read_longest(task, "mle-bp")
    return (
        f"Figure 2, {TASKS[task]}: original, given and restored test images. Wrong pixels: "
        f"paper {paper['all']:.2f} %, here {r['all']:.2f} %."
    )


def caption_occlusion(task: str) -> str:
    levels = read_longest(task, "mle-bp")["occlusion"]
    return (
        f"Figure 3, redrawn with one network that was trained on images with {TASKS[task]}. It has "
        f"{levels['8']['all']:.1f} % wrong pixels at 8 x 8, a network trained on this size "
        f"{read_longest('occluded8', 'mle-bp')['all']:.2f} %, and the network of the paper "
        f"{read_longest('occluded8', 'mle-bp')['paper']['all']:.2f} %."
        + (" Dashed: cd-10." if "occlusion" in read_longest(task, "cd-10") else "")
    )


def caption_convergence(task: str) -> str:
    return (
        f"Figure 4. Share of training rows whose belief propagation converged; {list_converged(task)}. "
        "The paper has 8 x 8 occluded squares and a change around epoch 3."
    )


def caption_single() -> str:
    parts = [
        f"{name} {read('hcn_single')[name]['found']} of {read('hcn_single')[name]['kinds']}"
        for name in PAPER_SINGLE
    ]
    return (
        "Figure 5, with the images of one seed. Each line shows an image, the features and places that were "
        f"found in it, and the image they make. Features found over all seeds: {', '.join(parts)}. The paper "
        "shows one image of each kind."
    )


def caption_gray(size: int) -> str:
    return (
        f"Figure 10, {size} x {size} filters, learned with labels: features as shares of channels that are "
        f"on, and the features of the four templates. Here {list_grey(True, size)}. The paper learns without "
        "labels, which is harder."
    )


def list_clean_error(rival: str) -> str:
    r = read("hcn_digits")[f"rival convolutional, {rival}"]
    return f"{percent(r['errors']['clean'], 1)} errors on clean digits"


def say_order() -> str:
    errors, kinds, dims = read_capsule_errors(), ("all_vs_all", "one_vs_all", "multiclass"), (1, 2, 4, 8, 16)
    better = all(errors[a, d] < errors[b, d] for a, b in pairwise(kinds) for d in dims)
    falling = all(errors[kind, b] < errors[kind, a] for kind in kinds for a, b in pairwise(dims))
    order, fall = say_same(better), say_same(falling)
    return f"The order of the three architectures is {order}, the fall with d is {fall}."


# Pictures in results/ by name: the alternative text, and a function that returns the caption.
PICTURES: dict[str, tuple[str, Callable[[], str]]] = {
    "paper_capsule_latents": (
        "ten discs with squashed latent vectors of test digits, coloured by class",
        lambda: (
            "Figure 2: squashed latent vectors of 5,000 test digits, a disc for each capsule. Rows of its "
            "class are near the circle and the others near the centre, as in the paper. Test error: paper "
            f"{percent(CAPSULE_MNIST)}, this fit {percent(read('paper_capsule_latents')[0]['test_error'])}."
        ),
    ),
    "paper_capsule_prototypes": (
        "eight training digits of each class",
        lambda: (
            "Figure 4, left: the training digit with the largest contribution of each element, d = 8. They "
            "differ in slant, thickness and style, for example a 7 with a bar, as in the paper."
        ),
    ),
    "paper_capsule_dims": (
        "test error against the capsule dimension, multiclass",
        lambda: (
            "Figure 5, left, multiclass. At d = 2 the paper has "
            f"{percent(CAPSULE_MNIST)}, here {percent(read_capsule_errors()['multiclass', 2])}."
        ),
    ),
    "paper_capsule_architectures": (
        "test error against the capsule dimension, one-versus-all and all-versus-all",
        lambda: f"Figure 5, left, the two other architectures. {say_order()}",
    ),
    "paper_capsule_convergence": (
        "log-loss and training error against passes, four updates",
        lambda: (
            f"Figures 6 and 7, left. After 1,000 passes the log-loss is {list_log_losses()}. "
            f"The training error is {list_training_errors()}."
        ),
    ),
    "paper_capsule_starts": (
        "lowest training error of the subspace start and of random starts",
        lambda: f"Figure 8, left. Lowest training error: {list_starts()}.",
    ),
    **{
        f"crbm_{task}_restored": (
            "original, given and restored digits",
            lambda task=task: caption_restored(task),
        )
        for task in ("noisy10", "occluded8")
    },
    **{
        f"crbm_{task}_occlusion": (
            "wrong pixels against the side of the hidden square",
            lambda task=task: caption_occlusion(task),
        )
        for task in ("noisy10", "occluded8")
    },
    **{
        f"crbm_{task}_convergence": (
            "share of rows that converged against the epoch",
            lambda task=task: caption_convergence(task),
        )
        for task in ("noisy10", "occluded8")
    },
    "hcn_single": ("six images, their features, places and reconstructions", caption_single),
    "hcn_online": (
        "two noisy images of letters, and the letters found in three ways",
        lambda: (
            "Figure 6: (a) and (b) images; (c) batch, (d) online with 30 images, (e) online with 3,000. "
            f"In (e), {count_seeds('3,000 images, once')} find all letters; the paper shows one run."
        ),
    ),
    "hcn_traits": (
        "four features, the templates that use them, and images with filled halves",
        lambda: (
            "Figures 7 (b), 7 (c) and 8 (a), learned without labels from 100 images. Test error: paper "
            f"{percent(TRAITS['clusters'])}, here {list_trait_errors('clusters')}."
        ),
    ),
    "hcn_digits": (
        "features of edges of digits",
        lambda: (
            f"Figure 9 (a), features of 400 digits: {percent(read_digit_error('clean'), 1)} errors on clean "
            "digits. They are small edges; the paper shows parts of digits of 26 x 26."
        ),
    ),
    "hcn_digits_form": (
        "first weights of a convolutional network",
        lambda: f"Figure 9 (b), convolutional network of the same form: {list_clean_error('same form')}.",
    ),
    "hcn_digits_standard": (
        "first weights of a standard convolutional network",
        lambda: f"Figure 9 (b), standard convolutional network: {list_clean_error('standard')}.",
    ),
    "hcn_gray_3": ("features and templates of grey traits, 3 x 3 filters", lambda: caption_gray(3)),
    "hcn_gray_7": ("features and templates of grey traits, 7 x 7 filters", lambda: caption_gray(7)),
    "hcn_digits_corrupted": (
        "clean digits and six corruptions of them",
        lambda: (
            "Figure 12, the clean digits and the six corruptions. Mean error over the six: "
            f"{list_digit_errors('mean of corruptions')}; the paper prints no numbers."
        ),
    ),
    "linear_mixture_curve": (
        "four points of a curve, described by three linear models",
        lambda: (
            "Figure 1, computed. Without tangents, points 3 and 4 share a model that crosses the curve; with "
            "tangents, points 1 and 2 share a model along the curve, as in the paper's drawing."
        ),
    ),
    "linear_mixture_twos": (
        "ten means of twos, without and with tangents",
        lambda: (
            "Figure 2, USPS: means (a) without and (b) with tangents. Each row has one noisy mean; the paper "
            "finds those of (b) more diverse and less noisy, which is not visible here."
        ),
    ),
    "linear_mixture_reconstruction": (
        "a two, reconstructed by models of twos and of zeros",
        lambda: (
            "Figure 3: a 2 reconstructed by models of twos (top) and zeros (bottom), with the squared error "
            "above the difference. The paper prints no numbers."
        ),
    ),
    "mbn_densities": (
        "four point sets, and the output of a bootstrap network for them",
        lambda: (
            "Figure 5: four sets of points like those of the paper (top), and their output (bottom). It "
            "spreads the classes more evenly, as in the paper; path-based classes still touch."
        ),
    ),
    "mbn_outlier": (
        "two groups of points with an outlier: data, PCA and output",
        lambda: (
            "Figure 6: two Gaussians and an outlier (cross). PCA draws both classes on one line; the "
            "network separates them, as in the paper."
        ),
    ),
    "mbn_plane": (
        "digits in two dimensions, coloured by class",
        lambda: (
            "Figure 8: output in two dimensions for half of the 5,000 images. Most digits are apart, but 0 "
            "and 6 overlap, and so do 4 and 9. The paper finds small classes that are far apart. k-means has "
            f"an NMI of {read('mbn_clustering')['plane']['nmi']:.1f} % here; the paper prints none."
        ),
    ),
    "mbn_layers": (
        "the same digits after each layer",
        lambda: (
            "Figure 16 for the same images (the paper has MNIST (full)). In the first layers a few images "
            "fill the plane; in the upper layers, with fewer centroids k, the digits become groups."
        ),
    ),
    "mbn_decay": (
        "NMI and accuracy against the decay, seven data sets",
        lambda: (
            "Figure 10. NMI at decay 0.5, points above the paper: "
            f"{list_differences('nmi', 'default', 'mbn')}."
        ),
    ),
    "mbn_V": (
        "NMI and accuracy against the number of clusterings",
        lambda: (
            f"Figure 11, clusterings V: NMI {list_nmi('V', ('25', '50', '100', '400'))}. "
            "The paper asks for at least 100."
        ),
    ),
    "mbn_a": (
        "NMI and accuracy against the share of features",
        lambda: (
            f"Figure 11, share of features a: NMI {list_nmi('a', ('0.1', '0.2', '0.5'))}; the paper uses 0.5."
        ),
    ),
    "mbn_retrieval": (
        "accuracy of retrieval against the number of documents",
        lambda: (
            f"Figure 12. Points above LSA at the first document: {list_retrieval()}. "
            f"The paper: {list_paper_retrieval()}."
        ),
    ),
}


def caption(name: str) -> str:
    """Return the Markdown of a picture with its caption, or an empty text if the picture does not exist."""
    if name not in PICTURES:
        raise SystemExit(f"there is no caption for the picture {name!r} in benchmarks/papers.py")
    text, words = PICTURES[name]
    return f"![{text}](results/{name}.png)\n\n{words()}\n" if has_picture(name) else ""
