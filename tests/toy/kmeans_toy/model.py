"""K-means: sums of rows by their nearest centroid, and the step that moves centroids to the means."""

from dataclasses import dataclass, replace

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.stats import Layout

REQUIREMENTS = BlockRequirements()


def assign_to_centroids(x, centroids):
    """Return the index of the nearest centroid of each row, and the squared distance to it."""
    distances = ((x[:, None, :] - centroids) ** 2).sum(axis=2)
    nearest = distances.argmin(axis=1)
    return nearest, distances[np.arange(len(x)), nearest]


@dataclass(frozen=True)
class State:
    centroids: np.ndarray
    iteration: int = 0
    inertia: float = float("nan")
    moved: float = float("inf")


@dataclass(frozen=True)
class AssignmentSums:
    """Reduction of rows to their sum and number per nearest centroid, and the total squared distance."""

    k: int
    p: int
    requirements: BlockRequirements = REQUIREMENTS

    def layout(self):
        return Layout((("sums", (self.k, self.p)), ("counts", (self.k,)), ("inertia", ())))

    def flops_per_row(self):
        return 3.0 * self.k * self.p

    def prepare(self, state, backend):
        return backend.kernel("kmeans_assign"), state.centroids

    def accumulate(self, prepared, block, stats):
        kernel, centroids = prepared
        nearest, distance = kernel(block.x.astype(np.float64), centroids)
        np.add.at(stats["sums"], nearest, block.x)
        stats["counts"][:] += np.bincount(nearest, minlength=self.k)
        stats["inertia"][...] += distance.sum()


@dataclass(frozen=True)
class KMeansEM:
    k: int
    p: int
    max_iter: int
    tol: float

    def reductions(self):
        return {"train": AssignmentSums(self.k, self.p)}

    def update(self, state, stats):
        sums, counts = stats["train"]["sums"], stats["train"]["counts"]
        new = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], state.centroids)
        moved = float(np.abs(new - state.centroids).max())
        inertia = float(stats["train"]["inertia"] / counts.sum())
        return replace(state, centroids=new, iteration=state.iteration + 1, inertia=inertia, moved=moved)

    def summary(self, state):
        return {"pass": state.iteration, "objective": state.inertia}

    def is_done(self, state):
        return state.iteration >= self.max_iter or state.moved <= self.tol


@dataclass(frozen=True)
class NearnessMap:
    """Map from rows to outputs: minus the squared distance of a row to each centroid."""

    centroids: np.ndarray
    output_name: str = "nearness"
    requirements: BlockRequirements = REQUIREMENTS

    def output(self):
        return (len(self.centroids),), "float32"

    def prepare(self, backend):
        return self.centroids

    def apply(self, prepared, block):
        return -((block.x[:, None, :].astype(np.float64) - prepared) ** 2).sum(axis=2).astype(np.float32)
