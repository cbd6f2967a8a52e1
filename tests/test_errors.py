"""Warnings name the user's line, a failing callback gives one, and errors number rows as in the dataset."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.engine.callbacks import Callback, Unfailing
from scalelatent.errors import warn_deprecated, warn_user


def test_a_warning_names_the_line_of_the_user() -> None:
    with pytest.warns(UserWarning, match="few rows") as reported:
        warn_user("few rows")
    assert reported[0].filename == __file__


def test_a_deprecation_names_two_releases() -> None:
    with pytest.warns(FutureWarning) as reported:
        warn_deprecated("fit(rows=…)", "give X", since="0.2")
    assert (
        str(reported[0].message) == "fit(rows=…) is deprecated since 0.2 and will be removed in 0.4: give X"
    )


class BrokenCallback(Callback):
    def on_pass_end(self, record: dict[str, Any]) -> bool | None:
        raise OSError("no server")


def test_a_failing_callback_gives_one_warning() -> None:
    broken = Unfailing([BrokenCallback()])
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        assert [broken.on_pass_end({}), broken.on_pass_end({})] == [False, False]
    assert len(reported) == 1


def test_a_row_of_a_block_has_its_number_in_the_dataset() -> None:
    x = np.zeros((2, 1))
    assert Block(x, None, None, 7).row_number(1) == 8
    assert Block(x, None, None, 7, np.array([9, 3])).row_number(1) == 3
