"""Compare mixtures of linear models with other libraries.

    python benchmarks/linear_mixture_peers.py [--part mfa --mfa MFA.PY] [--threads 1]

Each part compares this package ("ours") with another library ("theirs"). Both use the same rows and the same
number of threads (--threads). Seconds of a pass come from two fits of different length, or are a median over
passes. Log-likelihoods are means in nats per row: of training rows in factors, otherwise of test rows.

mfa       torch-mfa of E. Richardson (--mfa is the path of its mfa.py; needs torch) on MNIST in [0, 1], with
          50 models of 6 factors and one noise each. The results are the processor seconds of a pass, and
          the log-likelihood of the test rows after --passes passes of both, for --starts starts; ours uses
          likelihood="ppca".
gaussian  scikit-learn's GaussianMixture(10, "full") on 3,000 rows of MNIST, averaged to 16 x 16 and in full
          size, with reg_covar=1e-3, since it fails with less; ours has 10 models of 10 factors.
factors   scikit-learn's FactorAnalysis(10): seconds of its fit with the default stopping rule, and seconds in
          which ours reaches the same log-likelihood (up to .001).
kmeans    KMeans (Lloyd) and MiniBatchKMeans with one start; ours has n_dims=0, in batch and in stepwise EM.
          The results are the seconds and the final mean squared distance.
numpy     One pass with hard assignment in plain numpy, float32: residuals, errors, and one product of rows
          and their projections per component.

All parts need SCALELATENT_DATA.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

_threads = argparse.ArgumentParser(add_help=False)
_threads.add_argument("--threads", type=int, default=1)
THREADS = _threads.parse_known_args()[0].threads
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = str(THREADS)

import numpy as np
from common import mnist, mnist16, parser, write_part

import scalelatent as sl
from scalelatent.models.linear_mixture.kernels import reference


def load_rows(p: int, part: str = "train") -> np.ndarray:
    """Return MNIST in [0, 1]: averaged to 16 x 16 if p is 256, otherwise in full size."""
    x = mnist16(part)[0] if p == 256 else mnist(part=part)[0].astype(np.float32) / 255
    return np.ascontiguousarray(x, dtype=np.float32)


def compute_log_likelihood(
    x: np.ndarray, means: np.ndarray, loadings: np.ndarray, noise: np.ndarray, weights: np.ndarray
) -> float:
    """Return the mean log-likelihood of rows in nats under a mixture of Gaussians.

    A component has the covariance loadings loadings' + diag(noise).
    """
    arrays = (np.asarray(a, dtype=np.float64) for a in (means, loadings, noise, weights))
    means, loadings, noise, weights = arrays
    scores = reference.factor_scores(means, loadings, noise, weights / weights.sum(), means.mean(axis=0))
    scorer, total = reference.make_scorer(scores, np.array([0, len(means)])), 0.0
    for a in range(0, len(x), 2048):
        found = -0.5 * reference.all_scores(scorer, x[a : a + 2048], 0, 1)
        top = found.max(axis=1)
        total += float((top + np.log(np.exp(found - top[:, None]).sum(axis=1))).sum())
    return total / len(x)


def score_density(model: Any, x: np.ndarray) -> float:
    """Return the mean log-likelihood of rows in nats under a fitted mixture of this package."""
    values, noise = model.variances_, model.noise_
    loadings = model.bases_ * np.sqrt(np.maximum(values - noise[:, None], 0.0))[:, None, :]
    wide = np.repeat(noise[:, None], x.shape[1], axis=1)
    return compute_log_likelihood(x, model.means_, loadings, wide, model.weights_)


def measure_seconds(call: Any) -> float:
    """Return the seconds of a call without its warnings; what the call prints goes to stderr."""
    begin = time.perf_counter()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        call()
    return time.perf_counter() - begin


def compute_pass_seconds(model: Any) -> float:
    """Return the median seconds of the last four passes of a fit."""
    return float(np.median([record["seconds"] for record in model.history_[-4:]]))


def fit_density(x: np.ndarray, seed: int, **params: Any) -> Any:
    """Return a fitted mixture of this package; with tol=0 it runs all its passes, ``max_iter``."""
    common: dict[str, Any] = {"n_jobs": THREADS, "random_state": seed, "tol": 0.0}
    return sl.LinearMixture(**common, **params).fit(x)


def fit_mfa(path: Path, x: np.ndarray, k: int, h: int, passes: int, seed: int) -> Any:
    """Return a fitted model of torch-mfa with k components of h factors."""
    import torch

    torch.set_num_threads(THREADS)
    spec = importlib.util.spec_from_file_location("mfa", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  torch-mfa uses this generator.
    model = module.MFA(n_components=k, n_features=x.shape[1], n_factors=h)
    with contextlib.redirect_stdout(sys.stderr):
        model.fit(torch.from_numpy(x), max_iterations=passes)
    return model


def score_mfa(model: Any, x: np.ndarray) -> float:
    """Return the mean log-likelihood of rows in nats under a model of torch-mfa."""
    import torch

    weights = torch.softmax(model.PI_logits, 0)
    arrays = (a.detach().numpy() for a in (model.MU, model.A, torch.exp(model.log_D), weights))
    return compute_log_likelihood(x, *arrays)


def compare_mfa(args: Any) -> dict[str, Any]:
    """Return seconds and log-likelihoods of a mixture of factor analysers, in this package and torch-mfa."""
    x, test, k, h = load_rows(784)[: args.rows], load_rows(784, "test"), 50, 6

    def fit_theirs(passes: int, seed: int) -> Any:
        return fit_mfa(args.mfa, x, k, h, passes, seed)

    def fit_ours(passes: int, seed: int) -> Any:
        common: dict[str, Any] = {"likelihood": "ppca", "assignment": "soft", "max_iter": passes}
        return fit_density(x, seed, n_components=k, n_dims=h, **common)

    fit_ours(1, 0)  # The first fit compiles the kernels.
    seconds = {"ours": measure_pass(fit_ours, 2, 12), "theirs": measure_pass(fit_theirs)}
    print(seconds, flush=True)
    likelihoods: dict[str, list[float]] = {"ours": [], "theirs": []}
    for seed in range(args.starts):
        likelihoods["ours"].append(score_density(fit_ours(args.passes, seed), test))
        if args.passes * seconds["theirs"] * args.starts <= args.patience:
            likelihoods["theirs"].append(score_mfa(fit_theirs(args.passes, seed), test))
        print(likelihoods, flush=True)
    return {
        "rows": len(x),
        "passes": args.passes,
        "processor seconds a pass": seconds,
        "times": seconds["theirs"] / seconds["ours"],
        "log-likelihood": likelihoods,
    }


def measure_pass(fit: Any, few_passes: int = 1, more_passes: int = 3) -> float:
    """Return the processor seconds of a pass, which other work on the machine changes little.

    ``fit`` receives a number of passes and a seed; two fits have ``few_passes`` and ``more_passes``.
    """
    taken = []
    for passes in (few_passes, more_passes):
        begin = time.process_time()
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            fit(passes, 0)
        taken.append(time.process_time() - begin)
    return (taken[1] - taken[0]) / (more_passes - few_passes)


def compare_gaussian(args: Any) -> dict[str, Any]:
    """Return seconds and log-likelihoods of this package and of GaussianMixture (full covariances)."""
    from sklearn.mixture import GaussianMixture

    found = {}
    for p, n in ((256, 3000), (784, 3000)):
        x, test = load_rows(p)[:n], load_rows(p, "test")

        def fit_theirs(passes: int, x: np.ndarray = x) -> Any:
            start = {"init_params": "random_from_data", "random_state": 0}
            return GaussianMixture(10, reg_covar=1e-3, tol=0.0, max_iter=passes, **start).fit(x)

        few, more = measure_seconds(lambda: fit_theirs(2)), measure_seconds(lambda: fit_theirs(6))
        ours = fit_density(
            x, 0, n_components=10, n_dims=10, likelihood="ppca", assignment="soft", max_iter=10
        )
        seconds = {"ours": compute_pass_seconds(ours), "theirs": (more - few) / 4}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            score = float(fit_theirs(10).score(test))
        found[f"{p}"] = {
            "rows": n,
            "seconds a pass": seconds,
            "times": seconds["theirs"] / seconds["ours"],
            "log-likelihood of test rows": {"ours": score_density(ours, test), "theirs": score},
        }
        print(found, flush=True)
    return found


def compare_factors(args: Any) -> dict[str, Any]:
    """Return seconds and log-likelihoods of factor analysis in this package and in scikit-learn."""
    from sklearn.decomposition import FactorAnalysis

    x = load_rows(256)[:20_000]
    x = x + 0.05 * np.random.default_rng(args.seed).standard_normal(x.shape, dtype=np.float32)
    peers: dict[str, Any] = {}

    def fit_theirs(way: str) -> None:
        peers[way] = FactorAnalysis(10, svd_method=way, random_state=0).fit(x)

    seconds = {way: measure_seconds(lambda way=way: fit_theirs(way)) for way in ("lapack", "randomized")}
    wanted = {way: float(model.score(x)) for way, model in peers.items()}
    least, passes, taken, reached = min(wanted.values()), 0, np.inf, -np.inf
    for passes in (10, 20, 40, 80, 160, 320):
        begin = time.perf_counter()
        model = fit_density(
            x, 0, n_components=1, n_dims=10, likelihood="factor-analysis", assignment="soft", max_iter=passes
        )
        taken = time.perf_counter() - begin
        reached = -float(model.history_[-1]["objective"])
        if reached >= least - 1e-3:
            break
    best = min(seconds.values())
    return {
        "rows": len(x), "p": 256, "seconds": {**seconds, "ours": taken}, "passes": passes,
        "times": best / taken, "log-likelihood": {**wanted, "ours": reached},
    }  # fmt: skip


def compare_kmeans(args: Any) -> dict[str, Any]:
    """Return seconds and mean squared distances to centres: this package, KMeans and MiniBatchKMeans."""
    from sklearn.cluster import KMeans, MiniBatchKMeans

    x, k, passes = load_rows(256), 100, 20
    models: dict[str, Any] = {}

    def fit_theirs(name: str, make: Any) -> None:
        models[name] = make.fit(x)

    common: dict[str, Any] = {"n_clusters": k, "random_state": 0, "n_init": 1}
    seconds = {
        "KMeans": measure_seconds(
            lambda: fit_theirs("KMeans", KMeans(algorithm="lloyd", max_iter=passes, tol=0.0, **common))
        ),
        "MiniBatchKMeans": measure_seconds(lambda: fit_theirs("MiniBatchKMeans", MiniBatchKMeans(**common))),
    }
    inertia = {name: float(model.inertia_) / len(x) for name, model in models.items()}
    ours = {
        "n_dims=0": {"max_iter": passes - 10},
        "n_dims=0, stepwise": {"algorithm": "stepwise", "n_epochs": 1},
    }
    pass_seconds = {"KMeans": seconds["KMeans"] / passes}
    for name, params in ours.items():
        begin = time.perf_counter()
        model = fit_density(x, 0, n_components=k, n_dims=0, **params)
        seconds[name] = time.perf_counter() - begin
        wide = model.means_.astype(np.float32)
        inertia[name] = float(
            np.mean([compute_least_distance(x[i : i + 5000], wide) for i in range(0, len(x), 5000)])
        )
        pass_seconds[name] = compute_pass_seconds(model)
    out = {"rows": len(x), "K": k, "seconds": seconds, "seconds a pass": pass_seconds}
    return out | {"mean square": inertia}


def compute_least_distance(x: np.ndarray, means: np.ndarray) -> float:
    square = (x * x).sum(axis=1)[:, None] - 2.0 * x @ means.T + (means * means).sum(axis=1)
    return float(square.min(axis=1).mean())


def compare_numpy_pass(args: Any) -> dict[str, Any]:
    """Return the seconds of one pass with hard assignment, in this package and in a few lines of numpy."""
    x, k, h, q = load_rows(256)[:20_000], 100, 10, 16
    rng = np.random.default_rng(args.seed)
    means = x[rng.choice(len(x), k, replace=False)]
    bases = np.linalg.qr(rng.normal(size=(k, 256, q)))[0].astype(np.float32)

    def run_pass() -> None:
        errors = np.empty((len(x), k), dtype=np.float32)
        for j in range(k):
            r = x - means[j]
            errors[:, j] = (r * r).sum(axis=1) - ((r @ bases[j][:, :h]) ** 2).sum(axis=1)
        best = errors.argmin(axis=1)
        for j in range(k):
            r = x[best == j] - means[j]
            r.T @ (r @ bases[j])

    run_pass()
    theirs = min(measure_seconds(run_pass) for _ in range(3))
    ours = compute_pass_seconds(fit_density(x, 0, n_components=k, n_dims=h, max_iter=6))
    return {
        "rows": len(x),
        "K": k,
        "seconds a pass": {"ours": ours, "theirs": theirs},
        "times": theirs / ours,
    }


PART_FUNCTIONS = {
    "mfa": compare_mfa,
    "gaussian": compare_gaussian,
    "factors": compare_factors,
    "kmeans": compare_kmeans,
    "numpy": compare_numpy_pass,
}


def main() -> None:
    arguments = parser(__doc__, "linear_mixture_peers")
    arguments.add_argument("--part", choices=tuple(PART_FUNCTIONS), help="run this part only")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument(
        "--mfa", type=Path, help="path of mfa.py of torch-mfa; without it the part mfa is skipped"
    )
    arguments.add_argument("--rows", type=int, default=60_000, help="rows of MNIST in the part mfa")
    arguments.add_argument("--passes", type=int, default=30, help="passes of both models in the part mfa")
    arguments.add_argument("--starts", type=int, default=3)
    arguments.add_argument(
        "--patience", type=float, default=1e9, help="seconds; longer fits of torch-mfa are skipped"
    )
    args = arguments.parse_args()
    for name, measure in PART_FUNCTIONS.items():
        if args.part not in (None, name) or (name == "mfa" and args.mfa is None):
            continue
        result = measure(args)
        print(name, result, flush=True)
        write_part(args.out, name, args.seed, result)


if __name__ == "__main__":
    main()
