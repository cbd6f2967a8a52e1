"""Rows through a fitted mixture: probabilities, classes, scores, codes, reconstructions, densities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.wants import Wants
from scalelatent.kernels.arrays import Array
from scalelatent.models.linear_mixture.kernels import PackedScores
from scalelatent.models.linear_mixture.kernels.reference import Frame, all_scores, make_scorer
from scalelatent.models.linear_mixture.model import density
from scalelatent.models.linear_mixture.model.online import add_rows
from scalelatent.models.linear_mixture.model.pancakes import Pancakes, few_scores, scores_of
from scalelatent.models.linear_mixture.model.recognise import PancakeRows, Recogniser, probabilities
from scalelatent.reductions.moments import NonFiniteError

DENSE = ("ppca", "factor-analysis")
# Outputs that come from the scores of classes; that are those of one sub-class.
OF_CLASSES = ("probabilities", "classes", "scores", "decisions")
OF_ONE = ("components", "codes", "reconstructions")
# Of soft assignments of densities: scores are -2 log of theirs.
_UNIT = 1.0
# Rows whose residuals from all sub-classes are made at once.
_FEW_ROWS = 4


def density_of(likelihood: str) -> str:
    """The Gaussians of a likelihood; those of the errors are probabilistic PCA's."""
    return likelihood if likelihood in DENSE else "ppca"


@dataclass(frozen=True)
class Fitted:
    """What predictions come from."""

    pancakes: Pancakes
    classes: np.ndarray  # of each sub-class, in rising order; all 0 without labels
    priors: np.ndarray  # shares of the rows, of each class
    likelihood: str
    temperature: float  # of class probabilities
    # float64 (p, p): smoothed rows are rows times this matrix
    basis: np.ndarray | None
    frame: Frame | None  # of tangent distance
    counts: np.ndarray  # weight of the rows of each sub-class
    floor: float  # smallest noise
    own: bool = False  # no other object shares these pancakes: then rows change them in place

    @property
    def starts(self) -> np.ndarray:
        """First sub-class of each class, and their number."""
        return np.searchsorted(self.classes, np.arange(len(self.priors) + 1))

    def with_rows(self, x: np.ndarray, codes: np.ndarray, weight: np.ndarray | None) -> Fitted:
        """After some rows more, by incremental SVD of the sub-classes that they are nearest to."""
        now, starts = self.pancakes, self.starts
        x = np.asarray(x, dtype=np.float64)
        if weight is None:
            weight = np.ones(len(x))
        elif not weight.all():
            x, codes, weight = x[weight > 0], codes[weight > 0], weight[weight > 0]
        if self.basis is not None:
            x = x @ self.basis
        index = np.empty(len(x), dtype=np.int64)
        for c in np.unique(codes):
            part, own = slice(starts[c], starts[c + 1]), codes == c
            some = now.part(part)
            if len(x) <= _FEW_ROWS:
                scores = few_scores(some, self.likelihood, x[own])
            else:
                scorer = make_scorer(scores_of(some, self.likelihood), np.array([0, len(some.means)]))
                scores = all_scores(scorer, x[own], 0, 1)
            index[own] = starts[c] + scores.argmin(axis=1)
        now = now if self.own else now.copy()
        touched = np.unique(index)
        before = now.part(touched)
        try:
            counts = add_rows(now, self.counts, x, index, weight, self.floor)
        except BaseException:  # the arrays change in place: all rows are learned, or none
            now.set_part(touched, before)
            raise
        per_class = np.add.reduceat(counts, starts[:-1])
        now = replace(now, weights=counts / per_class[self.classes])
        return replace(self, pancakes=now, counts=counts, priors=per_class / per_class.sum(), own=True)

    def recogniser(self) -> PancakeRows:
        """Scores of classes."""
        priors = self.priors[self.classes]
        scores = scores_of(self.pancakes, self.likelihood, np.maximum(priors, np.finfo(float).tiny))
        return PancakeRows(scores, self.starts, "scores", self.frame)


class PreparedMixtureRows(NamedTuple):
    """The matrix that rows are multiplied by first, where there is one, and what they are scored by: their
    classes (also by tangent distance), or their sub-classes alone.
    """

    backend: Backend
    basis: Array | None
    scorer: Recogniser | PackedScores


@dataclass(frozen=True)
class MixtureRows:
    """Rows to one of several outputs (a :class:`~scalelatent.contract.learners.RowMap`)."""

    fitted: Fitted
    # "probabilities" of classes, "classes" the same with labels for a dataset; "scores" of classes, the
    # smaller the better; "decisions": minus these, of two classes one column; "latents", scores of all
    # sub-classes; "components": the best; "codes": that, then the code; "reconstructions"; "shares" of
    # sub-classes; "log-likelihood"
    what: str
    label: int = -1  # class whose sub-classes give codes and reconstructions; -1: the best of all

    @property
    def wants(self) -> Wants:
        """Labels of the output are predicted, not copied, where it is classes."""
        return Wants(labels=self.what == "classes")

    def output(self) -> tuple[tuple[int, ...], str]:
        """(shape of a row, dtype)."""
        f = self.fitted
        if self.what in ("probabilities", "classes"):
            return (len(f.priors),), "float64"
        if self.what == "scores":
            return (len(f.priors),), "float32"
        if self.what == "decisions":
            return (1 if len(f.priors) == 2 else len(f.priors),), "float32"
        if self.what == "latents":
            return (len(f.classes),), "float32"
        if self.what == "components":
            return (1,), "int32"
        if self.what == "codes":
            return (1 + f.pancakes.n_dims,), "float64"
        if self.what == "reconstructions":
            return (f.pancakes.means.shape[1],), "float32"
        return (len(f.classes) if self.what == "shares" else 1,), "float64"

    def prepare(self, backend: Backend) -> PreparedMixtureRows:
        """Packed scores."""
        f = self.fitted
        basis = None if f.basis is None else backend.asarray(f.basis, np.float32)
        rows = f.recogniser()
        of_one = self.what in OF_ONE and self.label < 0 and f.frame is not None
        if of_one or self.what in OF_CLASSES:
            return PreparedMixtureRows(backend, basis, rows.prepare(backend))
        if self.what in ("shares", "log-likelihood"):
            scores = scores_of(f.pancakes, density_of(f.likelihood))
        else:
            scores = rows.scores
        scorer = backend.kernel("linear_mixture_make_scorer")(scores, f.starts)
        return PreparedMixtureRows(backend, basis, scorer)

    def apply(self, prepared: PreparedMixtureRows, block: Block) -> np.ndarray:
        """Output rows of a block."""
        if place := find_too_large(block) or find_nonfinite(block):
            raise NonFiniteError(place)
        backend, basis, scorer = prepared
        x = backend.asarray(block.x, np.float32, "x")
        if basis is not None:
            x = backend.matmul(x, basis, "projected")
        f, runs = self.fitted, len(self.fitted.priors)
        if self.what in OF_CLASSES:
            assert isinstance(scorer, Recogniser)
            scores, _ = f.recogniser().recognise(scorer, x)
            if self.what == "scores":
                return scores.astype(np.float32)
            if self.what == "decisions":
                two = scores.shape[1] == 2
                return (scores[:, :1] - scores[:, 1:] if two else -scores).astype(np.float32)
            return probabilities(scores, f.temperature)
        if self.what in OF_ONE:
            index = self._sub_classes(backend, scorer, x)
            if self.what == "components":
                return index[:, None].astype(np.int32)
            rows = np.asarray(backend.to_host(x), dtype=np.float64)
            codes = density.codes(f.pancakes, f.likelihood, rows, index)
            if self.what == "codes":
                return np.concatenate([index[:, None], codes], axis=1)
            return density.reconstruct(f.pancakes, codes, index).astype(np.float32)
        scores = backend.kernel("linear_mixture_all_scores")(scorer, x, 0, runs)
        if self.what == "latents":
            return np.asarray(scores, dtype=np.float32)
        if self.what == "shares":
            return probabilities(scores, _UNIT)
        exponent = -0.5 * np.asarray(scores, dtype=np.float64)
        top = exponent.max(axis=1, keepdims=True)
        return top + np.log(np.exp(exponent - top).sum(axis=1, keepdims=True))

    def _sub_classes(self, backend: Backend, scorer: Recogniser | PackedScores, x: Array) -> np.ndarray:
        """Best sub-class of each row: of all, or of a class."""
        f = self.fitted
        if self.label >= 0:
            kernel = backend.kernel("linear_mixture_nearest")
            return np.asarray(kernel(scorer, x, self.label, self.label + 1)[1][:, 0])
        if f.frame is not None:
            assert isinstance(scorer, Recogniser)
            best, index = f.recogniser().recognise(scorer, x)
        else:
            best, index = backend.kernel("linear_mixture_nearest")(scorer, x, 0, len(f.priors))
        return np.asarray(index[np.arange(len(index)), best.argmin(axis=1)])

    @staticmethod
    def labels(out: np.ndarray) -> np.ndarray:
        """Class codes of probabilities: the largest, the first of equals."""
        return out.argmax(axis=1)
