"""Declared parameters of estimators agree with their constructors, and invalid values are refused."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.contract.parameters import (
    Choice,
    Flag,
    Items,
    Number,
    Parameter,
    Parameters,
    Whole,
    is_number,
    is_whole,
)
from scalelatent.models.crbm import parameters as crbm
from scalelatent.models.crbm.kernels.inference import MAX_WEIGHT
from scalelatent.models.crbm.model import beliefs
from scalelatent.models.crbm.model.negative_phases import LEARNERS

ESTIMATORS = [
    sl.CapsuleRegression,
    sl.ConditionalRBM,
    sl.MultilayerBootstrapNetwork,
    sl.CompressiveMBN,
]


@pytest.mark.parametrize("cls", ESTIMATORS, ids=lambda cls: cls.__name__)
def test_declared_parameters_equal_those_of_the_constructor(cls: Any) -> None:
    signature = inspect.signature(cls).parameters.values()
    assert {one.name: one.default for one in signature} == cls._parameters.defaults()
    cls()._check_params()
    documented = inspect.getdoc(cls).split("Attributes\n---")[0]
    for entry in cls._parameters:
        assert entry.doc
        assert entry.name in documented


def test_importing_parameter_tables_imports_no_heavy_library() -> None:
    code = (
        "import sys; import scalelatent.models.capsule.parameters, scalelatent.models.crbm.parameters, "
        "scalelatent.models.mbn.parameters; assert not {'numpy', 'sklearn', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_parameter_choices_of_the_crbm_equal_those_of_its_code() -> None:
    assert tuple(LEARNERS) == crbm.LEARNERS
    assert (*crbm.INFERENCES, "independent") == tuple(beliefs.INFERENCES)
    assert tuple(name for name, one in LEARNERS.items() if one.gibbs_steps) == crbm.SAMPLING_LEARNERS
    assert crbm.MAX_INIT_SCALE == MAX_WEIGHT / 8


def test_numbers_and_their_bounds_are_checked() -> None:
    assert [is_number(v) for v in (0.5, np.float32(1), True, float("nan"), "1", None)] == [True] * 2 + [
        False
    ] * 4
    assert [is_whole(v) for v in (3, np.int64(3), 3.0, 2.5, 0, True)] == [True] * 3 + [False] * 3
    share = Number("give a share", above=0, most=1, also=(None, "auto"))
    assert [bool(share.refusal(v)) for v in (1, None, "auto", 0, "x", float("inf"))] == [False] * 3 + [
        True
    ] * 3
    assert Number("give a share", least=0).refusal("x") == ": give a finite number"


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "reported"),
    [
        (Whole(2), 2, 1, "v=1: give a whole number of at least 2"),
        (Whole(also=(None,)), None, "auto", "v='auto': give a whole"),
        (Choice((None, "a")), None, "b", "v='b' is not one of None, 'a'"),
        (Choice(("a",), silent=("z",)), "z", ["a"], r"v=\['a'\] is not one of 'a'$"),
        (Flag(), np.True_, 1, "v=1: give True or False"),
        (Items(Whole(), "give sizes"), [1, 2], [1, 0], r"v=\[1, 0\]: give sizes"),
        (Items(Whole(), "give sizes", one=True), 3, [], r"v=\[\]: give sizes"),
        (Items(Whole(), "give sizes"), np.array([3]), 3, "v=3: give sizes"),
    ],
)
def test_allowed_values_are_accepted_and_others_refused(
    allowed: Any, good: Any, bad: Any, reported: str
) -> None:
    parameter = Parameter("v", None, allowed, "")
    parameter.check(good)
    with pytest.raises(ValueError, match=reported):
        parameter.check(bad)


def test_a_parameter_table_checks_values_and_selects_names() -> None:
    def rule(model: Any) -> None:
        if model.a > model.b:
            raise ValueError("a is above b")

    table = Parameters(
        (
            Parameter("a", 1, Whole(), "", later=True),
            Parameter("b", 2, Whole(), ""),
            Parameter("c", 3, Whole(), "", decides=False),
        ),
        rules=(rule,),
        removed={"z": 9},
    )
    assert (len(table), table["b"].default, table.defaults()) == (3, 2, {"a": 1, "b": 2, "c": 3})
    assert table.select_deciding({"a": 4, "b": 5, "c": 6}) == {"a": 4, "b": 5}
    assert table.defaults_of_other_versions() == {"a": 1, "z": 9}
    table.check(SimpleNamespace(a=1, b=1, c=1))
    with pytest.raises(ValueError, match="c=0: give"):
        table.check(SimpleNamespace(a=1, b=1, c=0))
    with pytest.raises(ValueError, match="a is above b"):
        table.check(SimpleNamespace(a=2, b=1, c=1))
