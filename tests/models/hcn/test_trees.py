"""Messages of AND, of OR and of trees equal max-marginals (largest scores) by enumeration.

Wrong implementations must fail the same checks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from scalelatent.models.hcn.kernels import reference
from tests.models.hcn.cases import draw_sweep, enumerate_messages, log_and_factor, log_or_factor

Function = Callable[..., np.ndarray]


def check_and(up: Function, down: Function) -> None:
    rng = np.random.default_rng(0)
    for a, b, below in rng.normal(0, 3, size=(200, 3)):
        want = enumerate_messages(log_and_factor, np.array([a, b, below]))
        assert_allclose([up(b, below), up(a, below), down(a, b)], want, atol=1e-12)


def check_or(up: Function, down: Function) -> None:
    rng = np.random.default_rng(1)
    for m in range(1, 9):
        for _ in range(40):
            t, below = rng.normal(0, 2, size=m), rng.normal(0, 4)
            t[rng.random(m) < 0.3] = t[0]  # Some messages are equal to the first: maxima have ties.
            want = enumerate_messages(log_or_factor, np.array([*t, below]))
            assert_allclose(up(t, below), want[:-1], atol=1e-12)
            assert_allclose(down(t), want[-1], atol=1e-12)


def check_tree(tree: Callable[..., tuple[np.ndarray, np.ndarray]]) -> None:
    """Check messages to the bits s and w of a pixel that is the OR of m pairs (s AND w), given evidence."""
    rng = np.random.default_rng(3)
    for m in range(1, 5):
        for _ in range(10):
            s, w, below = rng.normal(-1, 2, size=m), rng.normal(-1, 2, size=m), rng.normal(0, 4)

            def score(*bits: int, m: int = m, below: float = below) -> float:
                return below * max(a and b for a, b in zip(bits[:m], bits[m:], strict=True))

            want = enumerate_messages(score, np.concatenate([s, w]))
            assert_allclose(np.concatenate(tree(s, w, below)), want, atol=1e-12)


def check_pairs_of_pixels(windows: Callable[..., tuple]) -> None:
    """Check that a pixel gets all positions whose feature covers it, each with the weight at the pixel."""
    evidence, _, s, w = draw_sweep(0, 1, 2, (2, 5, 6), (2, 3), 2)
    for index in range(evidence[0].size):
        n, a, y, x = np.unravel_index(index, evidence[0].shape)
        want = [
            (s[0, n, r, c, f], w[0, a, 1 - (y - r), 2 - (x - c), f])
            for r in range(4) for c in range(4) for f in range(2)
            if 0 <= y - r < 2 and 0 <= x - c < 3
        ]  # fmt: skip
        below, of_s, of_w = windows(index, evidence[0], s[0], w[0])
        assert below == evidence[0, n, a, y, x]
        assert_array_equal(np.stack([of_s.ravel(), of_w.ravel()], axis=1), want)


def pass_or_up_wrongly(t: np.ndarray, below: float) -> np.ndarray:
    positive = np.maximum(t, 0)
    return np.minimum(below + positive.sum() - positive, np.maximum(0, -t.max()))


def flip_windows_wrongly(index: int, evidence: np.ndarray, s: np.ndarray, w: np.ndarray) -> tuple:
    below, of_s, of_w = reference.find_pairs(index, evidence, s, w)
    return below, of_s, of_w[:, ::-1]


def test_messages_of_and_equal_max_marginals() -> None:
    check_and(reference.pass_and_up, reference.pass_and_down)


def test_messages_of_or_equal_max_marginals() -> None:
    check_or(reference.pass_or_up, reference.pass_or_down)


def test_messages_of_trees_equal_max_marginals() -> None:
    check_tree(reference.pass_tree_up)


def test_the_window_of_a_pixel_has_its_pairs() -> None:
    check_pairs_of_pixels(reference.find_pairs)


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_or(pass_or_up_wrongly, reference.pass_or_down),
        lambda: check_pairs_of_pixels(flip_windows_wrongly),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_wrong_implementations_fail_the_checks(check: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        check()


def test_no_message_is_larger_than_the_evidence() -> None:
    rng = np.random.default_rng(4)
    for _ in range(300):
        s, w = rng.normal(0, 5, size=(2, rng.integers(1, 9)))
        below = rng.normal(0, 4)
        assert max(np.abs(m).max() for m in reference.pass_tree_up(s, w, below)) <= abs(below) + 1e-12
