"""Refill of starving components: such a component takes half of the rows of another one, or is dropped.

A component starves if too few rows belong to it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .components import Components
from .e_step import MixtureSettings, MixtureState
from .m_steps import TINY

# Number of passes that may refill components with too few rows. Later passes drop these components.
MOST_REFILLS = 3


def refill_starving(settings: MixtureSettings, state: MixtureState) -> MixtureState:
    """Refill or drop the components that have too few rows.

    A refilled component takes half of the rows of the component of its class that has the largest total
    error. The means of both components move apart along the direction in which these rows vary most.
    """
    components, classes = state.components, settings.classes
    is_starving = (components.weights > 0) & (state.counts < _fewest_rows(settings, state))
    if not is_starving.any():
        return state
    new = components.copy()
    n_refilled = n_dropped = 0
    # A component is split at most once in a pass, because its total error is unknown after a split.
    errors = np.where(is_starving | (new.weights <= 0), -np.inf, state.counts * np.abs(state.errors))
    for q in np.flatnonzero(is_starving):
        own = np.where(classes == classes[q], errors, -np.inf)
        donor = int(own.argmax())
        if state.refill_passes >= MOST_REFILLS or not np.isfinite(own[donor]):
            if (new.weights[classes == classes[q]] > 0).sum() > 1:  # a class keeps its last component
                new.weights[q] = 0.0
                n_dropped += 1
            continue
        direction, deviation = _first_direction(components, donor)
        step = np.sqrt(2.0 / np.pi) * deviation * direction
        new.means[q], new.means[donor] = components.means[donor] + step, components.means[donor] - step
        for array in (new.bases, new.values, new.noise):
            array[q] = array[donor]
        new.weights[q] = new.weights[donor] = max(0.5 * new.weights[donor], TINY)
        errors[donor] = -np.inf
        n_refilled += 1
    return replace(
        state,
        components=new,
        refill_passes=state.refill_passes + (n_refilled > 0),
        n_refilled=state.n_refilled + n_refilled,
        n_dropped=state.n_dropped + n_dropped,
        n_starving=int(is_starving.sum()),
    )


def _fewest_rows(settings: MixtureSettings, state: MixtureState) -> np.ndarray:
    """Return the number of rows (K,) below which a component has too few rows and is refilled or dropped.

    The number is a tenth of the mean number of rows per component of the class, but at least 2 and at most
    n_dims + 1, because n_dims + 1 rows span n_dims directions.
    """
    per_component = np.add.reduceat(state.counts, settings.starts[:-1]) / np.diff(settings.starts)
    most = max(2.0, state.components.n_dims + 1.0)
    return np.clip(0.1 * per_component, 2.0, most)[settings.classes]


def _first_direction(components: Components, q: int) -> tuple[np.ndarray, float]:
    """Return the direction in which the rows of component q vary most, and their standard deviation."""
    lengths = np.sqrt((components.bases[q] ** 2).sum(axis=0))
    if components.noise.ndim == 2:
        j = int(lengths.argmax())
        return components.bases[q, :, j] / max(lengths[j], TINY), float(lengths[j])
    j = int(components.values[q].argmax())
    return components.bases[q, :, j], float(np.sqrt(components.values[q, j]))
