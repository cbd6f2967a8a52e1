"""Which capsules there are: the three architectures of the paper (section 3.4) as one table of members.

A *member* is one capsule regression. ``multiclass`` has a single member with a capsule for each class;
``one_vs_all`` has a binary member for each class; ``all_vs_all`` one for each pair of classes. All members
lie stacked in one matrix W, so that a block is read once and one matrix product serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

ARCHITECTURES = ("multiclass", "one_vs_all", "all_vs_all")


@dataclass(frozen=True)
class Members:
    """The wiring of an ensemble."""

    architecture: str
    # int64 (members, capsules of a member): dimension of each capsule
    dims: np.ndarray
    # int64 (members, classes): label that a member gives to each class: the number of the
    # capsule that should win, or -1 where the member never sees it
    labels: np.ndarray

    @property
    def n_members(self) -> int:
        return len(self.dims)

    @property
    def n_classes(self) -> int:
        return self.labels.shape[1]

    @cached_property
    def offsets(self) -> np.ndarray:
        """First row of W of each member, and the end; int64, (members + 1,)."""
        return np.concatenate([[0], np.cumsum(self.dims.sum(axis=1))]).astype(np.int64)

    @property
    def total_dim(self) -> int:
        """Rows of W."""
        return int(self.offsets[-1])

    @cached_property
    def groups(self) -> tuple[tuple[int | None, np.ndarray], ...]:
        """(class, members that look at it), or (None, all) where every member looks at every row."""
        if (self.labels >= 0).all():
            return ((None, np.arange(self.n_members)),)
        return tuple((c, np.flatnonzero(self.labels[:, c] >= 0)) for c in range(self.n_classes))

    def rows(self, members: np.ndarray) -> np.ndarray:
        """Rows of W of some members, in their order; int64."""
        parts = [np.arange(self.offsets[r], self.offsets[r + 1]) for r in members]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def build_members(architecture: str, n_classes: int, capsule_dim: int | Sequence[int]) -> Members:
    """Table of members."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture={architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    if n_classes < 2:
        raise ValueError(
            f"capsule regression needs at least 2 classes, the labels hold {n_classes} "
            f"{'class' if n_classes == 1 else 'classes'}: check that y is "
            "the column of labels"
        )
    many = isinstance(capsule_dim, (list, tuple, np.ndarray))
    sizes: list[int] = list(capsule_dim) if many else [capsule_dim]  # type: ignore[arg-type, list-item]
    if not all(_is_dimension(d) for d in sizes):
        raise ValueError(f"capsule_dim={capsule_dim!r}: dimensions are whole numbers of at least 1")
    if many and architecture != "multiclass":
        raise ValueError(
            f"capsule_dim={capsule_dim!r}: one dimension a class needs architecture='multiclass', not "
            f"{architecture!r}"
        )
    if many and len(sizes) != n_classes:
        raise ValueError(
            f"capsule_dim has {len(sizes)} dimensions for {n_classes} classes: give one a class, or one "
            "number"
        )
    if architecture == "multiclass":
        dims = np.array([sizes if many else sizes * n_classes])
        labels = np.arange(n_classes)[None]
    elif architecture == "one_vs_all":
        labels = 1 - np.eye(n_classes, dtype=np.int64)
        dims = np.full((n_classes, 2), sizes[0])
    else:
        pairs = list(combinations(range(n_classes), 2))
        labels = np.full((len(pairs), n_classes), -1)
        for r, (a, b) in enumerate(pairs):
            labels[r, a], labels[r, b] = 0, 1
        dims = np.full((len(pairs), 2), sizes[0])
    return Members(architecture, dims.astype(np.int64), labels.astype(np.int64))


def _is_dimension(d: object) -> bool:
    return isinstance(d, (int, np.integer)) and not isinstance(d, bool) and int(d) >= 1
