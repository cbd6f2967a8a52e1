"""Small rows for the estimators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.estimators.crbm_cases import Pair, patterns


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """600 of scikit-learn's digits as uint8 (600, 64), and their labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[:600].astype(np.uint8), y[:600].astype(np.int64)


@pytest.fixture(scope="session")
def held_out() -> tuple[np.ndarray, np.ndarray]:
    """300 others."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x[600:900].astype(np.uint8), y[600:900].astype(np.int64)


@pytest.fixture(scope="session")
def files() -> Callable[[Path], dict[str, bytes]]:
    """All files below a folder, by relative name."""
    return lambda folder: {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Noisy and clean rows of four patterns, for conditional RBMs."""
    return patterns(300, 1)


@pytest.fixture(scope="module")
def held() -> Pair:
    """Others of the same patterns."""
    return patterns(120, 2)
