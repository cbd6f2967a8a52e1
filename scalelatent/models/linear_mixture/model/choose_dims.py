"""Choice of n_dims, the directions of a component, by cross-validation of one linear model per class."""

from __future__ import annotations

import numpy as np

from scalelatent.contract.idle_threads import run_parts
from scalelatent.kernels.streams import stream

# Number of folds of the cross-validation.
FOLDS = 3
# Upper bound of the rows per class that choose n_dims.
CLASS_ROWS = 400
# Upper bound of the rows of all classes together that choose n_dims. It does not reduce a class below
# LEAST_CLASS_ROWS rows.
ALL_ROWS = 20_000
# Number of rows that a class keeps if ALL_ROWS divided by the number of classes is smaller.
LEAST_CLASS_ROWS = 60
# Rows span a direction if their variance along it is at least this share of the largest variance.
LEAST_SHARE = 1e-10


def principal_directions(rows: np.ndarray, most: int) -> np.ndarray:
    """Return at most ``most`` principal directions (p, q) of centred rows (n, p), by decreasing variance."""
    wide = rows.shape[1] > len(rows)
    values, vectors = np.linalg.eigh(rows @ rows.T if wide else rows.T @ rows)
    exists = values > LEAST_SHARE * max(values[-1], 0.0)
    values, vectors = values[exists][::-1][:most], vectors[:, exists][:, ::-1][:, :most]
    return rows.T @ vectors / np.sqrt(values) if wide else vectors


def reconstruction_errors(rows: np.ndarray, others: np.ndarray, most: int) -> np.ndarray:
    """Return the squared errors (most + 1, n) of reconstructions of the rows ``others`` (n, p).

    Row h of the result has the errors for the mean and the first h principal directions of ``rows``.
    """
    mean = rows.mean(axis=0)
    centred = others - mean
    square = (centred**2).sum(axis=1)
    code = centred @ principal_directions(rows - mean, most)
    out = np.repeat(square[None], most + 1, axis=0)
    explained = np.cumsum(code.T**2, axis=0)
    out[1 : len(explained) + 1] -= explained
    out[len(explained) + 1 :] = out[len(explained)]
    return out


def draw_class_rows(codes: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return, for each class, the indices of the rows on which n_dims is chosen, in random order.

    ``codes`` (n,) is the class of each row.
    """
    rng = stream(seed, "linear-mixture-folds")
    owners = [rng.permutation(np.flatnonzero(codes == c)) for c in range(int(codes.max(initial=0)) + 1)]
    limit = min(CLASS_ROWS, max(LEAST_CLASS_ROWS, ALL_ROWS // len(owners)))
    return [rows[:limit] for rows in owners]


def count_wrong(x: np.ndarray, codes: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Count rows to which cross-validation gives a wrong class, for 0 to ``most`` directions.

    Each class is one linear model: a mean and its principal directions. A row gets the class whose model
    reconstructs it with the smallest squared error.

    Parameters
    ----------
    x : ndarray, shape (n, p)
    codes : ndarray of int, shape (n,)
        Class of each row.
    most : int
        Largest number of directions of a class.
    seed : int
        Seed that selects the rows and their folds.

    Returns
    -------
    wrong : ndarray of int, shape (most + 1,)
        Number of rows with a wrong class, for 0 to ``most`` directions.
    """
    owners = draw_class_rows(codes, seed)

    def count(fold: int) -> np.ndarray:
        tested = np.concatenate([rows[fold::FOLDS] for rows in owners])
        others = x[tested].astype(np.float64)
        least, found = np.full((most + 1, len(tested)), np.inf), np.full((most + 1, len(tested)), -1)
        for c, rows in enumerate(owners):
            learned = np.delete(rows, np.s_[fold::FOLDS])
            if len(learned):
                error = reconstruction_errors(x[learned].astype(np.float64), others, most)
                found[error < least] = c
                least = np.minimum(error, least)
        return np.asarray((found != codes[tested]).sum(axis=1))

    return np.asarray(sum(run_parts(count, range(FOLDS))))
