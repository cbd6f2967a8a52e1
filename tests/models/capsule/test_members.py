"""The members of a capsule regression (models of some classes) have the right classes and rows of W."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent import CapsuleRegression
from scalelatent.models.capsule.model.members import build_members

ARCHITECTURE = st.sampled_from(["multiclass", "one_vs_all", "all_vs_all"])


@given(ARCHITECTURE, st.integers(2, 12), st.integers(1, 9))
def test_members_have_the_documented_shapes_labels_and_rows(architecture: str, m: int, d: int) -> None:
    members = build_members(architecture, m, d)
    n, k = {"multiclass": (1, m), "one_vs_all": (m, 2), "all_vs_all": (m * (m - 1) // 2, 2)}[architecture]
    assert members.dims.shape == (n, k)
    assert members.labels.shape == (n, m)
    assert members.n_members == n
    assert members.n_classes == m
    assert members.total_dim == n * k * d == members.offsets[-1]
    assert members.dims.dtype == members.labels.dtype == members.offsets.dtype == np.int64
    # Labels are indices of capsules (-1: the member ignores the class), and each capsule has a class.
    for labels in members.labels:
        assert set(labels.tolist()) - {-1} == set(range(k))
    # Each row of W belongs to exactly one member (model of some classes), in the order of the members.
    rows = [members.stack_rows(np.array([r])) for r in range(n)]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(members.total_dim))
    np.testing.assert_array_equal(members.stack_rows(np.arange(n)[::-1]), np.concatenate(rows[::-1]))
    assert members.stack_rows(np.arange(0)).shape == (0,)


@given(ARCHITECTURE, st.integers(2, 12))
def test_groups_feed_each_class_to_the_members_that_see_it(architecture: str, m: int) -> None:
    members = build_members(architecture, m, 2)
    seen = np.zeros((members.n_members, m), dtype=int)
    for label, live in members.groups:
        seen[live, slice(None) if label is None else label] += 1
    np.testing.assert_array_equal(seen, members.labels >= 0)


def test_one_vs_all_puts_its_own_class_first() -> None:
    np.testing.assert_array_equal(build_members("one_vs_all", 3, 1).labels, [[0, 1, 1], [1, 0, 1], [1, 1, 0]])


def test_all_vs_all_lists_the_pairs_in_order() -> None:
    labels = build_members("all_vs_all", 3, 1).labels
    np.testing.assert_array_equal(labels, [[0, 1, -1], [0, -1, 1], [-1, 0, 1]])


def test_two_classes_are_one_binary_model_in_all_vs_all() -> None:
    a, b = build_members("all_vs_all", 2, 3), build_members("multiclass", 2, 3)
    np.testing.assert_array_equal(a.dims, b.dims)
    np.testing.assert_array_equal(a.labels, b.labels)
    assert a.groups[0][0] is None  # The label None stands for rows of all classes.


def test_each_class_may_have_its_own_dimension() -> None:
    members = build_members("multiclass", 3, [1, 5, 2])
    np.testing.assert_array_equal(members.dims, [[1, 5, 2]])
    assert members.total_dim == 8


@pytest.mark.parametrize(
    ("architecture", "m", "d", "message"),
    [
        ("multiclass", 1, 2, "at least 2 classes, but the labels contain 1"),
        ("multiclass", 3, [1, 2], "2 dimensions for 3 classes"),
        ("one_vs_all", 3, [1, 2, 3], "needs architecture='multiclass'"),
    ],
)
def test_dimensions_that_do_not_fit_the_classes_are_refused(
    architecture: str, m: int, d: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        build_members(architecture, m, d)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "multi"}, "architecture='multi' is not one of None, 'multiclass', 'one_vs_all'"),
        ({"capsule_dim": 0}, "whole numbers of at least 1"),
        ({"capsule_dim": -2}, "whole numbers of at least 1"),
        ({"capsule_dim": True}, "capsule_dim"),
        ({"capsule_dim": [1, 2.5, 3]}, "whole numbers of at least 1"),
        ({"capsule_dim": [1, True, 3]}, "whole numbers of at least 1"),
        ({"capsule_dim": 2.5}, "capsule_dim=2.5"),
        ({"capsule_dim": "4"}, "capsule_dim='4'"),
    ],
)
def test_bad_architectures_and_dimensions_are_refused_before_a_fit(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        CapsuleRegression(**arguments).fit(np.eye(6), np.arange(6) % 3)
