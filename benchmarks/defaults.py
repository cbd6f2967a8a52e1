"""Measure the models with default parameters, and compare with scikit-learn and with searched parameters.

    python benchmarks/defaults.py errors subsets likelihoods calibration best architectures clusters densities
        outputs parts documents

The data sets are breast cancer, wine, iris and digits of scikit-learn and, with SCALELATENT_DATA,
New-Thyroid, Isolet1, UMIST, COIL20, USPS and 5,000 rows of MNIST. Several seeds split each set into 70 %
training rows and 30 % test rows; USPS and MNIST have their own split. Measured values are standardised by the
training rows; pixels and sounds are not.

errors       Test errors and seconds of the classifiers. Capsule regression is measured with default
             parameters, with one model for all classes ("multiclass"), and as in its paper (multiclass, batch
             EM, no intercept, no ridge).
subsets      By how much test errors exceed those of two simple methods, with 20 random subsets of the
             features of the four sets of scikit-learn; a subset has between one and all features.
likelihoods  Test errors and seconds of linear mixtures by the reconstruction error, by factor analysis, and
             by the default, which chooses one of them; errors of an RBF SVM on standardised rows. Rows come
             in their own units, and generated rows are added. Means over at most three splits.
calibration  Expected calibration error of capsule regression on test rows, in 15 bins of equally many rows.
             The temperature is chosen on a tenth of the training rows, on all training rows, or is 1.
best         Test error of `sl.Search` with three folds of the shuffled training rows over at most twenty
             candidates, on one split of each set.
architectures
             Errors, calibration errors and CPU seconds of capsule regression with one model for all classes,
             one per class, and one per pair of classes, on held-out rows (of USPS and MNIST, of the training
             rows), also of generated sets of 2 to 100 classes. These results decided the default.
clusters     NMI (normalised mutual information) of bootstrap networks, of k-means and of spectral clustering:
             means over three seeds.
densities    Mean log-likelihood of test rows in nats: LinearMixture(likelihood="ppca"), GaussianMixture and
             PCA, means over the splits. All rows are standardised; digits first get uniform noise with the
             width of a grey level.
outputs      Wrong labels in percent: conditional RBMs, one logistic regression per label, and three
             neighbours. The labels are the lower half of binary digits, with the upper half as input, and the
             topics of documents.
parts        Test errors of compositional networks with 20 templates (one more layer, which assigns a template
             to each image) on binary digits: ten classes, and eights against all other digits.
documents    Test errors of the classifiers on documents with one topic: CSR counts scaled to length 1.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from common import data_folder, mnist, parser, rcv1_subset, single_topics, usps, write_part
from sklearn.cluster import KMeans, SpectralClustering
from sklearn.datasets import (
    load_breast_cancer,
    load_digits,
    load_iris,
    load_wine,
    make_classification,
    make_hastie_10_2,
    make_moons,
)
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import train_test_split
from sklearn.multioutput import MultiOutputClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize
from sklearn.svm import SVC

import scalelatent as sl
from scalelatent.evaluation.clustering import nmi

SPLITS = 5
# Parameters of capsule regression as in Saul (2021).
PAPER_SETTINGS: dict[str, Any] = {
    "architecture": "multiclass",
    "algorithm": "em",
    "fit_intercept": False,
    "ridge": 0,
    "temperature": 1.0,
}
MODELS: dict[str, Callable[[int], Any]] = {
    "CapsuleRegression": lambda seed: sl.CapsuleRegression(random_state=seed),
    "CapsuleRegression, multiclass": lambda seed: sl.CapsuleRegression(
        architecture="multiclass", random_state=seed
    ),
    "CapsuleRegression, the paper's": lambda seed: sl.CapsuleRegression(random_state=seed, **PAPER_SETTINGS),
    "LinearMixtureClassifier": lambda seed: sl.LinearMixtureClassifier(random_state=seed),
    "logistic regression": lambda seed: LogisticRegression(max_iter=2000),
    "3 nearest neighbours": lambda seed: KNeighborsClassifier(3),
    "RBF SVM": lambda seed: SVC(),
}
# Parameter values that the measurement "best" searches: twenty combinations (candidates) per model.
GRIDS: dict[str, dict[str, list[Any]]] = {
    "CapsuleRegression": {"capsule_dim": [1, 2, 4, 8, 16], "n_epochs": [20, 100], "momentum": [0.0, 0.9]},
    "LinearMixtureClassifier": {"n_components": [1, 2, 4, 8, 16], "n_dims": [1, 3, 6, 10]},
}
# A split of a data set: training rows, their labels, test rows and their labels.
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def load_small_sets() -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    """Yield (name, rows, labels, whether its rows are to be standardised) of each small data set."""
    loaders = {"breast cancer": load_breast_cancer, "wine": load_wine, "iris": load_iris}
    for name, load in loaders.items():
        yield name, *load(return_X_y=True), True
    yield "digits", *load_digits(return_X_y=True), False
    if os.environ.get("SCALELATENT_DATA"):
        from scipy.io import loadmat

        small = data_folder() / "small"
        found = np.load(small / "new_thyroid.npz")
        yield "New-Thyroid", found["X"], found["y"], True
        for name, file in (("Isolet1", "Isolet.mat"), ("COIL20", "COIL20.mat")):
            found = loadmat(small / file)
            yield name, found["X"].astype(np.float32), found["Y"].ravel(), False
        found = np.load(small / "umist.npz")
        yield "UMIST", found["X"] / np.float32(255), found["y"], False


def make_splits(x: np.ndarray, y: np.ndarray, standardise: bool, seed: int) -> Iterator[Split]:
    """Yield random stratified splits (70 % training rows); ``standardise`` scales by the training rows."""
    for number in range(SPLITS):
        train, test, codes, truth = train_test_split(
            x, y, test_size=0.3, stratify=y, random_state=seed + number
        )
        if standardise:
            scaler = StandardScaler().fit(train)
            train, test = scaler.transform(train), scaler.transform(test)
        yield train, codes, test, truth


def load_split_sets(max_rows: int = 10_000) -> Iterator[tuple[str, Split]]:
    """Yield (name, split) of USPS, of 5,000 rows of MNIST and, if ``max_rows`` allows, of MNIST."""
    if os.environ.get("SCALELATENT_DATA"):
        yield "USPS", (*usps(), *usps("test"))
        yield "MNIST, 5,000 rows", (*mnist(slice(5000)), *mnist(part="test"))
        if max_rows >= 60_000:
            yield "MNIST", (*mnist(), *mnist(part="test"))


def measure_set(name: str, rows: Iterable[Split], seed: int) -> dict[str, Any]:
    """Return each model's mean test error in percent, its standard deviation, and the median fit seconds."""
    errors: dict[str, list[float]] = {model: [] for model in MODELS}
    seconds: dict[str, list[float]] = {model: [] for model in MODELS}
    for number, (train, codes, test, truth) in enumerate(rows):
        for model, make in MODELS.items():
            begin = time.perf_counter()
            fitted = make(seed + number).fit(train, codes)
            seconds[model].append(time.perf_counter() - begin)
            errors[model].append(100 * float((fitted.predict(test) != truth).mean()))
    line: dict[str, Any] = {"set": name, "shape": list(train.shape), "splits": number + 1, "models": {}}
    for model, found in errors.items():
        line["models"][model] = {
            "error": round(float(np.mean(found)), 2),
            "deviation": round(float(np.std(found)), 2),
            "seconds": round(float(np.median(seconds[model])), 3),
        }
    shown = (f"{model} {found['error']}" for model, found in line["models"].items())
    print(f"{name}: {', '.join(shown)}", flush=True)
    return line


def measure_errors(seed: int) -> list[dict[str, Any]]:
    """Return the test errors of all models on all data sets."""
    lines = [measure_set(name, make_splits(x, y, std, seed), seed) for name, x, y, std in load_small_sets()]
    return lines + [measure_set(name, [split], seed) for name, split in load_split_sets()]


def compare_subsets(seed: int) -> list[dict[str, Any]]:
    """Return how much larger a model's test error is than the smaller error of two simple methods.

    The simple methods are logistic regression and three nearest neighbours. "worse_than_majority" counts the
    subsets of features for which always predicting the commonest class has a smaller error.
    """
    rng, lines = np.random.default_rng(seed), []
    for name, x, y, standardise in load_small_sets():
        if name not in ("breast cancer", "wine", "iris", "digits"):
            continue
        compared = ("CapsuleRegression", "CapsuleRegression, multiclass", "LinearMixtureClassifier")
        found: dict[str, list[float]] = {model: [] for model in compared}
        worse = dict.fromkeys(found, 0)
        for number in range(20):
            columns = rng.permutation(x.shape[1])[: rng.integers(1, x.shape[1] + 1)]
            train, codes, test, truth = next(make_splits(x[:, columns], y, standardise, seed + number))

            def error(model: str, rows: Split = (train, codes, test, truth), number: int = number) -> float:
                fitted = MODELS[model](seed + number).fit(rows[0], rows[1])
                return 100 * float((fitted.predict(rows[2]) != rows[3]).mean())

            simple = min(error("logistic regression"), error("3 nearest neighbours"))
            majority = 100 * (1 - np.bincount(np.unique(truth, return_inverse=True)[1]).max() / len(truth))
            for model, differences in found.items():
                own = error(model)
                differences.append(own - simple)
                worse[model] += int(own > majority)
        line = {
            "set": name,
            "models": {
                model: {
                    "mean_excess": round(float(np.mean(d)), 2),
                    "largest_excess": round(float(np.max(d)), 2),
                    "worse_than_majority": worse[model],
                }
                for model, d in found.items()
            },
        }
        print(line, flush=True)
        lines.append(line)
    return lines


def list_unscaled_sets(seed: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield (name, rows, labels) of sets that are not standardised: measured ones, generated ones, digits."""
    for name, load in {"breast cancer": load_breast_cancer, "wine": load_wine, "iris": load_iris}.items():
        yield name, *load(return_X_y=True)
    yield "half moons", *make_moons(1000, noise=0.2, random_state=seed)
    yield "sums of squares", *make_hastie_10_2(3000, random_state=seed)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3000, 8))
    yield "equal signs of two columns", x, (x[:, 0] > 0) ^ (x[:, 1] > 0)
    x = np.eye(10)[rng.integers(0, 10, (2000, 4))].reshape(2000, 40)
    yield "one-hot columns", x, (x @ rng.normal(size=(40, 3)) + rng.normal(0, 0.3, (2000, 3))).argmax(axis=1)
    x = rng.lognormal(0, 2, (1500, 15))
    yield "log-normal columns", x, np.log(x) @ rng.normal(size=15) > 0
    for p in (20, 50, 100):
        made = {"n_informative": p // 3, "n_redundant": p // 5, "n_classes": 5, "random_state": seed}
        yield f"make_classification, {p} features", *make_classification(3000, p, **made)
    yield "digits", *load_digits(return_X_y=True)


def compare_likelihoods(seed: int) -> list[dict[str, Any]]:
    """Return errors and seconds of linear mixtures by likelihood on three splits, and of an RBF SVM."""
    kinds = {"error": "error", "factor analysis": "factor-analysis", "default": None}
    lines = []
    given = [(name, [split]) for name, split in load_split_sets()]
    for name, found in [
        (name, make_splits(x, y, False, seed)) for name, x, y in list_unscaled_sets(seed)
    ] + given:
        tried = list(islice(found, 3))
        line: dict[str, Any] = {"set": name, "shape": list(tried[0][0].shape), "splits": len(tried)}
        for kind, likelihood in kinds.items():
            errors, seconds, chosen = [], [], []
            for number, (train, codes, test, truth) in enumerate(tried):
                model = sl.LinearMixtureClassifier(likelihood=likelihood, random_state=seed + number)
                begin = time.perf_counter()
                model.fit(train, codes)
                seconds.append(time.perf_counter() - begin)
                errors.append(100 * float((model.predict(test) != truth).mean()))
                chosen.append(model.likelihood_)
            line[kind] = {"error": round(float(np.mean(errors)), 2), "seconds": round(min(seconds), 2)}
        line["default"]["chosen"] = chosen
        svm = [make_pipeline(StandardScaler(), SVC()).fit(s[0], s[1]).score(s[2], s[3]) for s in tried]
        line["RBF SVM, standardised"] = {"error": round(100 * (1 - float(np.mean(svm))), 2)}
        print(line, flush=True)
        lines.append(line)
    return lines


def compute_calibration_error(p: np.ndarray, codes: np.ndarray, bins: int = 15) -> float:
    """Return the expected calibration error in percent of probabilities p (n, classes) for true ``codes``."""
    certainty, right = p.max(axis=1), p.argmax(axis=1) == codes
    parts = np.array_split(np.argsort(certainty, kind="stable"), bins)
    return 100 * sum(abs(certainty[rows].sum() - right[rows].sum()) for rows in parts) / len(codes)


def measure_calibration(seed: int) -> list[dict[str, Any]]:
    """Return the calibration errors of capsule regression on one split of each data set."""
    sets = [(name, next(make_splits(x, y, std, seed))) for name, x, y, std in load_small_sets()]
    lines = []
    for name, (train, codes, test, truth) in [*sets, *load_split_sets(60_000)]:
        held = np.arange(len(train)) % 10 == 9
        fits = {
            "validation rows": sl.CapsuleRegression(random_state=seed).fit(
                train[~held], codes[~held], validation=(train[held], codes[held])
            ),
            "training rows": sl.CapsuleRegression(random_state=seed).fit(train, codes),
            "temperature 1": sl.CapsuleRegression(random_state=seed, temperature=1.0).fit(train, codes),
        }
        line: dict[str, Any] = {"set": name}
        for how, model in fits.items():
            found = compute_calibration_error(
                model.predict_proba(test), np.searchsorted(model.classes_, truth)
            )
            line[how] = {
                "calibration_error": round(found, 2),
                "temperature": round(model.temperature_, 3),
                "test_error": round(100 * float((model.predict(test) != truth).mean()), 2),
            }
        print(line, flush=True)
        lines.append(line)
    return lines


def make_generated_sets() -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    """Yield (name, rows, labels, True for rows to be standardised) of sets of 2, 3, 26 and 100 classes."""
    for n_classes, n_rows in ((2, 2000), (3, 2000), (26, 5200), (100, 10_000)):
        x, y = make_classification(
            n_rows, 40, n_informative=15, n_redundant=10, n_classes=n_classes, random_state=n_classes
        )
        yield f"generated, {n_classes} classes", x, y, True


def compare_architectures(seed: int, seeds: int = 3) -> list[dict[str, Any]]:
    """Return errors, CPU seconds and calibration errors of capsule regression's architectures.

    Of USPS and MNIST only training rows are split, so that their test rows do not choose a default.
    """
    given = [(name, rows[0], rows[1], False) for name, rows in load_split_sets()]
    lines = []
    for name, x, y, standardise in [*load_small_sets(), *given, *make_generated_sets()]:
        line: dict[str, Any] = {
            "set": name,
            "shape": list(x.shape),
            "classes": len(np.unique(y)),
            "models": {},
        }
        for architecture in ("multiclass", "one_vs_all", "all_vs_all"):
            found: dict[str, list[float]] = {
                key: [] for key in ("error", "calibration_error", "fit", "predict")
            }
            for number, (train, codes, test, truth) in zip(
                range(seeds), make_splits(x, y, standardise, seed), strict=False
            ):
                model = sl.CapsuleRegression(architecture=architecture, random_state=seed + number, n_jobs=1)
                begin = time.process_time()
                model.fit(train, codes)
                fitted = time.process_time()
                p = model.predict_proba(test)
                found["predict"].append(1e6 * (time.process_time() - fitted) / len(test))
                found["fit"].append(fitted - begin)
                right = np.searchsorted(model.classes_, truth)
                found["error"].append(100 * float((p.argmax(axis=1) != right).mean()))
                found["calibration_error"].append(compute_calibration_error(p, right))
            line["models"][architecture] = {
                "error": round(float(np.mean(found["error"])), 2),
                "deviation": round(float(np.std(found["error"])), 2),
                "calibration_error": round(float(np.mean(found["calibration_error"])), 2),
                "fit_seconds": round(float(np.median(found["fit"])), 3),
                "predict_microseconds_per_row": round(float(np.median(found["predict"])), 1),
            }
        print(line, flush=True)
        lines.append(line)
    return lines


def find_best_candidate(seed: int) -> list[dict[str, Any]]:
    """Return the test errors of the default parameters and of the best of at most twenty candidates."""
    sets = [(name, next(make_splits(x, y, std, seed))) for name, x, y, std in load_small_sets()]
    lines = []
    for name, (train, codes, test, truth) in [*sets, *load_split_sets()]:
        line: dict[str, Any] = {"set": name, "models": {}}
        for model, grid in GRIDS.items():
            fitted = MODELS[model](seed).fit(train, codes)
            # Candidates have at most as many dimensions as features. Capsule dimensions and components are at
            # most half of the rows of the smallest class, because a fold has fewer rows.
            fewest = np.bincount(np.unique(codes, return_inverse=True)[1]).min() // 2
            most = {"capsule_dim": min(train.shape[1], fewest), "n_components": fewest}
            most["n_dims"] = train.shape[1]
            allowed = {k: [v for v in values if v <= most.get(k, v)] for k, values in grid.items()}
            order = np.random.default_rng(seed).permutation(len(train))
            search = sl.Search(MODELS[model](seed), allowed, cv=3).fit(train[order], codes[order])
            line["models"][model] = {
                "default": round(100 * float((fitted.predict(test) != truth).mean()), 2),
                "found": round(100 * float((search.predict(test) != truth).mean()), 2),
                "parameters": search.best_params_,
            }
        print(line, flush=True)
        lines.append(line)
    return lines


def measure_clusters(seed: int, seeds: int = 3) -> list[dict[str, Any]]:
    """Return the NMI (normalised mutual information, in percent) of clusters and classes.

    There are as many clusters as classes, and all rows of a data set are clustered. Measured values are
    standardised; pixels and sounds are not.
    """
    lines = []
    for name, x, y, standardise in load_small_sets():
        rows = StandardScaler().fit_transform(x) if standardise else np.asarray(x, np.float32)
        codes = np.unique(y, return_inverse=True)[1]
        k = int(codes.max()) + 1
        line: dict[str, Any] = {"set": name, "models": {}}

        def labels(model: str, number: int, rows: np.ndarray = rows, k: int = k) -> np.ndarray:
            if model == "spectral clustering":
                near = SpectralClustering(k, affinity="nearest_neighbors", random_state=number)
                return near.fit_predict(rows)
            if model == "MultilayerBootstrapNetwork":
                network = sl.MultilayerBootstrapNetwork(n_classes=k, random_state=number)
                rows = network.fit_transform(rows)
            return KMeans(k, n_init=10, random_state=number).fit_predict(rows)

        for model in ("MultilayerBootstrapNetwork", "k-means", "spectral clustering"):
            begin = time.perf_counter()
            found = [100 * nmi(labels(model, seed + number), codes) for number in range(seeds)]
            line["models"][model] = {
                "nmi": round(float(np.mean(found)), 1),
                "seconds": round((time.perf_counter() - begin) / seeds, 2),
            }
        print(line, flush=True)
        lines.append(line)
    return lines


def measure_densities(seed: int) -> list[dict[str, Any]]:
    """Return the mean log-likelihoods of test rows, in nats, on sets of measured values and on digits."""
    rng = np.random.default_rng(seed)
    pixels, codes = load_digits(return_X_y=True)
    sets = [(name, x, y) for name, x, y, standardise in load_small_sets() if standardise]
    sets.append(("digits", pixels + rng.random(pixels.shape), codes))
    models: dict[str, Any] = {
        "LinearMixture": sl.LinearMixture(likelihood="ppca", random_state=seed),
        "GaussianMixture": GaussianMixture(random_state=seed),
        "GaussianMixture, 10 diagonal": GaussianMixture(10, covariance_type="diag", random_state=seed),
        "PCA": PCA(0.9, svd_solver="full"),
    }
    lines = []
    for name, x, y in sets:
        found: dict[str, list[float]] = {model: [] for model in models}
        for train, _, test, _ in make_splits(x, y, True, seed):
            for model, made in models.items():
                found[model].append(float(made.fit(train).score(test)))
        lines.append({"set": name, "models": {m: round(float(np.mean(s)), 2) for m, s in found.items()}})
        print(lines[-1], flush=True)
    return lines


def measure_outputs(seed: int) -> list[dict[str, Any]]:
    """Return each model's percentage of wrong labels on test rows, for tasks with several labels per row.

    The tasks are the lower half of a black-and-white digit image from its upper half and, with
    SCALELATENT_DATA, the topics of documents from their words.
    """
    digits = (load_digits().data > 7).astype(np.uint8)
    sets = {"lower halves of digits": (digits[:, :32], digits[:, 32:])}
    if os.environ.get("SCALELATENT_DATA"):
        counts, topics, _ = rcv1_subset(500)
        rows = np.sort(np.random.default_rng(seed).permutation(counts.shape[0])[:5000])
        held = topics[rows].toarray()
        common = np.argsort(-held.sum(axis=0, dtype=np.int64), kind="stable")[:20]
        sets["20 topics of documents"] = ((counts[rows].toarray() > 0).astype(np.uint8), held[:, common])
    models: dict[str, Callable[[], Any]] = {
        "ConditionalRBM": lambda: sl.ConditionalRBM(random_state=seed),
        "logistic regression": lambda: MultiOutputClassifier(LogisticRegression(max_iter=2000)),
        "3 nearest neighbours": lambda: KNeighborsClassifier(3),
    }
    lines = []
    for name, (x, v) in sets.items():
        train, test, outs, truth = train_test_split(x, v, test_size=0.3, random_state=seed)
        outs[:2] = [[0], [1]]  # LogisticRegression needs both values of each label in the rows.
        made = [(model, make()) for model, make in models.items()]
        line = classify(name, (train, outs, test, truth), made)
        line["shape"].append(v.shape[1])
        line["models"]["the commoner value"] = {
            "error": round(100 * float((truth != (outs.mean(0) > 0.5)).mean()), 2)
        }
        lines.append(line)
    return lines


def classify(name: str, rows: Split, models: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Fit each model to the split ``rows``; return its test error in percent and the seconds of its fit."""
    train, codes, test, truth = rows
    line: dict[str, Any] = {"set": name, "shape": list(train.shape), "models": {}}
    for model, made in models:
        begin = time.perf_counter()
        made.fit(train, codes)
        seconds = time.perf_counter() - begin
        wrong = 100 * float((made.predict(test) != truth).mean())
        line["models"][model] = {"error": round(wrong, 2), "seconds": round(seconds, 2)}
    print(line, flush=True)
    return line


def measure_parts(seed: int) -> list[dict[str, Any]]:
    """Return test errors of compositional networks and of two other classifiers on binary digits."""
    x, y = load_digits(return_X_y=True)
    rivals, lines = ("logistic regression", "3 nearest neighbours"), []
    for name, codes in (("digits", y), ("eights and other digits", y == 8)):
        split = next(make_splits((x > 7).astype(np.uint8), codes.astype(int), False, seed))
        network = sl.HierarchicalCompositionalNetwork(templates=20, image_shape=(8, 8), random_state=seed)
        models = [("HierarchicalCompositionalNetwork", network), *((m, MODELS[m](seed)) for m in rivals)]
        lines.append(classify(name, split, models))
        largest = 100 * (1 - np.bincount(split[3]).max() / len(split[3]))
        lines[-1]["models"]["the largest class"] = {"error": round(float(largest), 2)}
    return lines


def measure_documents(seed: int) -> list[dict[str, Any]]:
    """Return test errors of the classifiers on documents of the RCV1 subset; needs SCALELATENT_DATA."""
    counts, topics, _ = rcv1_subset()
    rows, y = single_topics(topics)
    x = normalize(counts[rows].astype(np.float32))
    train, test, codes, truth = train_test_split(x, y, test_size=0.3, stratify=y, random_state=seed)
    excluded = ("CapsuleRegression, the paper's", "RBF SVM")
    models = [(m, MODELS[m](seed)) for m in MODELS if m not in excluded]
    return [classify("RCV1, one topic", (train, codes, test, truth), models)]


MEASUREMENTS = {
    "errors": measure_errors,
    "subsets": compare_subsets,
    "likelihoods": compare_likelihoods,
    "calibration": measure_calibration,
    "architectures": compare_architectures,
    "best": find_best_candidate,
    "clusters": measure_clusters,
    "densities": measure_densities,
    "outputs": measure_outputs,
    "parts": measure_parts,
    "documents": measure_documents,
}


def main() -> None:
    arguments = parser(__doc__, "defaults")
    arguments.add_argument("parts", nargs="*", choices=MEASUREMENTS, default=["errors"])
    given = arguments.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for part in given.parts:
        write_part(given.out, part, given.seed, MEASUREMENTS[part](given.seed))


if __name__ == "__main__":
    main()
