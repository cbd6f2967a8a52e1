"""Small datasets for the tests of estimators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.estimators.crbm_cases import Pair, make_patterns


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 600 of scikit-learn's digits as uint8 (600, 64), and their labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[:600].astype(np.uint8), y[:600].astype(np.int64)


@pytest.fixture(scope="session")
def held_out() -> tuple[np.ndarray, np.ndarray]:
    """Return 300 other digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[600:900].astype(np.uint8), y[600:900].astype(np.int64)


@pytest.fixture(scope="session")
def read_files_of() -> Callable[[Path], dict[str, bytes]]:
    """Return a function that returns the content of all files in a folder, by relative name."""
    return lambda folder: {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Return noisy and clean rows of four patterns, for conditional RBMs."""
    return make_patterns(300, 1)


@pytest.fixture(scope="module")
def held_pair() -> Pair:
    """Return other rows of the same patterns."""
    return make_patterns(120, 2)
