"""Other dimensions and tangents of a fitted mixture, from the moments that its fit kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .fit import check_sizes, frame_of, given_shape, make_learner, make_mixture
from .model.em import KeptMoments
from .model.pancakes import Pancakes, cut_directions
from .output import DENSE, Fitted

if TYPE_CHECKING:
    from .fit import AnyMixture

__all__ = ["other_bases"]

FIT = "fit with algorithm='em' and statistics='moments'"


def other_bases(model: AnyMixture, fitted: Fitted) -> Fitted:
    """The same sub-classes with bases by the parameters of a model that has not been fitted.

    Raises
    ------
    ValueError
        The fit kept no moments, or none of this kind of tangents; dimensions that rows have no room for.
    """
    kept = fitted.kept
    if kept is None:
        raise ValueError(
            "other bases come from the moments of a fit, and this model has none: they are kept by fits with "
            f"statistics='moments' (not by stepwise EM), until partial_fit adds rows; {FIT}"
        )
    if fitted.likelihood == "factor-analysis":
        raise ValueError("likelihood='factor-analysis' finds its loadings step by step: fit again")
    check_sizes(model, model.n_features_in_)
    frame = frame_of(model, _shape(model, fitted))
    if frame is not None and "thickness" in frame.names and "thickness" not in kept.sums:
        raise ValueError(
            "tangents of thickness are no linear map of the image, and the fit summed none of them: "
            f"{FIT} and 'thickness' among its tangents"
        )
    classes = len(fitted.priors)
    counts = np.bincount(fitted.classes, minlength=classes)
    mixture = make_mixture(model, counts, classes, kept.means.shape[1], fitted.floor, frame)
    now = make_learner(model, replace(mixture, statistics="moments")).refitted(kept)
    now = cut_directions(now, kept.sums["count"], fitted.likelihood)
    temperature = fitted.temperature
    if fitted.likelihood not in DENSE:
        temperature *= _error(now, kept) / max(_error(fitted.pancakes, kept), fitted.floor)
    return replace(fitted, pancakes=now, temperature=temperature, frame=frame, own=False)


def _shape(model: AnyMixture, fitted: Fitted) -> tuple[int, int] | None:
    """Of the images that rows are: of the tangents of the fit, or given."""
    if not len(model.tangents) or fitted.frame is not None:
        return fitted.frame.shape if fitted.frame is not None else None
    if model.image_shape is None:
        raise ValueError(
            "tangents are of images, and the fit had none: set_params(image_shape=(height, width)) first"
        )
    return given_shape(model, "the rows", model.n_features_in_)


def _error(now: Pancakes, kept: KeptMoments) -> float:
    """Mean squared error of a row of the fit."""
    count, p = kept.sums["count"], now.means.shape[1]
    return float(count @ now.noise * (p - now.n_dims) / max(count.sum(), 1e-300))
