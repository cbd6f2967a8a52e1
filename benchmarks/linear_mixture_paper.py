"""Repeat the experiments of Hinton, Revow and Dayan (1995): mixtures of linear models of real digits.

    python benchmarks/linear_mixture_paper.py --parts choose_usps,table2_usps

A class has several sub-classes: linear models with a mean, latent dimensions and a noise. Tangents are
derivatives of an image by small transformations (shift, rotation, …); a weight says how much they count in
clustering or in recognition. Tangent distance ignores small transformations.

choose_DATA       Choose the settings by cross-validation of the training rows; for MNIST, on rows
                  50000:60000 of them.
table2_DATA       Test errors of the chosen settings if 0 to 10 % of the rows are rejected: without tangents,
                  with lightly weighted tangents, and with tangent distance.
neighbours_DATA   Test errors of the nearest training row by Euclidean, one-sided and two-sided tangent
                  distance.
table1_DATA       Cross-validated errors with tangents in clustering and in recognition. DATA may also be
                  usps732 (732 rows); of MNIST 11,000 rows are used, the number in the paper.
extensions_DATA   Held-out and test errors with soft assignment, code cost, and noise per sub-class and per
                  pixel.
floors_DATA       Errors if the noise is at least .1 or .3 of the mean variance of a pixel.
dims_DATA         Errors with the chosen number of latent dimensions, and with fixed numbers.
own_dims_DATA     The paper's rule that a sub-class keeps 95 % of the variance of its own rows; other shares
                  than 95 %; and the same number of dimensions for all sub-classes. Fitted by EM with hard
                  assignment, written in numpy.
stepwise_DATA     Stepwise EM of 1, 2 and 3 epochs, compared with batch EM.
steps_DATA        Stepwise EM of 3 epochs with other batch sizes, compared with batch EM.
thickness_DATA    Held-out errors with tangent distance, with six tangents and with thickness as a seventh.
search_DATA       One `sl.Search` over components, dimensions and both weights of tangents, with rows on disk
                  that no cache keeps. The results are the rows and bytes that each pass reads, and the test
                  error of the chosen setting.
temperature_DATA  Temperatures of probabilities that several numbers of training rows choose: their
                  mean and deviation, and the log-loss on test rows.
figures_usps      The paper's Figures 1, 2 and 3.

DATA is usps, mnist16 (MNIST cropped by 2 pixels and averaged to 16 x 16) or mnist28. Test rows choose no
setting. Errors are means over --seeds fits, except in choose, thickness and search. The p-value of two
settings is that of a sign-flip test over rows. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import mnist, mnist16, parser, usps, write_part, write_png
from sklearn.cluster import KMeans
from tangent_neighbours import nearest_neighbours

import scalelatent as sl
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset, create_dataset
from scalelatent.engine.backend import make_backend
from scalelatent.models.linear_mixture.fit import make_smoothing_matrix
from scalelatent.models.linear_mixture.kernels.reference import GAMMA, TangentSpec
from scalelatent.models.linear_mixture.model.leave_one_out import LeaveOneOut
from scalelatent.models.linear_mixture.model.recognition import (
    TEMPERATURES,
    TemperaturePass,
    confidence,
    probabilities,
    reject_curve,
)
from scalelatent.reductions.temperature import choose_temperature
from scalelatent.report.style import new_figure

SIX_TANGENTS = ("shift-x", "shift-y", "rotation", "scaling", "hyperbolic-axis", "hyperbolic-diagonal")
PAPER_TANGENTS = SIX_TANGENTS[:4]  # Tangents in the paper: translation, rotation and scaling.
SEVEN_TANGENTS = (*SIX_TANGENTS, "thickness")
# Shares of test rows that are rejected because their class is uncertain.
REJECTED_SHARES = (0.0, 0.01, 0.05, 0.1)
FOLDS = 5
# Weights of tangents that this script uses for "heavy" and for "light" in the paper's Table 1.
HEAVY_WEIGHT, LIGHT_WEIGHT = 3.0, 0.3
# Number of MNIST's last training rows that are held out to choose settings.
HELD_OUT_ROWS = 10_000
# Methods of recognition: without tangents, with light tangents, and with tangent distance.
METHODS = ("plain", "light tangents", "tangent distance")


@functools.cache
def load_rows(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows in [0, 1] and the labels of a part; "usps732" has the first 732 training rows."""
    if name.startswith("usps"):
        x, y = usps(part)
        return (x[: int(name[4:])], y[: int(name[4:])]) if name != "usps" and part == "train" else (x, y)
    return mnist16(part) if name == "mnist16" else scale_to_unit(*mnist(part=part))


def scale_to_unit(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.astype(np.float32) / 255, y


def get_image_shape(name: str) -> tuple[int, int]:
    """Return the height and the width of the images of a data set."""
    return (28, 28) if name == "mnist28" else (16, 16)


def split_rows(name: str, seed: int, folds: int = FOLDS, rows: int = 0) -> Iterable[tuple[Any, Any]]:
    """Yield indices (training rows, held-out rows) of each fold of ``rows`` random rows; 0 means all rows.

    If ``rows`` is 0, MNIST has one fold, whose held-out rows are its last 10,000 rows.
    """
    _, y = load_rows(name, "train")
    if name.startswith("mnist") and not rows:
        yield np.arange(len(y) - HELD_OUT_ROWS), np.arange(len(y) - HELD_OUT_ROWS, len(y))
        return
    order = np.random.default_rng((seed, 17)).permutation(len(y))[: rows or None]
    for fold in np.array_split(order, folds):
        yield np.setdiff1d(order, fold), np.sort(fold)


def fit_classifier(name: str, x: np.ndarray, y: np.ndarray, seed: int, jobs: int, **params: Any) -> Any:
    """Return a classifier fitted to rows x of the data set ``name``, with classes y."""
    # The stored results were measured with tol=1e-4.
    own = {"image_shape": get_image_shape(name), "random_state": seed, "n_jobs": jobs, "tol": 1e-4}
    params = own | {"likelihood": "error"} | params
    return sl.LinearMixtureClassifier(**params).fit(x, y)


def compute_class_errors(model: Any, x: np.ndarray, moved: TangentSpec | None = None) -> np.ndarray:
    """Return the reconstruction error of each row by each class, (rows, classes).

    With ``moved``, it is the tangent distance with these tangents. The model keeps this way of recognition.
    """
    model._fitted = replace(model._fitted, tangent_spec=moved)
    model.set_params(recognition="error" if moved is None else "tangent-distance")
    return np.asarray(-model.decision_function(x), dtype=np.float64)


def compute_errors_at_rejects(found: np.ndarray, y: np.ndarray, by: str = "ratio") -> list[float]:
    """Return the share of wrong rows among the remaining rows, for each share of rejected rows.

    ``found`` has reconstruction errors (rows, classes). Rows are rejected by the ratio of the errors of the
    two best classes, or by the error of the best class.
    """
    certain = confidence(found) if by == "ratio" else -found.min(axis=1)
    share, error = reject_curve(certain, found.argmin(axis=1) != y)
    return [float(error[np.searchsorted(share, r)]) for r in REJECTED_SHARES]


def compute_p_value(a: np.ndarray, b: np.ndarray, draws: int = 20_000) -> float:
    """Return the p-value of a sign-flip test over rows.

    ``a`` and ``b`` are 1 for wrong rows (seeds, rows) of two settings, and NaN where a seed lacks a row.
    """
    seen = ~np.isnan(a).all(axis=0)
    gap = np.nanmean(a[:, seen] - b[:, seen], axis=0)
    gap = gap[gap != 0]
    if not len(gap):
        return 1.0
    rng, above = np.random.default_rng(0), 0
    for _ in range(draws // 1000):
        signs = rng.choice(np.array([-1.0, 1.0]), size=(1000, len(gap)))
        above += int((np.abs(signs @ gap) >= abs(gap.sum()) - 1e-9).sum())
    return float(f"{(above + 1) / (draws + 1):.2g}")


def summarise_seeds(values: Iterable[float]) -> dict[str, float]:
    """Return the mean and the standard deviation (0 for one value) of values over seeds."""
    given = np.array(list(values), dtype=float)
    return {
        "mean": round(float(given.mean()), 5),
        "sd": round(float(given.std(ddof=1)), 5) if len(given) > 1 else 0.0,
    }


class HeldOutErrors:
    """Held-out errors of settings, stored in a file, so that an interrupted search resumes."""

    def __init__(self, name: str, args: Any) -> None:
        self.name, self.args = name, args
        self.path = args.out.with_name(f"{args.out.stem}_{name}.partial.json")
        self.known: dict[str, dict[str, float]] = (
            json.loads(self.path.read_text()) if self.path.exists() else {}
        )

    def measure_errors(self, **params: Any) -> dict[str, float]:
        """Return the held-out errors of a setting, without and with tangent distance."""
        params = {"tangents": SIX_TANGENTS, "tangent_smoothing": 0.6, **params}
        if self._key(params) not in self.known:
            self._measure(params)
        return self.known[self._key(params)]

    @staticmethod
    def _key(params: dict[str, Any]) -> str:
        return json.dumps(dict(sorted(params.items())))

    def _measure(self, params: dict[str, Any]) -> None:
        x, y = load_rows(self.name, "train")
        # Tangents with weight 0 do not change a fit, so one fit serves all settings of tangent distance.
        no_tangents = not params["recognition_tangent_weight"]
        moved = [{key: params[key] for key in ("tangents", "tangent_smoothing")}]
        moved += [some for some in list_tangent_settings(self.name) if no_tangents and some not in moved]
        wrong: dict[str, list[np.ndarray]] = {}
        for some, held in split_rows(self.name, self.args.seed):
            model = fit_classifier(self.name, x[some], y[some], self.args.seed, self.args.jobs, **params)
            wrong.setdefault("error", []).append(
                compute_class_errors(model, x[held]).argmin(axis=1) != y[held]
            )
            for settings in moved:
                found = compute_class_errors(model, x[held], make_tangent_spec(self.name, settings))
                wrong.setdefault(json.dumps(settings), []).append(found.argmin(axis=1) != y[held])
        share = {way: float(np.concatenate(flags).mean()) for way, flags in wrong.items()}
        for settings in moved:
            found_of = {"error": share["error"], "tangent-distance": share[json.dumps(settings)]}
            self.known[self._key(params | settings)] = found_of
            reported = (f"{way} {100 * error:.2f}" for way, error in found_of.items())
            print(self.name, self._key(params | settings), *reported, flush=True)
        self.path.write_text(json.dumps(self.known, indent=1))

    def choose_best(self, method: str, settings: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Return the setting with the smallest error by ``method``; the first setting wins a tie."""
        tried = list(settings)
        return min(tried, key=lambda setting: self.measure_errors(**setting)[method])


def list_combinations(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a dictionary of parameters for each combination of their values."""
    return [dict(zip(values, some, strict=True)) for some in itertools.product(*values.values())]


def list_tangent_settings(name: str) -> list[dict[str, Any]]:
    """Return the settings of tangent distance that are tried with each fit: tangents, and their smoothing."""
    return list_combinations(
        tangents=(SIX_TANGENTS, SEVEN_TANGENTS),
        tangent_smoothing=(0.6,) if name.startswith("mnist") else (0.6, 0.9),
    )


def choose_settings(name: str, args: Any) -> dict[str, Any]:
    """Choose the settings of three methods: first sizes and smoothing, then likelihood, then tangents."""
    search, out = HeldOutErrors(name, args), {}
    large = name.startswith("mnist")
    sizes = list_combinations(
        n_components=(100,) if large else (10, 20),
        n_dims=(10, 14) if large else (8, 10, 12),
        smoothing=(0.0, 0.5) if large else (0.5, 0.7, 0.9),
        recognition_tangent_weight=(0.0,),
    )
    for way, recognition in (("plain", "error"), ("tangent distance", "tangent-distance")):
        first = search.choose_best(recognition, sizes)
        kinds = [first | {"likelihood": kind} for kind in ("error", "code-cost")]
        if way == "plain":
            first = search.choose_best(recognition, kinds)
            light = list_combinations(
                tangents=(SEVEN_TANGENTS,) if large else (SIX_TANGENTS, SEVEN_TANGENTS),
                recognition_tangent_weight=(0.1, 0.3) if large else (0.03, 0.1, 0.3),
            )
            out |= {
                way: first,
                "light tangents": search.choose_best(recognition, [first | some for some in light]),
            }
        else:
            first = search.choose_best(
                recognition, [kind | some for kind in kinds for some in list_tangent_settings(name)]
            )
            weights = (0.0,) if large else (0.0, 0.1, 0.3)
            out[way] = search.choose_best(
                recognition, [first | {"recognition_tangent_weight": r} for r in weights]
            )
    for way, setting in out.items():
        held = search.measure_errors(**setting)["tangent-distance" if way == "tangent distance" else "error"]
        out[way] = {"held_out_error": round(held, 5), "settings": setting}
    return out | {"tried": len(search.known), "rows": "rows 50000:60000" if large else f"{FOLDS} folds"}


def read_chosen_settings(args: Any, name: str, method: str) -> dict[str, Any]:
    """Return the settings of one of METHODS that the part "choose" has written to the result file."""
    parts = json.loads(args.out.read_text())["parts"]
    return dict(parts[f"choose_{name}"]["result"][method]["settings"])


def make_tangent_spec(name: str, settings: dict[str, Any]) -> TangentSpec:
    """Return the tangents that tangent distance uses in these settings."""
    return TangentSpec(
        tuple(settings.get("tangents", SIX_TANGENTS)),
        get_image_shape(name),
        float(settings.get("tangent_smoothing", 0.6)),
    )


def measure_table2(name: str, args: Any) -> dict[str, Any]:
    """Measure the test errors of METHODS with their chosen settings; write the results after each seed."""
    x, y = load_rows(name, "train")
    test_x, test_y = load_rows(name, "test")
    settings = {
        way: read_chosen_settings(args, "mnist16" if name == "mnist28" else name, way) for way in METHODS
    }
    if name == "mnist28":
        settings = {way: scale_to_28(of) for way, of in settings.items()}
    found: dict[str, list[np.ndarray]] = {way: [] for way in METHODS}
    images: dict[str, int] = {}
    out: dict[str, Any] = {}
    for seed in range(args.seeds):
        models: dict[str, Any] = {}  # Two methods with the same settings share a fit.
        for way, of in settings.items():
            plain = {} if of["recognition_tangent_weight"] else {"tangents": (), "tangent_smoothing": 0.6}
            key = json.dumps(dict(sorted((of | plain).items())))
            if key not in models:
                models[key] = fit_classifier(name, x, y, args.seed + seed, args.jobs, **of)
            model = models[key]
            moved = make_tangent_spec(name, of) if way == "tangent distance" else None
            found[way].append(compute_class_errors(model, test_x, moved))
            images[way] = len(model.means_) * (1 + model.n_dims_) // len(model.classes_)
            print(
                name, way, seed, compute_errors_at_rejects(found[way][-1], test_y), model.n_iter_, flush=True
            )
        out = {"rows": [len(x), len(test_x)]}
        wrong = {way: np.array([one.argmin(axis=1) != test_y for one in of]) for way, of in found.items()}
        for way, of_way in found.items():
            curves = np.array([compute_errors_at_rejects(one, test_y) for one in of_way])
            out[way] = {
                "settings": settings[way],
                "seeds": len(of_way),
                "images_a_class": images[way],
                "at_rejects": {
                    f"{r:g}": summarise_seeds(of) for r, of in zip(REJECTED_SHARES, curves.T, strict=True)
                },
                "by_error_at_0.1": summarise_seeds(
                    compute_errors_at_rejects(one, test_y, "error")[-1] for one in of_way
                ),
                "wrong_rows": [" ".join(map(str, np.flatnonzero(one))) for one in wrong[way]],
            }
        floats = {way: one.astype(float) for way, one in wrong.items()}
        out["p"] = {
            f"{a}, {b}": compute_p_value(floats[a], floats[b]) for a, b in itertools.combinations(METHODS, 2)
        }
        write_part(args.out, args.part, args.seed, out)
    return out


def mark_wrong_rows(rows: list[str], n: int) -> np.ndarray:
    """Return an array (seeds, n) that is 1 at the listed wrong rows."""
    out = np.zeros((len(rows), n))
    for one, some in zip(out, rows, strict=True):
        one[[int(row) for row in some.split()]] = 1.0
    return out


def scale_to_28(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings for 28 x 28 pixels from those for 16 x 16: lengths in pixels grow by 1.5.

    The 16 x 16 pixels are averages of the inner 24 x 24.
    """
    return settings | {
        key: round(1.5 * settings[key], 2) for key in ("smoothing", "tangent_smoothing") if settings.get(key)
    }


# A distance uses the tangents of this number of rows: of none, of the test row, or of both rows.
TANGENT_SIDES = {"Euclidean": 0, "one-sided": 1, "two-sided": 2}


def compute_neighbour_distances(
    name: str, settings: dict[str, Any], x: np.ndarray, y: np.ndarray, asked: np.ndarray
) -> dict[str, np.ndarray]:
    """Return distances (n, classes) of rows ``asked`` to the nearest row x of each class y, by TANGENT_SIDES.

    The one-sided distance is measured from the tangent plane of the asked row. The two-sided distance is that
    of both tangent planes; it is computed for the eight nearest rows by the one-sided distance.
    """
    shape, kernel = get_image_shape(name), make_backend("cpu").kernel("linear_mixture_tangent_rows")
    if settings["smoothing"]:
        map_ = make_smoothing_matrix(shape, settings["smoothing"]).astype(np.float32)
        x, asked = x @ map_, asked @ map_

    def tangents(rows: np.ndarray) -> Any:
        return kernel(rows.astype(np.float32), shape, settings["tangents"], settings["tangent_smoothing"])

    classes = [Dataset.from_arrays(x[y == c], y[y == c]) for c in np.unique(y)]
    return {
        way: np.stack(
            [
                nearest_neighbours(
                    rows, asked, tangents=tangents, sides=sides, n_candidates=8, damping=GAMMA
                ).distances
                for rows in classes
            ],
            axis=1,
        )
        for way, sides in TANGENT_SIDES.items()
    }


def compare_neighbours(name: str, args: Any) -> dict[str, Any]:
    """Return the errors of the nearest training row; held-out rows choose smoothing and tangents."""
    ways = json.loads(args.out.read_text())["parts"][f"table2_{name}"]["result"]
    x, y = load_rows(name, "train")
    test_x, test_y = load_rows(name, "test")
    some, held = next(iter(split_rows(name, args.seed)))
    held = held[:1500]
    sets = (SEVEN_TANGENTS,) if name.startswith("mnist") else (SIX_TANGENTS, SEVEN_TANGENTS)
    tried = list_combinations(smoothing=(0.0, 0.5), tangents=sets, tangent_smoothing=(0.6,))
    errors: dict[str, list[float]] = {}
    for settings in tried:
        for way, one in compute_neighbour_distances(name, settings, x[some], y[some], x[held]).items():
            errors.setdefault(way, []).append(float((one.argmin(axis=1) != y[held]).mean()))
        print(name, settings, {way: of[-1] for way, of in errors.items()}, flush=True)
    best = {way: int(np.argmin(of)) for way, of in errors.items()}
    tested = {
        i: compute_neighbour_distances(name, tried[i], x, y, test_x) for i in sorted(set(best.values()))
    }
    out = {}
    for way, i in best.items():
        settings, found = tried[i], tested[i][way]
        label = f"nearest, {way}"
        wrong = (found.argmin(axis=1) != test_y).astype(float)[None]
        planes = 1 + (len(settings["tangents"]) if way == "two-sided" else 0)
        errors_of = zip(REJECTED_SHARES, compute_errors_at_rejects(found, test_y), strict=True)
        out[label] = {
            "settings": settings,
            "images_a_class": len(x) * planes // len(np.unique(y)),
            "at_rejects": {f"{r:g}": {"mean": round(e, 5)} for r, e in errors_of},
            "p": {
                other: compute_p_value(mark_wrong_rows(of["wrong_rows"], len(test_y)), wrong)
                for other, of in ways.items()
                if "wrong_rows" in of
            },
        }
        print(label, out[label], flush=True)
    return out


# Weights of tangents (in clustering, in recognition) for each row of the paper's Table 1.
TABLE1_WEIGHTS = {
    "none, none": (0.0, 0.0),
    "none, light": (0.0, LIGHT_WEIGHT),
    "heavy, light": (HEAVY_WEIGHT, LIGHT_WEIGHT),
    "heavy, none": (HEAVY_WEIGHT, 0.0),
    "heavy, heavy": (HEAVY_WEIGHT, HEAVY_WEIGHT),
}


def measure_table1(name: str, args: Any) -> dict[str, Any]:
    """Cross-validate 10 sub-classes per class with the weights of tangents of the paper's Table 1."""
    data, rows = ("usps", int(name[4:] or 0)) if name.startswith("usps") else (name, 11_000)
    x, y = load_rows(data, "train")
    smoothing = read_chosen_settings(args, data, "plain")["smoothing"]
    dims = (3, 5, 10) if rows and rows < 1000 else (10,)
    out: dict[str, Any] = {"rows": rows or len(x), "n_components": 10, "folds": FOLDS, "seeds": args.seeds}
    for h in dims:
        wrong = {}
        for weights, (clustering, recognition) in TABLE1_WEIGHTS.items():
            found = np.full((args.seeds, len(x)), np.nan)
            for seed in range(args.seeds):
                for some, held in split_rows(data, args.seed + seed, rows=rows or len(x)):
                    model = fit_classifier(
                        data,
                        x[some],
                        y[some],
                        args.seed + seed,
                        args.jobs,
                        n_components=10,
                        n_dims=h,
                        smoothing=smoothing,
                        tangents=PAPER_TANGENTS,
                        tangent_weight=clustering,
                        recognition_tangent_weight=recognition,
                    )
                    found[seed, held] = compute_class_errors(model, x[held]).argmin(axis=1) != y[held]
            wrong[weights] = found
            print(name, h, weights, summarise_seeds(np.nanmean(found, axis=1)), flush=True)
        out[f"n_dims {h}"] = {
            weights: {
                "error": summarise_seeds(np.nanmean(one, axis=1)),
                "p": compute_p_value(one, wrong["none, none"]),
            }
            for weights, one in wrong.items()
        }
    return out


def compare_variants(name: str, args: Any, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return held-out and test errors of several variants, with p-values against the first.

    ``variants`` has, by name, parameters that replace some of those chosen for the method without tangents.
    """
    x, y = load_rows(name, "train")
    test_x, test_y = load_rows(name, "test")
    settings, large = read_chosen_settings(args, name, "plain"), name.startswith("mnist")
    about = {"settings": settings, "seeds": args.seeds}
    wrong, out = {}, {}
    kept = read_measured_variants(args, about)
    for variant, params in variants.items():
        if variant in kept and kept[variant]["params"] == params:
            out[variant], wrong[variant] = (
                kept[variant],
                mark_wrong_rows(kept[variant]["wrong_rows"], len(test_y)),
            )
            continue
        held_wrong, tests, dims = [], [], []

        def fitted(rows: Any, seed: int, params: dict[str, Any] = params) -> Any:
            return fit_classifier(name, x[rows], y[rows], seed, args.jobs, **(settings | params))

        for seed in range(args.seeds if large else 1):
            for some, held in split_rows(name, args.seed + seed):
                model = fitted(some, args.seed + seed)
                held_wrong.append(compute_class_errors(model, x[held]).argmin(axis=1) != y[held])
                if (
                    large
                ):  # MNIST has one fixed set of held-out rows, so this model predicts the test rows too.
                    tests.append(compute_class_errors(model, test_x).argmin(axis=1) != test_y)
                    dims.append(model.n_dims_)
        for seed in range(0 if large else args.seeds):
            model = fitted(slice(None), args.seed + seed)
            tests.append(compute_class_errors(model, test_x).argmin(axis=1) != test_y)
            dims.append(model.n_dims_)
        wrong[variant] = np.array(tests, dtype=float)
        out[variant] = {
            "params": params,
            "n_dims": sorted(set(dims)),
            "held_out": round(float(np.concatenate(held_wrong).mean()), 5),
            "test": summarise_seeds(wrong[variant].mean(axis=1)),
            "p": compute_p_value(wrong[variant], wrong[next(iter(wrong))]),
        }
        print(name, variant, out[variant], flush=True)
        out[variant]["wrong_rows"] = [" ".join(map(str, np.flatnonzero(one))) for one in wrong[variant]]
        # A run with --resume skips the variants that are written here.
        write_part(args.out, args.part, args.seed, about | {"ways": out})
    return about | {"ways": out}


def read_measured_variants(args: Any, about: dict[str, Any]) -> dict[str, Any]:
    """Return the variants that an earlier run has measured with settings ``about``; {} without --resume."""
    if not args.resume or not args.out.exists():
        return {}
    found = json.loads(args.out.read_text())["parts"].get(args.part, {}).get("result", {})
    return dict(found["ways"]) if about.items() <= found.items() else {}


def compare_thickness(name: str, args: Any) -> dict[str, Any]:
    """Return held-out errors of tangent distance with and without the tangent of thickness."""
    settings, search = read_chosen_settings(args, name, "tangent distance"), HeldOutErrors(name, args)
    ways = {"six tangents": SIX_TANGENTS, "and thickness": SEVEN_TANGENTS}
    found = {way: search.measure_errors(**settings | {"tangents": used}) for way, used in ways.items()}
    return {way: round(errors["tangent-distance"], 5) for way, errors in found.items()}


def compare_extensions(name: str, args: Any) -> dict[str, Any]:
    """Measure errors with soft assignment at several temperatures, and with other likelihoods.

    Temperatures are multiples of the noise that hard assignment finds.
    """
    x, y = load_rows(name, "train")
    noise = fit_classifier(
        name, x, y, args.seed, args.jobs, **read_chosen_settings(args, name, "plain")
    ).noise_
    sigma2 = float(f"{np.mean(noise):.2g}")
    ways: dict[str, dict[str, Any]] = {"hard": {}}
    ways |= {
        f"soft, sigma² {t:g} x": {"assignment": "soft", "temperature": t * sigma2} for t in (1.0, 4.0, 16.0)
    }
    ways["soft, sigma² learned"] = {"assignment": "soft"}
    ways["code cost"] = {"likelihood": "code-cost"}
    ways["own noise"] = {"likelihood": "ppca"}
    ways["own noise, soft"] = {"likelihood": "ppca", "assignment": "soft"}
    ways["factor analysis"] = {"likelihood": "factor-analysis"}
    return {"sigma2": sigma2} | compare_variants(name, args, ways)


def compare_floors(name: str, args: Any) -> dict[str, Any]:
    """Measure errors if the noise of sub-classes and pixels has a lower bound."""
    ways: dict[str, dict[str, Any]] = {"hard": {}}
    for title, kind in (("own noise", "ppca"), ("factor analysis", "factor-analysis")):
        ways |= {f"{title}, floor {f:g}": {"likelihood": kind, "noise_floor": f} for f in (0.1, 0.3)}
    return compare_variants(name, args, ways)


def compare_dims(name: str, args: Any) -> dict[str, Any]:
    """Measure errors with fixed numbers of latent dimensions, in place of the chosen number."""
    ways: dict[str, dict[str, Any]] = {"chosen": {}} | {f"h = {h}": {"n_dims": h} for h in (6, 10, 14, 20)}
    return compare_variants(name, args, ways)


def compare_own_dims(name: str, args: Any) -> dict[str, Any]:
    """Measure errors by the rule for the dimensions of a sub-class: a share of its variance, or a number."""
    x, y = load_smoothed_rows(name, "train", args)
    test_x, test_y = load_smoothed_rows(name, "test", args)
    rules = {f"own {s:g} of the variance": s for s in (0.8, 0.9, 0.95)} | {f"h = {h}": h for h in (12, 28)}
    out: dict[str, Any] = {"n_components": 10, "folds": FOLDS, "seeds": args.seeds}
    for title, rule in rules.items():
        held_wrong, tests, kept = [], [], []
        for seed in range(args.seeds):
            for some, held in split_rows(name, args.seed + seed):
                found = np.stack(
                    [compute_class_distances(m, x[held]) for m in fit_hard_em(x[some], y[some], rule, seed)]
                )
                held_wrong.append(np.unique(y)[found.argmin(axis=0)] != y[held])
            class_models = fit_hard_em(x, y, rule, seed)
            found = np.stack([compute_class_distances(m, test_x) for m in class_models])
            tests.append(np.mean(np.unique(y)[found.argmin(axis=0)] != test_y))
            kept += [len(basis) for model in class_models for _, basis in model]
        out[title] = {
            "held_out": round(float(np.concatenate(held_wrong).mean()), 5),
            "test": summarise_seeds(tests),
            "n_dims": {"least": min(kept), "mean": round(float(np.mean(kept)), 1), "largest": max(kept)},
        }
        print(name, title, out[title], flush=True)
    return out


def load_smoothed_rows(name: str, part: str, args: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return rows with the smoothing that cross-validation chose, and their labels."""
    x, y = load_rows(name, part)
    smoothing = read_chosen_settings(args, name, "plain")["smoothing"]
    return (x @ make_smoothing_matrix(get_image_shape(name), smoothing)).astype(np.float32), y


# Linear models of one class: (mean, basis) of each sub-class; the basis has h directions (h, features).
ClassModel = list[tuple[np.ndarray, np.ndarray]]


def fit_hard_em(x: np.ndarray, y: np.ndarray, rule: float, seed: int) -> list[ClassModel]:
    """Fit ten sub-classes of each class by EM with hard assignment; return them by class.

    A ``rule`` below 1 is the share of variance that a sub-class keeps; otherwise its number of directions.
    """
    return [fit_class(x[y == label], rule, seed) for label in np.unique(y)]


def fit_class(x: np.ndarray, rule: float, seed: int) -> ClassModel:
    labels = KMeans(10, n_init=1, random_state=seed).fit_predict(x)
    for _ in range(30):
        models = [find_principal_directions(x[labels == q], rule) for q in np.unique(labels)]
        found = compute_component_distances(models, x).argmin(axis=0)
        if np.array_equal(found, labels):
            break
        labels = found
    return models


def find_principal_directions(x: np.ndarray, rule: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of rows and their principal directions.

    A ``rule`` below 1 is the share of variance that the directions keep; otherwise it is their number.
    """
    mean = x.mean(axis=0)
    _, s, v = np.linalg.svd(x - mean, full_matrices=False)
    h = int(np.searchsorted(np.cumsum(s**2), rule * np.sum(s**2)) + 1) if rule < 1 else int(rule)
    return mean, v[: min(h, len(x) - 1)]


def compute_component_distances(class_model: ClassModel, x: np.ndarray) -> np.ndarray:
    """Return squared distances (sub-classes, rows) of rows from the planes of the sub-classes."""
    deviations = [(x - mean, basis) for mean, basis in class_model]
    return np.stack([np.sum(d**2, axis=1) - np.sum((d @ basis.T) ** 2, axis=1) for d, basis in deviations])


def compute_class_distances(class_model: ClassModel, x: np.ndarray) -> np.ndarray:
    """Return squared distances of rows from the nearest plane of a class."""
    return compute_component_distances(class_model, x).min(axis=0)


def compare_stepwise(name: str, args: Any) -> dict[str, Any]:
    """Measure errors of batch EM, and of stepwise EM with 1, 2 and 3 epochs."""
    ways: dict[str, dict[str, Any]] = {"batch EM": {}}
    ways |= {f"stepwise EM, epochs: {n}": {"algorithm": "stepwise", "n_epochs": n} for n in (1, 2, 3)}
    return compare_variants(name, args, ways)


# Numbers of rows after which stepwise EM updates the parameters; the default is an eighth of all rows.
STEP_ROWS = (300, 1500)


def compare_batch_sizes(name: str, args: Any) -> dict[str, Any]:
    """Measure errors of batch EM, and of stepwise EM with 3 epochs and several numbers of rows per step."""
    online = {"algorithm": "stepwise", "n_epochs": 3}
    ways: dict[str, dict[str, Any]] = {"batch EM": {}, "stepwise EM, epochs: 3": online}
    ways |= {f"stepwise EM, {n:,} rows a step": online | {"batch_rows": n} for n in STEP_ROWS}
    return compare_variants(name, args, ways)


class RecordReads(sl.Callback):
    """Callback that records the rows and bytes that each pass of a search reads."""

    def __init__(self) -> None:
        self.passes: list[dict[str, Any]] = []

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.passes.append({key: record.get(key) for key in ("rows", "bytes_read", "candidates", "seconds")})
        if len(self.passes) % 5 == 0:
            print(len(self.passes), self.passes[-1], flush=True)


def run_search(name: str, args: Any) -> dict[str, Any]:
    """Search sizes and tangent weights on training rows; measure the best candidate on test rows."""
    x, y = load_rows(name, "train")
    test_x, test_y = load_rows(name, "test")
    some, held = next(iter(split_rows(name, args.seed)))
    large = name.startswith("mnist")
    candidates = list_combinations(
        n_components=(50, 100) if large else (10, 20),
        n_dims=(10, 14) if large else (8, 12),
        tangent_weight=(0.0, HEAVY_WEIGHT),
        recognition_tangent_weight=(0.0, LIGHT_WEIGHT),
    )
    base = sl.LinearMixtureClassifier(
        tangents=SEVEN_TANGENTS, smoothing=0.5, image_shape=get_image_shape(name), random_state=args.seed
    )
    log = RecordReads()
    with TemporaryDirectory() as folder:
        rows = store_rows(f"{folder}/rows.zarr", x[some], y[some])
        found = sl.Search(base, candidates, n_jobs=args.jobs)
        found.fit(rows, validation=(x[held], y[held]), callbacks=log, engine={"cache": 0})
        about = {"rows": len(rows), "row_bytes": rows.nbytes // len(rows)}
    results = found.cv_results_
    out = about | {
        "candidates": [
            {"params": own, "held_out": round(1 - float(score), 5), "passes": int(passes)}
            for own, score, passes in zip(
                results["params"], results["mean_test_score"], results["n_passes"], strict=True
            )
        ],
        "best": found.best_params_,
        "passes": len(log.passes),
        "rows_a_pass": sorted({one["rows"] for one in log.passes}),
        "bytes_a_pass": sorted({one["bytes_read"] for one in log.passes}),
        "reads": log.passes,
    }
    model = found.best_estimator_
    tests = {
        "error": compute_class_errors(model, test_x),
        "tangent-distance": compute_class_errors(model, test_x, make_tangent_spec(name, {})),
    }
    out["test"] = {way: round(float((one.argmin(axis=1) != test_y).mean()), 5) for way, one in tests.items()}
    return out


def store_rows(place: str, x: np.ndarray, y: np.ndarray) -> Dataset:
    """Write rows to a dataset on disk, and return it."""
    writer = create_dataset(place, len(x), x.shape[1:], str(x.dtype), y_dtype="uint8")
    for shard in range(writer.n_shards):
        a, b = writer.shard_bounds(shard)
        writer.write_shard(shard, x[a:b], y[a:b].astype(np.uint8))
    return writer.finalize()


# Numbers of training rows in a sample that chooses a temperature.
SAMPLE_ROWS = (1000, 2000, 5000, 20_000)


def measure_temperatures(name: str, args: Any) -> dict[str, Any]:
    """Return the temperatures that disjoint samples of training rows choose, and their test log-loss.

    The probability of a class is proportional to exp(-error / (2 temperature)).
    """
    x, y = load_rows(name, "train")
    test_x, test_y = load_rows(name, "test")
    model = fit_classifier(name, x, y, args.seed, args.jobs, **read_chosen_settings(args, name, "plain"))
    fitted = model._fitted
    scale = max(float(fitted.components.noise.mean()) * x.shape[1], 1e-12)
    tried = TemperaturePass(
        fitted.recogniser(),
        scale * TEMPERATURES,
        LeaveOneOut(fitted.components, fitted.counts, fitted.likelihood),
    )
    if fitted.matrix is not None:
        x = x @ fitted.matrix.astype(np.float32)
    prepared, codes = tried.prepare(None, make_backend("cpu")), np.searchsorted(model.classes_, y)
    order, step, losses = np.random.default_rng(args.seed).permutation(len(x)), SAMPLE_ROWS[0], []
    begin = time.process_time()
    for first in range(0, len(x) - step + 1, step):
        some, stats = order[first : first + step], Stats.zeros(tried.layout())
        tried.accumulate(prepared, Block(x[some], codes[some], None, 0), stats)
        losses.append(np.array(stats["loss"]))
    seconds = time.process_time() - begin
    of_test, own = compute_class_errors(model, test_x), np.searchsorted(model.classes_, test_y)

    def log_loss(t: float) -> float:
        p = probabilities(of_test, t)
        return float(-np.log(np.maximum(p[np.arange(len(p)), own], 1e-300)).mean())

    out: dict[str, Any] = {"cpu_ms_a_row": round(1000 * seconds / (step * len(losses)), 4), "draws": {}}
    out["least_log_loss"] = round(min(log_loss(t) for t in tried.temperatures), 5)
    for rows in (n for n in SAMPLE_ROWS if n <= len(x)):
        parts = len(losses) // (rows // step)
        sums = [np.sum(losses[i * rows // step : (i + 1) * rows // step], axis=0) for i in range(parts)]
        found = np.array([choose_temperature(tried.temperatures, one) for one in sums])
        reported = [log_loss(t) for t in found]
        out["draws"][str(rows)] = {
            "draws": parts,
            "temperature": float(f"{found.mean():.3g}"),
            "spread": round(float(found.std(ddof=min(1, parts - 1)) / found.mean()), 4),
            "log_loss": round(float(np.mean(reported)), 5),
            "worst_log_loss": round(float(np.max(reported)), 5),
        }
        print(name, rows, out["draws"][str(rows)], flush=True)
    return out


def make_hook_points(angle: np.ndarray) -> np.ndarray:
    """Return points (n, 2) of a flat ellipse at angles in radians; a part of it looks like a hook."""
    return np.stack([2 * np.cos(angle), 0.5 * np.sin(angle)], axis=-1)


def choose_three_lines(points: np.ndarray, tangents: np.ndarray, weight: float) -> list[list[int]]:
    """Return the best partition of four points into three lines, as lists of indices.

    Two points share a line: the pair with the smallest error of points and weighted tangents. If several
    pairs have the same error, the closest pair is taken.
    """

    def cost(pair: tuple[int, int]) -> tuple[float, float]:
        two = points[list(pair)] - points[list(pair)].mean(axis=0)
        t = tangents[list(pair)]
        values = np.linalg.eigvalsh(two.T @ two + weight * t.T @ t)
        return round(float(values[0]), 9), float(np.linalg.norm(two[0] - two[1]))

    pair = min(itertools.combinations(range(len(points)), 2), key=cost)
    return [list(pair), *([i] for i in range(len(points)) if i not in pair)]


def draw_curve(path: Any) -> None:
    """Draw Figure 1 into a PNG file: three linear models of four points, with their tangents and without."""
    figure = new_figure(9, 3)
    angles = np.deg2rad([150.0, 95.0, 30.0, -30.0])
    points = make_hook_points(angles)
    tangents = (make_hook_points(angles + 1e-4) - points) / 1e-4
    tangents /= np.linalg.norm(tangents, axis=1, keepdims=True)
    for ax, weight, title in zip(
        figure.subplots(1, 2, sharex=True, sharey=True),
        (0.0, 0.1),
        ("points alone", "points and tangents"),
        strict=True,
    ):
        ax.plot(
            *make_hook_points(np.linspace(np.deg2rad(175), np.deg2rad(-75), 200)).T, color="0.7", zorder=0
        )
        for place, (point, t) in enumerate(zip(points, tangents, strict=True)):
            ax.plot(*np.stack([point - 0.25 * t, point + 0.25 * t]).T, color="k", lw=2.5)
            ax.annotate(str(place + 1), point, (6, 4), textcoords="offset points")
        for number, group in enumerate(choose_three_lines(points, tangents, weight)):
            some, t = points[group], tangents[group]
            centred = some - some.mean(axis=0)
            second = centred.T @ centred + weight * t.T @ t
            way = np.linalg.eigh(second)[1][:, -1] if second.any() else np.zeros(2)
            if second.any():
                ends = some.mean(axis=0) + 0.9 * np.outer([-1, 1], way)
                ax.plot(*ends.T, color=f"C{number}", ls="--")
            ax.plot(*some.T, "o", color=f"C{number}", ms=8)
        ax.set(title=title, xlim=(-2.3, 2.7), ylim=(-0.8, 0.8), aspect="equal", xticks=[], yticks=[])
    write_png(figure, path)


def draw_images(axes: Any, x: np.ndarray, shape: tuple[int, int], **style: Any) -> None:
    """Draw one image into each of the axes."""
    for ax, one in zip(axes, x, strict=True):
        ax.imshow(one.reshape(shape), cmap="gray_r", **style)
        ax.axis("off")


def draw_figures(name: str, args: Any) -> dict[str, Any]:
    """Draw Figures 1, 2 and 3 of the paper into PNG files."""
    x, y = load_rows(name, "train")
    test_x, test_y = load_rows(name, "test")
    shape, twos, places = get_image_shape(name), x[y == 2], []

    def place(what: str) -> Any:
        places.append(f"linear_mixture_{what}.png")
        return args.out.parent / places[-1]

    draw_curve(place("curve"))
    common = {
        "n_components": 10,
        "n_dims": 10,
        "tangents": PAPER_TANGENTS,
        "image_shape": shape,
        "n_jobs": args.jobs,
    }
    figure = new_figure(9, 2.2)
    grid_of = figure.subplots(2, 10)
    for row, weight in zip(grid_of, (0.0, HEAVY_WEIGHT), strict=True):
        d = sl.LinearMixture(
            tangent_weight=weight, recognition_tangent_weight=weight, random_state=args.seed, **common
        ).fit(twos)
        draw_images(row, d.means_[np.argsort(-d.weights_)], shape, vmin=0, vmax=1)
    for row, label in zip(grid_of, "ab", strict=True):
        row[0].set_title(f"({label})", loc="left")
    write_png(figure, place("twos"))

    model = fit_classifier(name, x, y, args.seed, args.jobs, n_components=10, n_dims=10)
    one = test_x[test_y == 2][:1]
    figure = new_figure(5.5, 2.8)
    titles = ("a 2", "mean of its model", "reconstruction", "what is left")
    for row, label in zip(figure.subplots(2, 4), (2, 0), strict=True):
        q, found = model.encode(one, label=label)[1][0], model.reconstruct(one, label=label)[0]
        draw_images(row[:3], np.stack([one[0], model.means_[q], found]), shape, vmin=0, vmax=1)
        draw_images(row[3:], (one - found), shape, vmin=-1, vmax=1)
        row[3].set_title(f"error {((one[0] - found) ** 2).sum():.1f}", fontsize=8)
        if label == 2:
            for ax, title in zip(row[:3], titles, strict=False):
                ax.set_title(title, fontsize=8)
    write_png(figure, place("reconstruction"))
    return {"drawn": places}


def main() -> None:
    parts: dict[str, Callable[[str, Any], dict[str, Any]]] = {
        "choose": choose_settings,
        "table2": measure_table2,
        "neighbours": compare_neighbours,
        "table1": measure_table1,
        "thickness": compare_thickness,
        "extensions": compare_extensions,
        "floors": compare_floors,
        "dims": compare_dims,
        "own_dims": compare_own_dims,
        "stepwise": compare_stepwise,
        "steps": compare_batch_sizes,
        "search": run_search,
        "temperature": measure_temperatures,
        "figures": draw_figures,
    }
    arguments = parser(__doc__, "linear_mixture_paper")
    arguments.add_argument("--parts", required=True, help=f"of {', '.join(parts)}, with _DATA")
    arguments.add_argument("--seeds", type=int, default=5, help="number of fits of each setting")
    arguments.add_argument("--jobs", type=int, default=1)
    arguments.add_argument("--resume", action="store_true", help="resume interrupted parts")
    args = arguments.parse_args()
    wanted = [part.rsplit("_", 1) for part in args.parts.split(",")]
    if unknown := [what for what, *_ in wanted if what not in parts]:
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(parts)}")
    for what, name in wanted:
        args.part = f"{what}_{name}"
        write_part(args.out, args.part, args.seed, parts[what](name, args))


if __name__ == "__main__":
    main()
