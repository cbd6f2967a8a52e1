"""Fixtures for the tests of estimators: small datasets, and a function that reads all files of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.estimators.crbm_cases import Pair, make_patterns


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the first 600 digits of scikit-learn as uint8 of shape (600, 64), and their labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[:600].astype(np.uint8), y[:600].astype(np.int64)


@pytest.fixture(scope="session")
def held_out() -> tuple[np.ndarray, np.ndarray]:
    """Return the next 300 digits, which are not in ``digits``, and their labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[600:900].astype(np.uint8), y[600:900].astype(np.int64)


@pytest.fixture(scope="session")
def read_files_of() -> Callable[[Path], dict[str, bytes]]:
    """Return a function that reads all files of a folder into a dict from relative path to content."""
    return lambda folder: {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Return 300 noisy rows and the 300 clean rows of the same four patterns, for conditional RBMs."""
    return make_patterns(300, 1)


@pytest.fixture(scope="module")
def held_pair() -> Pair:
    """Return 120 other noisy rows and their clean rows, with the same four patterns as in ``pair``."""
    return make_patterns(120, 2)
