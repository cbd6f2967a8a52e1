"""Where the capsules of each class lie among the latent means, for all three architectures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.models.capsule.model.members import Members

__all__ = ["Wiring", "squashed", "wiring_of"]


@dataclass(frozen=True)
class Wiring:
    """The columns of ``transform`` that belong to each class.

    Attributes
    ----------
    architecture : str
    capsules : tuple of tuple of (slice, slice)
        For each class its capsules: (columns of the whole member, columns of the capsule). One capsule a
        class, but m - 1 of them in an all-versus-all model.
    pairs : ndarray of int64, shape (members, 2)
        Classes of each member's two capsules; empty unless all-versus-all.
    total_dim : int
        Columns of ``transform``.
    """

    architecture: str
    capsules: tuple[tuple[tuple[slice, slice], ...], ...]
    pairs: np.ndarray
    total_dim: int

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.capsules)

    @property
    def dims(self) -> list[int]:
        """Capsule dimension of each class."""
        return [own[0][1].stop - own[0][1].start for own in self.capsules]


def wiring_of(model: Any) -> Wiring:
    """Read the wiring of a fitted :class:`~scalelatent.CapsuleRegression`.

    Parameters
    ----------
    model : CapsuleRegression
        Fitted.

    Returns
    -------
    Wiring

    Examples
    --------
    >>> import numpy as np
    >>> from scalelatent import CapsuleRegression
    >>> x, y = np.eye(4).repeat(3, axis=0), np.arange(4).repeat(3)
    >>> model = CapsuleRegression(capsule_dim=2, init="random", max_iter=1, random_state=0).fit(x, y)
    >>> wiring_of(model).dims
    [2, 2, 2, 2]
    """
    # Of the fit: the parameter may have been set to something else since.
    members: Members = model._members
    capsules: list[list[tuple[slice, slice]]] = [[] for _ in range(members.n_classes)]
    for r in range(members.n_members):
        whole = slice(int(members.offsets[r]), int(members.offsets[r + 1]))
        edges = whole.start + np.concatenate([[0], np.cumsum(members.dims[r])])
        for c in range(members.n_classes):
            i = members.labels[r, c]
            # The other capsule of a one-versus-all member stands for all other classes together: it is no
            # one's own.
            if i < 0 or (members.architecture == "one_vs_all" and r != c):
                continue
            capsules[c].append((whole, slice(int(edges[i]), int(edges[i + 1]))))
    pairs = np.empty((0, 2), dtype=np.int64)
    if members.architecture == "all_vs_all":
        pairs = np.array([[np.flatnonzero(row == i)[0] for i in (0, 1)] for row in members.labels])
    return Wiring(members.architecture, tuple(map(tuple, capsules)), pairs, members.total_dim)


def squashed(latents: np.ndarray, member: slice, capsule: slice) -> np.ndarray:
    r"""Squash the latents of one capsule: :math:`\Psi_i = h_i / \sqrt{\sum_j |h_j|^2}` (equation 3.1).

    Parameters
    ----------
    latents : ndarray, shape (rows, total_dim)
        What ``transform`` gives.
    member, capsule : slice
        Columns of all capsules that compete, and of this one.

    Returns
    -------
    ndarray of float64, shape (rows, dimension)
        Inside the unit ball; zero where all latents are.

    Examples
    --------
    >>> squashed(np.array([[3.0, 0.0, 4.0, 0.0]]), slice(0, 4), slice(2, 4)).tolist()
    [[0.8, 0.0]]
    """
    h = latents[:, member].astype(np.float64)
    length = np.sqrt(np.einsum("nd,nd->n", h, h))
    return latents[:, capsule] / np.maximum(length, np.finfo(float).tiny)[:, None]
