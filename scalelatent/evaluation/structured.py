"""Errors of predicted binary outputs: of all outputs, and of those that a corruption had changed.

After Ping and Ihler, "Belief propagation in conditional RBMs for structured prediction" (2017), section 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from scalelatent.data.feature_names import without_names
from scalelatent.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

    from scalelatent.data import Dataset

BATCH_ROWS = 1000


class Predicts(Protocol):
    """Fitted model that predicts binary outputs."""

    def predict(self, X: Any, /) -> Any: ...


@dataclass
class OutputErrors:
    """Counts of all and of wrong outputs, summed over batches of rows."""

    outputs: int = 0
    wrong: int = 0
    changed: int = 0  # outputs that differ from the input at the same position
    changed_wrong: int = 0

    def add(self, v: npt.ArrayLike, predicted: npt.ArrayLike, x: npt.ArrayLike | None = None) -> OutputErrors:
        """Add rows of zeros and ones (n, outputs), predicted from inputs ``x``; return self."""
        v, predicted = np.asarray(v), np.asarray(predicted)
        if v.shape != predicted.shape:
            raise DataError(
                f"v has shape {v.shape}, but predicted {predicted.shape}: give the outputs of the same rows"
            )
        wrong = v != predicted
        self.outputs += wrong.size
        self.wrong += int(np.count_nonzero(wrong))
        if x is not None:
            x = np.asarray(x)
            if x.shape != v.shape:
                raise DataError(
                    f"x has shape {x.shape}, but v {v.shape}: an output is changed if it differs from the "
                    "input at the same position, so both need one shape; omit x for the error of all outputs"
                )
            changed = x != v
            self.changed += int(np.count_nonzero(changed))
            self.changed_wrong += int(np.count_nonzero(wrong & changed))
        return self

    @property
    def all_error(self) -> float:
        """Share of wrong outputs; NaN without outputs."""
        return self.wrong / self.outputs if self.outputs else float("nan")

    @property
    def changed_error(self) -> float:
        """Share of wrong outputs among the changed ones; NaN if none was changed."""
        return self.changed_wrong / self.changed if self.changed else float("nan")


def output_errors(
    model: Predicts, data: Dataset, *, corruption: dict[str, Any] | None = None, batch_rows: int = BATCH_ROWS
) -> OutputErrors:
    """Return the errors of a model's predictions on a dataset, which is read in batches of rows.

    Parameters
    ----------
    model : fitted estimator
        Model whose ``predict`` returns (n, outputs).
    data : Dataset
        Dataset with targets. With a ``corruption``, its rows of zeros and ones are the outputs.
    corruption : dict, optional
        Corruption that makes the inputs from the outputs: the arguments of
        `scalelatent.kernels.corruption.corrupt`.
    batch_rows : int
        Rows in memory at a time.

    Returns
    -------
    OutputErrors
        ``changed_error`` is NaN if inputs and outputs differ in width.

    Raises
    ------
    DataError
        There are no targets, or some are neither 0 nor 1.

    Examples
    --------
    >>> from scalelatent.data import Dataset
    >>> class Same:
    ...     def predict(self, x): return x
    >>> v = Dataset.from_arrays(np.zeros((100, 20)))
    >>> noise = {"kind": "flip", "rate": 0.1, "seed": 0, "stage": "test"}
    >>> errors = output_errors(Same(), v, corruption=noise)
    >>> errors.all_error, errors.changed_error
    (0.1, 1.0)
    """
    errors, model = OutputErrors(), without_names(model)
    for x, v in _batches(data, corruption, batch_rows):
        dense = x if isinstance(x, np.ndarray) else x.toarray()
        errors.add(v, model.predict(x), dense if dense.shape == v.shape else None)
    return errors


def _batches(
    data: Dataset, corruption: dict[str, Any] | None, batch_rows: int
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    from scalelatent.kernels.corruption import corrupt

    for start in range(0, data.n_rows, batch_rows):
        stop = min(start + batch_rows, data.n_rows)
        if corruption is None:
            yield data.read_x(start, stop), data.read_targets(start, stop)
        else:
            v = data.read_binary(start, stop)
            yield corrupt(v, np.arange(start, stop), **corruption), v


def occlusion_errors(
    model: Predicts,
    images: Dataset,
    sizes: Iterable[int],
    *,
    shape: tuple[int, int],
    seed: int = 0,
    batch_rows: int = BATCH_ROWS,
) -> dict[int, OutputErrors]:
    """Return the errors of images restored after a square of each size was removed (the paper's Figure 3)."""
    out = {}
    for size in sizes:
        corruption: dict[str, Any] = {"kind": "flip", "rate": 0.0}
        if size:
            patch = (min(size, shape[0]), min(size, shape[1]))
            corruption = {"kind": "occlude", "size": patch, "shape": shape}
        corruption |= {"seed": seed, "stage": f"occlusion-{size}"}
        out[size] = output_errors(model, images, corruption=corruption, batch_rows=batch_rows)
    return out
