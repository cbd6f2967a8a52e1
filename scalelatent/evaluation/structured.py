"""Errors of predicted binary outputs: of all of them, and of those that a corruption had changed.

After Ping and Ihler, "Belief propagation in conditional RBMs for structured prediction" (2017), section 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from scalelatent.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

    from scalelatent.data import Dataset

BATCH_ROWS = 1000


class Predicts(Protocol):
    """A fitted model of binary outputs."""

    def predict(self, X: Any, /) -> Any: ...


@dataclass
class OutputErrors:
    """Counts of outputs and wrong ones, added up over batches of rows."""

    outputs: int = 0
    wrong: int = 0
    changed: int = 0  # outputs in whose place the input has another value
    changed_wrong: int = 0

    def add(self, v: npt.ArrayLike, predicted: npt.ArrayLike, x: npt.ArrayLike | None = None) -> OutputErrors:
        """Count rows of zeros and ones (n, outputs), predicted from ``x``; returns itself."""
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
                    f"x has shape {x.shape}, but v {v.shape}: outputs are changed where the input in their "
                    "place is another, so both have one shape; leave x out for the error of all outputs"
                )
            changed = x != v
            self.changed += int(np.count_nonzero(changed))
            self.changed_wrong += int(np.count_nonzero(wrong & changed))
        return self

    @property
    def all_error(self) -> float:
        """Share of wrong outputs; NaN without any."""
        return self.wrong / self.outputs if self.outputs else float("nan")

    @property
    def changed_error(self) -> float:
        """Share of wrong outputs among the changed ones; NaN where none was changed."""
        return self.changed_wrong / self.changed if self.changed else float("nan")


def all_error(v: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Share of outputs that are predicted wrong: "All" of the paper's tables."""
    return OutputErrors().add(v, predicted).all_error


def changed_error(v: npt.ArrayLike, x: npt.ArrayLike, predicted: npt.ArrayLike) -> float:
    """Share of wrong outputs among those that the corruption had changed; NaN where it changed none."""
    return OutputErrors().add(v, predicted, x).changed_error


def output_errors(
    model: Predicts, data: Dataset, *, corruption: dict[str, Any] | None = None, batch_rows: int = BATCH_ROWS
) -> OutputErrors:
    """Errors of a model's predictions on a dataset, a batch of rows in memory at a time.

    Parameters
    ----------
    model : fitted estimator
        With ``predict``, which gives (n, outputs).
    data : Dataset
        With targets; or with a ``corruption`` rows of zeros and ones, which are the outputs.
    corruption : dict, optional
        Make the inputs of the outputs: the arguments of `scalelatent.kernels.corruption.corrupt`.
    batch_rows : int

    Returns
    -------
    OutputErrors
        Without errors of changed outputs where rows have another width than outputs.

    Raises
    ------
    DataError
        No targets, or some that are neither 0 nor 1.

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
    errors = OutputErrors()
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
    """Errors of images restored from ones with a square of each size gone (the paper's Figure 3)."""
    out = {}
    for size in sizes:
        how: dict[str, Any] = {"kind": "flip", "rate": 0.0}
        if size:
            patch = (min(size, shape[0]), min(size, shape[1]))
            how = {"kind": "occlude", "size": patch, "shape": shape}
        how |= {"seed": seed, "stage": f"occlusion-{size}"}
        out[size] = output_errors(model, images, corruption=how, batch_rows=batch_rows)
    return out
