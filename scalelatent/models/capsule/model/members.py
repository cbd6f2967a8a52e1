"""The three architectures of Saul (2021), section 3.4, as one table of members.

A *member* is one capsule regression. ``multiclass`` has a single member with a capsule for each class.
``one_vs_all`` has a binary member for each class. ``all_vs_all`` has a binary member for each pair of
classes. The weights of all members are stacked in one matrix W, so that each block of rows is read once and
one matrix product serves all members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Members:
    """Members of a model: their capsules, and the classes from whose rows they learn (which they "see")."""

    architecture: str
    dims: np.ndarray  # Dimension of each capsule, int64 (members, capsules of a member).
    # Index of the capsule that should win for each class, int64 (members, classes); -1 for classes from whose
    # rows the member does not learn.
    labels: np.ndarray

    @property
    def n_members(self) -> int:
        return len(self.dims)

    @property
    def n_classes(self) -> int:
        return self.labels.shape[1]

    @cached_property
    def offsets(self) -> np.ndarray:
        """First row of W of each member, followed by the number of rows; int64 (members + 1,)."""
        return np.concatenate([[0], np.cumsum(self.dims.sum(axis=1))]).astype(np.int64)

    @property
    def total_dim(self) -> int:
        """Number of rows of W."""
        return int(self.offsets[-1])

    @cached_property
    def sees(self) -> np.ndarray:
        """True for the classes from whose rows a member learns, bool (members, classes)."""
        return self.labels >= 0

    @cached_property
    def _class_sets(self) -> tuple[np.ndarray, np.ndarray]:
        sets, which = np.unique(self.sees, axis=0, return_inverse=True)
        return sets, which.ravel().astype(np.int64)

    @property
    def class_sets(self) -> np.ndarray:
        """Distinct sets of classes from whose rows a member learns, bool (sets, classes)."""
        return self._class_sets[0]

    @property
    def class_set_of(self) -> np.ndarray:
        """Index in ``class_sets`` of the classes from which each member learns, int64 (members,)."""
        return self._class_sets[1]

    @cached_property
    def groups(self) -> tuple[tuple[int | None, np.ndarray], ...]:
        """Pairs (class, members that learn from it); one pair (None, all members) if all learn from all."""
        if self.sees.all():
            return ((None, np.arange(self.n_members)),)
        return tuple((c, np.flatnonzero(self.sees[:, c])) for c in range(self.n_classes))

    @cached_property
    def pairs(self) -> np.ndarray:
        """Classes of the two capsules of each all-versus-all member, int64 (members, 2)."""
        return np.array([[np.flatnonzero(row == i)[0] for i in (0, 1)] for row in self.labels])

    @cached_property
    def class_capsules(self) -> tuple[tuple[tuple[slice, slice], ...], ...]:
        """Columns of the latent means for each class: pairs (columns of a member, columns of its capsule).

        A class has one pair; for all-versus-all, it has one pair for each other class.
        """
        capsules: list[list[tuple[slice, slice]]] = [[] for _ in range(self.n_classes)]
        for r in range(self.n_members):
            whole = self.rows_of(r)
            edges = whole.start + np.concatenate([[0], np.cumsum(self.dims[r])])
            for c in range(self.n_classes):
                i = self.labels[r, c]
                # The second capsule of a one-versus-all member stands for all other classes together.
                if i >= 0 and (self.architecture != "one_vs_all" or r == c):
                    capsules[c].append((whole, slice(int(edges[i]), int(edges[i + 1]))))
        return tuple(map(tuple, capsules))

    @property
    def class_dims(self) -> list[int]:
        """Capsule dimension of each class."""
        return [own[0][1].stop - own[0][1].start for own in self.class_capsules]

    def rows_of(self, member: int) -> slice:
        """Return the range of the rows of W that belong to a member."""
        return slice(int(self.offsets[member]), int(self.offsets[member + 1]))

    def stack_rows(self, members: np.ndarray) -> np.ndarray:
        """Return the rows of W of several members, in the order of ``members``, as int64 indices."""
        parts = [np.arange(self.offsets[r], self.offsets[r + 1]) for r in members]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def spread_over_rows(self, values: np.ndarray) -> np.ndarray:
        """Return one value per member (members,) as one value per row of W, (D, 1)."""
        return np.repeat(values, self.dims.sum(axis=1))[:, None]


def build_members(architecture: str | None, n_classes: int, capsule_dim: int | Sequence[int]) -> Members:
    """Return the members of an architecture; the parameters were checked by the estimator.

    ``architecture=None`` chooses multiclass if there are two classes or if ``capsule_dim`` is a sequence (one
    dimension per class), and one-versus-all otherwise.

    Raises
    ------
    ValueError
        There are fewer than two classes, or ``capsule_dim`` is a sequence that does not fit the classes.
    """
    if n_classes < 2:
        raise ValueError(
            f"capsule regression needs at least 2 classes, but the labels contain {n_classes} "
            f"{'class' if n_classes == 1 else 'classes'}: check that y is the column of labels"
        )
    many = not isinstance(capsule_dim, (int, np.integer))
    sizes: list[int] = list(capsule_dim) if many else [capsule_dim]  # type: ignore[arg-type, list-item]
    if architecture is None:
        # Two one-versus-all members of two classes would be equal to each other and to the multiclass model.
        architecture = "multiclass" if many or n_classes == 2 else "one_vs_all"
    if many and architecture != "multiclass":
        raise ValueError(
            f"capsule_dim={capsule_dim!r}: one dimension per class needs architecture='multiclass', not "
            f"{architecture!r}"
        )
    if many and len(sizes) != n_classes:
        raise ValueError(
            f"capsule_dim has {len(sizes)} dimensions for {n_classes} classes: give one per class, or one "
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
