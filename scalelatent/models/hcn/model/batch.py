"""Learning features from images whose messages are kept: Algorithm 1 of the paper, for one layer.

A leaf is a fixed run of images and the last messages of all its trees. A visit sweeps over it a few times
from the beliefs of W that the step before summed, and returns by how much its messages to W have changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.models.hcn.kernels.order import shuffled
from scalelatent.models.hcn.kernels.windows import message_room

from .layer import FeatureLayer


class LeafParts(TypedDict):
    """`LeafMessages` as they are written, field by field."""

    s: np.ndarray
    to_s: np.ndarray
    to_w: np.ndarray
    held: np.ndarray
    sweeps: int
    moved: int


@dataclass(frozen=True)
class LeafMessages:
    """What is kept of a leaf from visit to visit.

    Attributes
    ----------
    s : ndarray of int32, shape (images, HS, WS, F)
        Beliefs of S, in units: the prior and all messages to S.
    to_s, to_w : ndarray of int16, shape (images, channels, pairs and room)
        Messages of the trees to S and W, in units.
    held : ndarray of uint8, shape (images, channels, height * width, h)
        Which lines of a pixel's window have a message to W that is not 0.
    sweeps : int
        Sweeps done.
    moved : int
        Trees of which a message changed in the last one.
    """

    s: np.ndarray
    to_s: np.ndarray
    to_w: np.ndarray
    held: np.ndarray
    sweeps: int = 0
    moved: int = -1

    def parts(self) -> LeafParts:
        return LeafParts(
            s=self.s, to_s=self.to_s, to_w=self.to_w, held=self.held, sweeps=self.sweeps, moved=self.moved
        )


def start_leaf(layer: FeatureLayer, n_rows: int) -> LeafMessages:
    """A leaf before its first visit: no messages."""
    channels, height, width = layer.image
    room = message_room((height, width), layer.window, layer.n_features)
    to_s, to_w = (np.zeros((n_rows, channels, room), np.int16) for _ in range(2))
    held = np.zeros((n_rows, channels, height * width, layer.window[0]), np.uint8)
    return LeafMessages(layer.no_places(n_rows), to_s, to_w, held)


def leaf_bytes(layer: FeatureLayer, n_rows: int) -> int:
    """Bytes of a leaf."""
    channels, height, width = layer.image
    room = message_room((height, width), layer.window, layer.n_features)
    held = layer.n_pixels * layer.window[0]
    return n_rows * (4 * channels * room + 4 * int(np.prod(layer.places)) + held)


def visit(
    layer: FeatureLayer,
    leaf: LeafMessages,
    evidence: np.ndarray,
    beliefs: np.ndarray,
    first_row: int,
    seed: int,
    n_sweeps: int,
    damping: float,
    backend: Backend,
) -> tuple[LeafMessages, np.ndarray]:
    """Sweep over a leaf until nothing moves or ``n_sweeps`` are done; the leaf is not changed.

    Parameters
    ----------
    evidence : ndarray of int32, shape (images, channels, height, width)
    beliefs : ndarray of int32, shape (channels, h, w, F)
        Beliefs of W in units, this leaf's messages included.
    first_row : int
        Number of the leaf's first row; orders are keyed by (seed, sweep, row).
    damping : float
        Weight of the new message.

    Returns
    -------
    leaf : LeafMessages
    change : ndarray of int32, shape (channels, h, w, F)
        Of the leaf's messages to W, in units.
    """
    evidence = backend.xp.asarray(evidence[None])
    s, w = (backend.xp.asarray(a[None]).copy() for a in (leaf.s, beliefs))
    kept = [backend.xp.asarray(a[None]).copy() for a in (leaf.to_s, leaf.to_w, leaf.held)]
    kernel, row, moved, done = backend.kernel("hcn_sweep_messages"), np.array([first_row]), -1, leaf.sweeps
    for done in range(leaf.sweeps + 1, leaf.sweeps + n_sweeps + 1):
        order = backend.xp.asarray(shuffled(seed, "hcn sweep", done - 1, row, evidence[0].size))
        moved = int(backend.to_host(kernel(evidence, order, s, w, *kept, damping))[0])
        if not moved:
            break
    change = backend.to_host(w)[0] - beliefs
    s, to_s, to_w, held = (backend.to_host(a)[0] for a in (s, *kept))
    return LeafMessages(s, to_s, to_w, held, done, moved), change
