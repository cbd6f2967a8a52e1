"""Compare ways to accelerate batch EM of capsule regression, which computes a short vector for each class.

    python benchmarks/capsule_acceleration.py

The script counts the passes over all rows until the log-loss, or the training error, is as low as the lowest
value that momentum 0.9 reaches within a given number of passes. Every EM step is a pass, including the steps
of extrapolations and steps that are undone. The package uses momentum; the counts show if another is faster.

momentum  An EM step from the weights W, plus 0.9 (W - previous W), as in the package.
plain     EM without acceleration.
squarem   Two EM steps, then an extrapolation along them (scheme S3 of Varadhan and Roland, 2008),
          which is undone if it raises the log-loss by more than 0.01.
anderson  Anderson acceleration over the last five steps; it restarts if the log-loss rises by over 0.001.

The rows are whitened, so that all directions of a step have the same scale; EM steps do not depend on it. nu
is 0, or 0.8 as in the first round of Saul (2021): a row changes the weights only if a wrong class has more
than nu times the probability of the true class. Needs SCALELATENT_DATA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import mnist16, parser, usps, write

from scalelatent.models.capsule.kernels.squash import squash_table

# Length of a class's vector (capsule), and number of past EM steps that Anderson acceleration combines.
DIM, MEMORY = 4, 5
DATA_SETS = {"USPS": usps, "MNIST 16 x 16, 10,000 rows": lambda: tuple(a[:10_000] for a in mnist16())}


class RecordedEm:
    """Callable EM step that records log-loss and training error of all weights that it receives.

    The constructor whitens the rows ``x`` (n, p) of classes ``y``. A step uses a row only if a wrong class
    has more than ``nu`` times the probability of the true class. ``records`` has (log-loss, error) by call.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, nu: float) -> None:
        values, vectors = np.linalg.eigh(x.T.astype(np.float64) @ x)
        kept = values > 1e-6 * values[-1]
        # The sum of the outer products of these rows is the identity matrix.
        self.x = (x @ (vectors[:, kept] / np.sqrt(values[kept]))).astype(np.float32)
        self.y, self.nu, self.classes = y, nu, int(y.max()) + 1
        self.table = squash_table(DIM * self.classes)
        self.records: list[tuple[float, float]] = []

    def make_initial_weights(self) -> np.ndarray:
        """Return the first weights (classes * DIM, p): scaled leading eigenvectors of each class's rows."""
        parts = []
        for c in range(self.classes):
            own = self.x[self.y == c].astype(np.float64)
            values, vectors = np.linalg.eigh(own.T @ own / len(own))
            parts.append((vectors[:, -DIM:] / np.sqrt(DIM * values[-DIM:])).T)
        return np.concatenate(parts)

    def __call__(self, w: np.ndarray) -> np.ndarray:
        """Return the weights after an EM step from ``w``; record log-loss and training error of ``w``."""
        h = (self.x @ w.T.astype(np.float32)).astype(np.float64)
        squares = (h * h).reshape(len(h), self.classes, DIM).sum(axis=2)
        total = np.maximum(squares.sum(axis=1, keepdims=True), 1e-300)
        lam0, lam1 = (a[:, None] for a in self.table(total[:, 0] / 2)[:2])
        f, size = squares / total, DIM * self.classes
        p, rows = lam0 * f + (1 - lam0) / self.classes, np.arange(len(h))
        own = p[rows, self.y]
        others = p.copy()
        others[rows, self.y] = 0
        self.records.append((float(-np.log(own).mean()), float((others.max(axis=1) >= own).mean())))
        labels = np.arange(self.classes) == self.y[:, None]
        ratio = lam1 * f[rows, self.y][:, None] + (1 - lam1) * (2 * labels + DIM) / (2 + size)
        ratio = np.where((others.max(axis=1) > self.nu * own)[:, None], ratio / own[:, None] - 1, 0)
        moved = (h * np.repeat(ratio, DIM, axis=1)).astype(np.float32)
        return w + (moved.T @ self.x).astype(np.float64)


def run_momentum(em: RecordedEm, w: np.ndarray, gamma: float = 0.9) -> Iterator[None]:
    before = w
    while True:
        w, before = em(w) + gamma * (w - before), w
        yield


def run_plain_em(em: RecordedEm, w: np.ndarray) -> Iterator[None]:
    return run_momentum(em, w, 0.0)


def run_squarem(em: RecordedEm, w: np.ndarray) -> Iterator[None]:
    accepted = w
    while True:
        first = em(w)
        if em.records[-1][0] > em.records[-2][0] + 0.01 if len(em.records) > 1 else False:
            w = accepted  # The log-loss rose by more than 0.01: undo the extrapolation.
            yield
            continue
        yield
        accepted = em(first)
        r, v = first - w, accepted - 2 * first + w
        step = max(1.0, float(np.linalg.norm(r) / max(np.linalg.norm(v), 1e-300)))
        w = w + 2 * step * r + step**2 * v
        yield


def run_anderson(em: RecordedEm, w: np.ndarray) -> Iterator[None]:
    points: list[np.ndarray] = []
    steps: list[np.ndarray] = []
    best, last_accepted = np.inf, w
    while True:
        next_w = em(w)
        yield
        if em.records[-1][0] > best + 1e-3:
            w, points, steps, best = last_accepted, [], [], np.inf
            continue
        best, last_accepted = em.records[-1][0], next_w
        points, steps = [*points, next_w][-MEMORY - 1 :], [*steps, (next_w - w).ravel()][-MEMORY - 1 :]
        w = next_w
        if len(steps) > 1:
            change = np.diff(np.array(steps), axis=0).T
            coefficients = np.linalg.lstsq(change, steps[-1], rcond=1e-6)[0]
            w = next_w - np.tensordot(coefficients, np.diff(np.array(points), axis=0), 1)


METHODS = {"momentum": run_momentum, "plain": run_plain_em, "squarem": run_squarem, "anderson": run_anderson}


def find_first_pass(values: np.ndarray, target: float) -> int | None:
    """Return the number of the first pass, counted from 1, whose value is at most ``target``, or None."""
    found = np.flatnonzero(values <= target)
    return int(found[0]) + 1 if len(found) else None


def main() -> None:
    arguments = parser(__doc__, "capsule_acceleration")
    arguments.add_argument("--passes", type=int, default=300, help="number of passes of each method")
    args = arguments.parse_args()
    results: list[dict[str, Any]] = []
    for name, load in DATA_SETS.items():
        x, y = load()
        for nu in (0.0, 0.8):
            curves = {}
            for method, run in METHODS.items():
                em = RecordedEm(x, y, nu)
                steps = run(em, em.make_initial_weights())
                while len(em.records) < args.passes:
                    next(steps)
                curves[method] = np.array(em.records[: args.passes])
            for momentum_passes in (args.passes // 10, args.passes // 3, args.passes):
                targets = curves["momentum"][:momentum_passes].min(axis=0)
                results.append(
                    {
                        "set": name,
                        "nu": nu,
                        "passes_of_momentum": momentum_passes,
                        "log_loss": round(float(targets[0]), 5),
                        "train_error": round(float(targets[1]), 5),
                        "passes_to_log_loss": {
                            w: find_first_pass(c[:, 0], targets[0]) for w, c in curves.items()
                        },
                        "passes_to_error": {
                            w: find_first_pass(c[:, 1], targets[1]) for w, c in curves.items()
                        },
                    }
                )
                print(results[-1], flush=True)
    write(args.out, args.seed, results)


if __name__ == "__main__":
    main()
