"""The corruption of a row is a pure function of (seed, stage, epoch, row), also for generated datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelatent.data import make_corrupted
from scalelatent.errors import DataError
from scalelatent.kernels.corruption import check_corruption, corrupt

FLIP: dict[str, Any] = {"kind": "flip", "rate": 0.2, "seed": 5, "stage": "test"}
OCCLUDE: dict[str, Any] = {"kind": "occlude", "size": (2, 3), "shape": (4, 5), "seed": 5, "stage": "test"}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 10**12), min_size=1, max_size=20), st.integers(0, 10**6), st.sampled_from([0, 1])
)
def test_the_corruption_of_a_row_does_not_depend_on_other_rows(
    rows: list[int], epoch: int, which: int
) -> None:
    options, numbers = (FLIP, OCCLUDE)[which], np.array(rows)
    v = (np.arange(20)[None, :] % (2 + numbers[:, None] % 3) == 0).astype(np.uint8)
    before = v.copy()
    x = corrupt(v, numbers, epoch, **options)
    np.testing.assert_array_equal(v, before)
    for i in range(len(rows)):
        np.testing.assert_array_equal(corrupt(v[i : i + 1], numbers[i : i + 1], epoch, **options)[0], x[i])
    if which == 0:
        assert ((x != v).sum(axis=1) == 4).all()
    else:
        assert ((x <= v).all(axis=1)).all()
        windows = np.lib.stride_tricks.sliding_window_view(x.reshape(-1, 4, 5), (2, 3), axis=(1, 2))
        assert (windows.max(axis=(3, 4)) == 0).any(axis=(1, 2)).all()


def test_epochs_stages_and_seeds_give_different_corruptions() -> None:
    v, rows = np.ones((500, 20), np.uint8), np.arange(500)
    made = [
        corrupt(v, rows, epoch, **{**FLIP, **other})
        for epoch, other in ((0, {}), (1, {}), (0, {"seed": 6}), (0, {"stage": "other"}))
    ]
    for i, x in enumerate(made):
        share = (x == 0).mean(axis=0)  # Each pixel is flipped with probability 0.2.
        assert np.abs(share - 0.2).max() < 0.06
        for other in made[:i]:
            assert (x == other).all(axis=1).mean() < 0.01


@pytest.mark.parametrize("kind", ["noisy-digits", "occluded-digits"])
def test_epoch_zero_gives_the_rows_of_a_generated_dataset(tmp_path: Path, kind: str) -> None:
    stored, clean = make_corrupted(tmp_path / "x", kind, seed=9, share=0.2, patch=(3, 4))
    options: dict[str, Any] = {"kind": "flip", "rate": 0.2}
    if kind == "occluded-digits":
        options = {"kind": "occlude", "size": (3, 4), "shape": (8, 8)}
    x = corrupt(clean.read_x(100, 300), np.arange(100, 300), seed=9, stage=kind, **options)
    np.testing.assert_array_equal(x, stored.read_x(100, 300))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "blur"}, "no corruption 'blur': use one of flip, occlude"),
        ({"kind": "flip", "rate": -0.1}, "share of flipped pixels .rate. is -0.1: give a number"),
        ({"kind": "occlude", "size": (2, 9), "shape": (4, 8)}, "patch is 2 x 9, .* images of 4 x 8"),
        ({"kind": "occlude", "size": (0, 2), "shape": (4, 8)}, "patch is 0 x 2"),
        ({"kind": "occlude", "size": (2, 2), "shape": (4, 4)}, "shape=4 x 4 does not fit the 32 features"),
        ({"kind": "occlude", "size": (2, 2), "shape": (4, 8), "value": 2}, "value is 2"),
    ],
)
def test_impossible_corruptions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_corruption(n_features=32, **options)
