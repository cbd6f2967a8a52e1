"""Predictions of a fitted mixture: probabilities, classes, scores, codes, reconstructions, densities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.finite import find_nonfinite, find_too_large
from scalelatent.contract.learners import Backend, Block
from scalelatent.kernels.arrays import Array
from scalelatent.models.linear_mixture.kernels import AnyScorer
from scalelatent.models.linear_mixture.kernels.reference import TangentSpec, all_scores, make_scorer
from scalelatent.models.linear_mixture.model import density
from scalelatent.models.linear_mixture.model.components import (
    DENSITY_LIKELIHOODS,
    LEAST_FLOOR,
    Components,
    make_scores,
    remove_missing_directions,
    score_few_rows,
)
from scalelatent.models.linear_mixture.model.e_step import MAIN, MixtureSettings, MixtureState
from scalelatent.models.linear_mixture.model.incremental import add_rows
from scalelatent.models.linear_mixture.model.recognition import (
    PreparedRecogniser,
    Recogniser,
    probabilities,
)
from scalelatent.reductions.moments import NonFiniteError

# Outputs that are computed from the best score of a row in each class.
CLASS_OUTPUTS = ("probabilities", "classes", "scores", "decisions")
# Outputs that are computed from the best component of a row.
COMPONENT_OUTPUTS = ("components", "codes", "reconstructions")
# Up to this number of rows `partial_fit` scores rows in numpy, because packing parameters takes longer.
_FEW_ROWS = 4


def density_likelihood(likelihood: str) -> str:
    """Return the likelihood of densities: the likelihood of the fit, or "ppca" if it minimised errors."""
    return likelihood if likelihood in DENSITY_LIKELIHOODS else "ppca"


@dataclass(frozen=True)
class FittedMixture:
    """Fitted parameters that predictions need.

    Attributes
    ----------
    components : Components
    classes : ndarray of int, shape (K,)
        Class of each component, in ascending order; all 0 without labels.
    priors : ndarray, shape (classes,)
        Share of the rows of each class.
    likelihood : str
    temperature : float
        sigma² of class probabilities.
    matrix : ndarray of float64, shape (p, p), or None
        Rows are multiplied by this matrix to smooth them.
    tangent_spec : TangentSpec or None
        Tangents of tangent distance.
    counts : ndarray, shape (K,)
        Weight of the rows of each component.
    floor : float
        Smallest noise variance, in squared units of the features.
    owns_arrays : bool
        True if no other object shares the arrays of the components; ``partial_fit`` may then change them in
        place.
    """

    components: Components
    classes: np.ndarray
    priors: np.ndarray
    likelihood: str
    temperature: float
    matrix: np.ndarray | None
    tangent_spec: TangentSpec | None
    counts: np.ndarray
    floor: float
    owns_arrays: bool = False

    @classmethod
    def from_state(
        cls,
        settings: MixtureSettings,
        state: MixtureState,
        matrix: np.ndarray | None = None,
        spec: TangentSpec | None = None,
    ) -> FittedMixture:
        """Return the mixture at the end of a fit, without the components that were dropped."""
        is_alive = state.components.weights > 0
        components = remove_missing_directions(state.components, state.counts, settings.likelihood)
        per_class = np.add.reduceat(state.counts, settings.starts[:-1])
        likelihood = settings.likelihood if state.phase >= MAIN else "error"
        scale = max(state.objective if np.isfinite(state.objective) else 1.0, LEAST_FLOOR)
        return cls(
            components.select(is_alive),
            settings.classes[is_alive],
            per_class / max(float(per_class.sum()), LEAST_FLOOR),
            likelihood,
            1.0 if likelihood in DENSITY_LIKELIHOODS else scale,
            matrix,
            spec,
            np.maximum(state.counts[is_alive], LEAST_FLOOR),
            settings.floor,
        )

    @property
    def starts(self) -> np.ndarray:
        """First component of each class, followed by the number of components, int64 (classes + 1,)."""
        return np.searchsorted(self.classes, np.arange(len(self.priors) + 1))

    def with_rows(self, x: np.ndarray, codes: np.ndarray, weight: np.ndarray | None) -> FittedMixture:
        """Return the mixture with more rows learned; each row updates the nearest component of its class."""
        components, starts = self.components, self.starts
        x = np.asarray(x, dtype=np.float64)
        if weight is None:
            weight = np.ones(len(x))
        elif not weight.all():
            x, codes, weight = x[weight > 0], codes[weight > 0], weight[weight > 0]
        if self.matrix is not None:
            x = x @ self.matrix
        index = np.empty(len(x), dtype=np.int64)
        for c in np.unique(codes):
            own = codes == c
            of_class = components.select(slice(starts[c], starts[c + 1]))
            if len(x) <= _FEW_ROWS:
                scores = score_few_rows(of_class, self.likelihood, x[own])
            else:
                packed = make_scores(of_class, self.likelihood)
                scorer = make_scorer(packed, np.array([0, len(of_class.means)]))
                scores = all_scores(scorer, x[own], 0, 1)
            index[own] = starts[c] + scores.argmin(axis=1)
        components = components if self.owns_arrays else components.copy()
        touched = np.unique(index)
        before = components.select(touched)
        try:
            counts = add_rows(components, self.counts, x, index, weight, self.floor)
        except BaseException:  # restore the arrays, which `add_rows` has changed in place
            components.overwrite(touched, before)
            raise
        per_class = np.add.reduceat(counts, starts[:-1])
        components = replace(components, weights=counts / per_class[self.classes])
        priors = per_class / per_class.sum()
        return replace(self, components=components, counts=counts, priors=priors, owns_arrays=True)

    def recogniser(self) -> Recogniser:
        """Return the rule that scores rows in each class."""
        priors = np.maximum(self.priors[self.classes], np.finfo(float).tiny)
        scores = make_scores(self.components, self.likelihood, priors)
        return Recogniser(scores, self.starts, self.tangent_spec)


class PreparedMixtureRows(NamedTuple):
    """Smoothing matrix on the device (None without smoothing), and packed scores of classes or components."""

    backend: Backend
    matrix: Array | None
    scorer: PreparedRecogniser | AnyScorer


@dataclass(frozen=True)
class MixtureRowMap:
    """Map of rows to one output (a :class:`~scalelatent.contract.learners.RowMap`).

    ``output_name`` names the output:

    ================= ==========================================================================
    "probabilities"   of classes
    "classes"         probabilities; a dataset of them gets the best class as label
    "scores"          of classes: the smaller, the better
    "decisions"       minus the scores; of two classes one column, the second less the first
    "latents"         scores of all components
    "components"      the best component
    "codes"           the best component, followed by the code
    "reconstructions" rows as the best component reconstructs them
    "shares"          posterior probabilities of components
    "log-likelihood"  in nats
    ================= ==========================================================================

    ``label`` is the class whose components give codes and reconstructions; -1 stands for all classes.
    """

    fitted: FittedMixture
    output_name: str
    label: int = -1

    @property
    def requirements(self) -> BlockRequirements:
        """Requirements: for the output "classes", the engine writes predicted classes as labels."""
        return BlockRequirements(labels=self.output_name == "classes", reads_on_gpu=True)

    def output(self) -> tuple[tuple[int, ...], str]:
        """Return the shape and the dtype of the output of one row."""
        f = self.fitted
        n_classes, n_components = len(f.priors), len(f.classes)
        _, p, _ = f.components.bases.shape
        columns, dtype = {
            "probabilities": (n_classes, "float64"),
            "classes": (n_classes, "float64"),
            "scores": (n_classes, "float32"),
            "decisions": (1 if n_classes == 2 else n_classes, "float32"),
            "latents": (n_components, "float32"),
            "components": (1, "int32"),
            "codes": (1 + f.components.n_dims, "float64"),
            "reconstructions": (p, "float32"),
            "shares": (n_components, "float64"),
            "log-likelihood": (1, "float64"),
        }[self.output_name]
        return (columns,), dtype

    def prepare(self, backend: Backend) -> PreparedMixtureRows:
        """Pack the parameters of the components' scores for the kernels of a backend."""
        f = self.fitted
        matrix = None if f.matrix is None else backend.asarray(f.matrix, np.float32)
        recogniser = f.recogniser()
        is_of_components = self.output_name in COMPONENT_OUTPUTS
        is_by_tangents = is_of_components and self.label < 0 and f.tangent_spec is not None
        if is_by_tangents or self.output_name in CLASS_OUTPUTS:
            return PreparedMixtureRows(backend, matrix, recogniser.prepare(backend))
        scores = recogniser.scores
        if self.output_name in ("shares", "log-likelihood"):
            scores = make_scores(f.components, density_likelihood(f.likelihood))
        scorer = backend.kernel("linear_mixture_make_scorer")(scores, f.starts)
        return PreparedMixtureRows(backend, matrix, scorer)

    def apply(self, prepared: PreparedMixtureRows, block: Block) -> np.ndarray:
        """Return the output ``output_name`` of the rows of a block.

        Raises
        ------
        NonFiniteError
            A value is NaN, infinite or beyond float32.
        """
        if place := find_too_large(block) or find_nonfinite(block):
            raise NonFiniteError(place)
        backend, matrix, scorer = prepared
        x = backend.asarray(block.x, np.float32, "x")
        if matrix is not None:
            x = backend.matmul(x, matrix, "projected")
        if self.output_name in CLASS_OUTPUTS:
            assert isinstance(scorer, PreparedRecogniser)
            return self._class_output(self.fitted.recogniser().recognise(scorer, x)[0])
        if self.output_name in COMPONENT_OUTPUTS:
            return self._component_output(backend, x, self._best_components(backend, scorer, x))
        scores = backend.kernel("linear_mixture_all_scores")(scorer, x, 0, len(self.fitted.priors))
        if self.output_name == "latents":
            return np.asarray(scores, dtype=np.float32)
        if self.output_name == "shares":  # the scores are -2 log densities, so the temperature is 1
            return probabilities(scores, 1.0)
        exponent = -0.5 * np.asarray(scores, dtype=np.float64)
        top = exponent.max(axis=1, keepdims=True)
        return top + np.log(np.exp(exponent - top).sum(axis=1, keepdims=True))

    def _class_output(self, scores: np.ndarray) -> np.ndarray:
        if self.output_name == "scores":
            return scores.astype(np.float32)
        if self.output_name == "decisions":
            two = scores.shape[1] == 2
            return (scores[:, :1] - scores[:, 1:] if two else -scores).astype(np.float32)
        return probabilities(scores, self.fitted.temperature)

    def _component_output(self, backend: Backend, x: Array, index: np.ndarray) -> np.ndarray:
        if self.output_name == "components":
            return index[:, None].astype(np.int32)
        f, rows = self.fitted, np.asarray(backend.to_host(x), dtype=np.float64)
        codes = density.codes(f.components, f.likelihood, rows, index)
        if self.output_name == "codes":
            return np.concatenate([index[:, None], codes], axis=1)
        return density.reconstruct(f.components, codes, index).astype(np.float32)

    def _best_components(
        self, backend: Backend, scorer: PreparedRecogniser | AnyScorer, x: Array
    ) -> np.ndarray:
        """Return the best component of each row, of all classes or of the class ``label``."""
        f, nearest = self.fitted, backend.kernel("linear_mixture_nearest")
        if self.label >= 0:
            return np.asarray(nearest(scorer, x, self.label, self.label + 1)[1][:, 0])
        if f.tangent_spec is not None:
            assert isinstance(scorer, PreparedRecogniser)
            best, index = f.recogniser().recognise(scorer, x)
        else:
            best, index = nearest(scorer, x, 0, len(f.priors))
        return np.asarray(index[np.arange(len(index)), best.argmin(axis=1)])

    @staticmethod
    def labels(out: np.ndarray) -> np.ndarray:
        """Return the index of the most probable class of each row; of equally probable classes, the first."""
        return out.argmax(axis=1)
