"""Compare three starts of the Gibbs chain of contrastive divergence, for conditional RBMs on corrupted MNIST.

    python benchmarks/crbm_chains.py                    10,000 training images, 10 % flipped, 20 epochs
    python benchmarks/crbm_chains.py --task occluded8

The chain of a row starts from its outputs (CD-1), from the last state of the chain at the same place of the
batch (the learner "pcd"), or from the last state of the row's own chain, which is kept from epoch to epoch.
Ping and Ihler (2017) write that conditional models need a chain for each row, since observed rows change the
biases. The code is plain numpy; the three fits differ only in the start of the chain. Errors are those of
mean field on 5,000 test images, in percent, from random weights and from logistic regression. Needs
SCALELATENT_DATA.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import parser, write_part
from crbm_mnist import LOGISTIC_RATES, TASKS, make_pairs
from scipy.special import expit

import scalelatent as sl

STARTS = ("outputs of the row", "chain of the batch", "chain of the row")


def learn(model: sl.ConditionalRBM, x: np.ndarray, v: np.ndarray, start: str, args: Any) -> list[np.ndarray]:
    """Return W, Wvx, Whx, bv and bh after ``--epochs`` epochs with the given start of the chains."""
    rng = np.random.default_rng(args.seed)
    theta = [np.array(p, dtype=np.float32) for p in (model.W_, model.Wvx_, model.Whx_, model.bv_, model.bh_)]
    W, Wvx, Whx, bv, bh = theta
    kept = np.full((len(v) if start == STARTS[2] else args.batch, args.hidden), 0.5, dtype=np.float32)
    for epoch in range(args.epochs):
        order = rng.permutation(len(v))
        for begin in range(0, len(v) - args.batch + 1, args.batch):
            rows = order[begin : begin + args.batch]
            at = rows if start == STARTS[2] else slice(None)
            vx, hx = x[rows] @ Wvx.T + bv, x[rows] @ Whx.T + bh
            positive = expit(v[rows] @ W + hx)
            hidden = positive if start == STARTS[0] or (start == STARTS[2] and not epoch) else kept[at]
            drawn = (rng.random(hidden.shape, dtype=np.float32) < hidden).astype(np.float32)
            sample = (rng.random(vx.shape, dtype=np.float32) < expit(drawn @ W.T + vx)).astype(np.float32)
            negative = expit(sample @ W + hx)
            kept[at] = negative
            dv, dh = v[rows] - sample, positive - negative
            steps = (
                v[rows].T @ positive - sample.T @ negative,
                dv.T @ x[rows],
                dh.T @ x[rows],
                dv.sum(0),
                dh.sum(0),
            )
            for p, step in zip(theta, steps, strict=True):
                p += args.rate / args.batch * step
    return theta


def main() -> None:
    arguments = parser(__doc__, "crbm_chains")
    arguments.add_argument("--task", choices=sorted(TASKS), default="noisy10")
    arguments.add_argument("--rows", type=int, default=10_000, help="training images")
    arguments.add_argument("--hidden", type=int, default=256)
    arguments.add_argument("--batch", type=int, default=20)
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument("--rate", type=float, default=0.003)
    arguments.set_defaults(validation_rows=0, test_rows=5000)
    args = arguments.parse_args()
    pairs = make_pairs(args.task, args)
    x, v = (part.astype(np.float32) for part in pairs["train"])
    logistic = sl.ConditionalRBM(
        learner="logistic", n_epochs=20, learning_rate=LOGISTIC_RATES, random_state=args.seed, n_jobs=1
    ).fit(*pairs["train"])
    rng = np.random.default_rng(args.seed)
    w, whx = (0.01 * rng.standard_normal((a, b)) for a, b in ((784, args.hidden), (args.hidden, 784)))
    first = {
        "random weights": (np.zeros((784, 784)), np.zeros(784)),
        "logistic regression": (logistic.Wvx_, logistic.bv_),
    }
    for name, (wvx, bias) in first.items():
        how: dict[str, Any] = {"inference": "mean-field", "n_sweeps": 8 + args.epochs}
        begin = sl.ConditionalRBM.from_weights(w, bias, np.zeros(args.hidden), Wvx=wvx, Whx=whx, **how)
        found = {"before learning": begin.errors(*pairs["test"])}
        for start in STARTS:
            W, Wvx, Whx, bv, bh = learn(begin, x, v, start, args)
            m = sl.ConditionalRBM.from_weights(W, bv, bh, Wvx=Wvx, Whx=Whx, **how)
            found[start] = m.errors(*pairs["test"])
            print(f"{args.task}, {name}, {start}: {found[start]}", flush=True)
        errors = {k: {key: round(100 * float(e), 3) for key, e in r.items()} for k, r in found.items()}
        settings = {key: getattr(args, key) for key in ("rows", "hidden", "batch", "epochs", "rate")}
        write_part(args.out, f"{args.task}/{name}", args.seed, settings | {"errors": errors})


if __name__ == "__main__":
    main()
