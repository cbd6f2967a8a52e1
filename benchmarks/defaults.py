"""Test errors of the classifiers with default parameters, beside scikit-learn's.

    python benchmarks/defaults.py

Sets: breast cancer, wine, iris and digits of scikit-learn and, where the environment variable
SCALELATENT_DATA names a folder with real data, New-Thyroid, Isolet1, UMIST, COIL20 and USPS. Each set is
split into 70 % training rows and 30 % test rows (USPS as it comes) by several seeds. Rows of measurements are
standardised by the training rows; pixels and sounds are taken as they are. Beside the defaults of now stand
those of version 0.1.0 of `LinearMixtureClassifier` (20 sub-classes of 10 dimensions), logistic regression and
three nearest neighbours.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import data_folder, parser, usps, write
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

import scalelatent as sl

SPLITS = 5
MODELS: dict[str, Callable[[int], Any]] = {
    "CapsuleRegression": lambda seed: sl.CapsuleRegression(random_state=seed),
    "LinearMixtureClassifier": lambda seed: sl.LinearMixtureClassifier(random_state=seed),
    "LinearMixtureClassifier, 20 of 10 dimensions": lambda seed: sl.LinearMixtureClassifier(
        n_components=20, n_dims=10, random_state=seed
    ),
    "logistic regression": lambda seed: LogisticRegression(max_iter=2000),
    "3 nearest neighbours": lambda seed: KNeighborsClassifier(3),
}
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def small_sets() -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    """Name, rows, labels, and whether the rows are standardised."""
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


def splits(x: np.ndarray, y: np.ndarray, standardise: bool, seed: int) -> Iterator[Split]:
    """Training rows, test rows and their labels."""
    for number in range(SPLITS):
        train, test, codes, other = train_test_split(
            x, y, test_size=0.3, stratify=y, random_state=seed + number
        )
        if standardise:
            scaler = StandardScaler().fit(train)
            train, test = scaler.transform(train), scaler.transform(test)
        yield train, codes, test, other


def measure(name: str, rows: Iterator[Split], seed: int) -> dict[str, Any]:
    """Mean error in percent, its standard deviation over splits, and seconds of a fit, by model."""
    errors: dict[str, list[float | None]] = {model: [] for model in MODELS}
    seconds: dict[str, list[float]] = {model: [] for model in MODELS}
    for number, (train, codes, test, other) in enumerate(rows):
        for model, make in MODELS.items():
            begin = time.perf_counter()
            try:
                fitted = make(seed + number).fit(train, codes)
            except ValueError:  # more dimensions or sub-classes than the set has room for
                errors[model].append(None)
                continue
            seconds[model].append(time.perf_counter() - begin)
            errors[model].append(100 * float((fitted.predict(test) != other).mean()))
    line: dict[str, Any] = {"set": name, "shape": list(train.shape), "splits": number + 1, "models": {}}
    for model, found in errors.items():
        known = [error for error in found if error is not None]
        line["models"][model] = (
            "refused"
            if len(known) < len(found)
            else {
                "error": round(float(np.mean(known)), 2),
                "deviation": round(float(np.std(known)), 2),
                "seconds": round(float(np.median(seconds[model])), 3),
            }
        )
    shown = (f"{m} {v if v == 'refused' else v['error']}" for m, v in line["models"].items())
    print(f"{name}: {', '.join(shown)}", flush=True)
    return line


def main() -> None:
    given = parser(__doc__, "defaults").parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    lines = [
        measure(name, splits(x, y, standardise, given.seed), given.seed)
        for name, x, y, standardise in small_sets()
    ]
    if os.environ.get("SCALELATENT_DATA"):
        lines.append(measure("USPS", iter([(*usps(), *usps("test"))]), given.seed))
    write(given.out, given.seed, lines)


if __name__ == "__main__":
    main()
