"""What part of a fit a stage is, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .worker_stats import number

__all__ = ["AFTER_FIT", "ERRORS", "part_of"]

ERRORS = ("train_error", "validation_error", "mean_member_train_error", "mean_member_validation_error")
"""Errors of a record; the last two of ensembles alone, whose members each solve a problem of their own."""

AFTER_FIT = ("saving", "scoring", "report")
"""Stages of a job that follow on its fit."""


def part_of(info: Mapping[str, Any]) -> str:
    """Which layer of a network, or what is tried; empty for other stages.

    Examples
    --------
    >>> part_of({"stage": "mbn_code-l3", "layer": 3, "layers": 7, "k": 250})
    'layer 3 of 7, k = 250'
    >>> part_of({"stage": "mbn_decay", "tries": 9}), part_of({"stage": "em"})
    ('9 values tried', '')
    """
    layer, layers, k, tries = (int(number(info, key)) for key in ("layer", "layers", "k", "tries"))
    if layer:
        return f"layer {layer} of {layers}, k = {k:,}"
    return f"{tries} values tried" if tries else ""
