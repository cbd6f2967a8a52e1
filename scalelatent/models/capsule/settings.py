"""What a capsule fit is told: parameters, widths, classes and their weights, and what of it is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from scalelatent.contract.parameters import is_number
from scalelatent.data import Dataset
from scalelatent.engine.plan import ALLOWED_SHARE
from scalelatent.errors import DataError, PlanError
from scalelatent.estimators.base import tell_cut
from scalelatent.estimators.steps import Rows
from scalelatent.models.capsule.model.members import Members, build_members

AUTO_PROJECTION = 196
CAPSULE_DIM = 8
COUNT_ROWS = 2**20


def projected_width(projection: str | int | None, n_features: int) -> int | None:
    """Width of the projected rows, None for no projection.

    Raises
    ------
    ValueError
        Above ``n_features``.

    Examples
    --------
    >>> projected_width("auto", 784), projected_width("auto", 64)
    (196, None)
    """
    if projection is None:
        return None
    if isinstance(projection, str) and projection == "auto":
        return AUTO_PROJECTION if n_features > AUTO_PROJECTION else None
    if int(projection) > n_features:
        raise ValueError(
            f"projection={projection} is above the {n_features} features of the rows: give at most "
            f"{n_features}, or None for no projection"
        )
    return int(projection)


def too_wide(width: int | None, n_features: int, n_classes: int, memory: int) -> str | None:
    """What helps where the second moments of rows this wide do not fit into a process, else None.

    Parameters
    ----------
    width : int or None
        Of the projected rows; None for no projection.
    n_features, n_classes : int
    memory : int
        Bytes that a process may use.

    Examples
    --------
    >>> too_wide(196, 784, 10, 2**30) is None
    True
    >>> print(too_wide(196, 47236, 2, 8 * 2**30))
    47236 features make a matrix of second moments of 16.6 GiB, of which 3 are needed; up to 14654 features
    fit. Keep the columns that matter (the most frequent ones, or sklearn.feature_selection), or reduce the
    rows first (sklearn.random_projection, sklearn.decomposition.TruncatedSVD), or give each worker 83.1 GiB
    ([cluster] memory_limit)
    """
    matrices, p = (3, n_features) if width is not None else (2 * n_classes, n_features)
    allowed = ALLOWED_SHARE * memory
    if matrices * 8 * p * p <= allowed:
        return None
    fit = int(math.sqrt(allowed / (8 * matrices)))
    remedy = "" if width is not None or fit < 2 else f", or set projection to at most {min(fit, p)}"
    return (
        f"{p} features make a matrix of second moments of {8 * p * p / 2**30:.1f} GiB, of which {matrices} "
        f"are needed; up to {fit} features fit. Keep the columns that matter (the most frequent ones, or "
        "sklearn.feature_selection), or reduce the rows first (sklearn.random_projection, "
        f"sklearn.decomposition.TruncatedSVD){remedy}, or give each worker "
        f"{matrices * 8 * p * p / ALLOWED_SHARE / 2**30:.1f} GiB ([cluster] memory_limit)"
    )


def choose_dim(model: Any, counts: np.ndarray, width: int, where: str) -> Any:
    """``capsule_dim``, or eight, cut to what the rows allow.

    Parameters
    ----------
    counts : ndarray of int, shape (classes,)
        Rows of each class.
    width : int
        Of (projected) rows.
    where : str
        What a message calls the rows.
    """
    if model.capsule_dim is not None:
        return model.capsule_dim
    if model.init != "subspace":
        return CAPSULE_DIM
    members = build_members(model.architecture, len(counts), 1)
    fewest = min(
        int(counts[labels == i].sum()) for labels in members.labels for i in range(members.dims.shape[1])
    )
    dim = max(min(CAPSULE_DIM, width, fewest), 1)
    if dim < CAPSULE_DIM and counts.all():
        found = f"{width} columns" if width <= fewest else f"{fewest} rows for a capsule"
        tell_cut("capsule_dim", dim, CAPSULE_DIM, f"{where} have {found}")
    return dim


def plain_dim(dims: np.ndarray) -> int | list[int]:
    """Dimension of all capsules, or one for each class.

    Examples
    --------
    >>> plain_dim(np.array([[2, 2]])), plain_dim(np.array([[1, 2]]))
    (2, [1, 2])
    """
    return int(dims[0, 0]) if (dims == dims[0, 0]).all() else dims[0].tolist()


def check_width(width: int | None, train: Dataset, n_classes: int, memory: int) -> None:
    """Refuse rows whose second moments cannot fit, before any work.

    Raises
    ------
    PlanError
        Naming the largest width that fits, and what makes rows narrower.
    """
    remedy = too_wide(width, train.n_features, n_classes, memory)
    if remedy:
        raise PlanError(f"{train.url or 'the training rows'}: {remedy}")


def class_counts(rows: Rows | Dataset, classes: np.ndarray) -> np.ndarray:
    """Rows of each class, read in pieces; rows of weight 0 count as absent.

    Examples
    --------
    >>> class_counts(Dataset.from_arrays(np.zeros((3, 1)), [0, 1, 1]), np.array([0, 1])).tolist()
    [1, 2]
    """
    counts = np.zeros(len(classes), dtype=np.int64)
    for dataset in [rows] if isinstance(rows, Dataset) else rows.pieces():
        for start in range(0, len(dataset), COUNT_ROWS):
            stop = min(start + COUNT_ROWS, len(dataset))
            codes = dataset.read_codes(start, stop, classes)
            if (weight := dataset.read_weight(start, stop)) is not None:
                codes = codes[weight > 0]
            counts += np.bincount(codes, minlength=len(classes))
    return counts


def class_weights(class_weight: Any, classes: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    """Weights of the classes in their order, or None.

    Raises
    ------
    ValueError
        Neither "balanced" nor a mapping of known classes to positive numbers.

    Examples
    --------
    >>> class_weights("balanced", np.array([0, 1]), np.array([1, 3])).tolist()
    [2.0, 0.66666667]
    """
    if class_weight is None:
        return None
    if class_weight != "balanced" if isinstance(class_weight, str) else not isinstance(class_weight, Mapping):
        raise ValueError(
            f"class_weight={class_weight!r}: give 'balanced', a dict of class to weight, or None"
        )
    if isinstance(class_weight, str):
        return counts.sum() / (len(classes) * np.maximum(counts, 1.0))
    known = {c.item() if isinstance(c, np.generic) else c: i for i, c in enumerate(classes)}
    unknown = [c for c in class_weight if c not in known]
    weights = np.ones(len(classes))
    if unknown or not all(is_number(value) and value > 0 for value in class_weight.values()):
        raise ValueError(
            f"class_weight={dict(class_weight)!r}: classes are {list(known)}, weights finite numbers above 0"
        )
    for c, value in class_weight.items():
        weights[known[c]] = value
    return weights


def check_labels(held: Rows | Dataset | None, classes: np.ndarray) -> None:
    """Refuse validation labels that are no class of the training rows, before any work."""
    if held is not None:
        class_counts(held, classes)


def check_classes(
    members: Members, train: Rows | Dataset, counts: np.ndarray, width: int | None, init: str
) -> None:
    """Refuse capsules that the rows cannot fill, before any work."""
    where, p = train.url or "the training rows", width or train.n_features
    assert train.classes is not None
    if (counts == 0).any():
        missing = [str(c) for c in train.classes[counts == 0]]
        if train.has_weight:
            raise DataError(
                f"{where}: class {', '.join(missing)} has no weight: give each class rows with "
                "sample_weight above 0"
            )
        raise DataError(
            f"{where}: class(es) {', '.join(missing)} have no rows: train on rows of every class (a slice "
            "keeps the classes of the whole dataset)"
        )
    largest = int(members.dims.max())
    if largest > p and init == "subspace":
        raise ValueError(
            f"capsule_dim={largest} is above the {p} "
            f"{'directions of the projection' if width else 'features'}: give at most {p}, or "
            "init='random'"
        )
    if init != "subspace":
        return
    for r in range(members.n_members):
        for i, d in enumerate(members.dims[r]):
            own = members.labels[r] == i
            if counts[own].sum() < d:
                names = ", ".join(str(c) for c in train.classes[own])
                raise DataError(
                    f"{where}: class {names} has {counts[own].sum()} rows, fewer than its capsule "
                    f"dimension {d}: lower capsule_dim to {counts[own].sum()}, give more rows, or use "
                    "init='random'"
                )
