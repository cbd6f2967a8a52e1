"""Run the ``[search]`` of a job: list the candidates, report progress, write results, plan the cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scalelatent.contract.parameters import is_number
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.plan import ALLOWED_SHARE
from scalelatent.errors import JobError, ScalelatentError

from .runfolder import to_json_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from scalelatent.estimators.base import StreamedEstimator
    from scalelatent.search.search import Search

    from .runfolder import RunFolder
    from .spec import Job

SEARCH_FILE = "search.json"
"""File in the run folder with the results of a search."""

# Approximate maximum number of candidates to plan, because each plan takes time.
PLANNED = 16
# If several fits share a pass over the rows, each fit has its own copy of these items of the memory plan.
ITEMS_OF_EACH_FIT = ("constants and states", "statistics in a span", "statistics waiting for their siblings")


def candidates_of(job: Job) -> list[dict[str, Any]]:
    """Return the parameters of each candidate: the whole grid, or ``n_iter`` draws with the job's seed."""
    from sklearn.model_selection import ParameterGrid, ParameterSampler

    search = job.search
    assert search is not None
    grid = ParameterGrid(search.grid)
    if search.n_iter is None or search.n_iter >= len(grid):
        return list(grid)
    seed = job.params.get("random_state") if job.job.seed is None else job.job.seed
    return list(ParameterSampler(search.grid, search.n_iter, random_state=seed or 0))


def make_search(job: Job, estimator: StreamedEstimator) -> Search:
    from scalelatent.search.search import Search

    assert job.search is not None
    own = {key: getattr(job.search, key) for key in ("cv", "scoring", "halving", "min_passes")}
    return Search(estimator, candidates_of(job), n_jobs=estimator.n_jobs, **own)


class SearchProgress(Callback):
    """Callback that writes the progress of a search to ``state.json``, which ``status`` shows."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._state: dict[str, Any] = {}

    def on_fit_start(self, info: dict[str, Any]) -> None:
        """Record the start of a search; ignore the starts of its candidates' fits."""
        if "splits" in info:
            self._state = {"candidates": info["candidates"], "folds": info["splits"]}
            self._folder.update_state(search=self._state)

    def on_event(self, info: dict[str, Any]) -> None:
        if info.get("event") != "candidate_scored":
            return
        self._state |= {"fits_done": info["fit"], "fits": info["fits"]}
        self._folder.update_state(search=self._state)


def write_search_results(folder: RunFolder, search: Search) -> None:
    """Write the results of a search to `SEARCH_FILE`, and the best result to ``state.json`` and an event."""
    found = search.cv_results_
    scoring = search.scoring_ if isinstance(search.scoring_, str) else repr(search.scoring_)
    table = [
        {
            "params": to_json_value(params),
            "rank": int(found["rank_test_score"][i]),
            "score": _score_or_none(found["mean_test_score"][i]),
            "spread": _score_or_none(found["std_test_score"][i]),
            "scores": [_score_or_none(found[f"split{k}_test_score"][i]) for k in range(search.n_splits_)],
            "passes": int(found["n_passes"][i]),
            "fit_seconds": float(found["mean_fit_time"][i]),
            "error": found["error"][i],
        }
        for i, params in enumerate(found["params"])
    ]
    results = {
        "scoring": scoring,
        "folds": search.n_splits_,
        "best": search.best_index_,
        "candidates": table,
    }
    folder.location.write(SEARCH_FILE, json.dumps(results, indent=1).encode())
    best = {
        "best_params": to_json_value(search.best_params_),
        "best_score": search.best_score_,
        "scoring": scoring,
    }
    best |= {"candidates": len(table), "folds": search.n_splits_}
    folder.update_state(search=best)
    folder.event("search_done", **best)


def _score_or_none(value: float) -> float | None:
    """Return a score, or None for NaN, which JSON does not have."""
    return float(value) if value == value else None


def plan_candidates(
    job: Job, estimator: StreamedEstimator, plan: Callable[[StreamedEstimator], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the estimated cost of a search, from the plans of its candidates."""
    from sklearn.base import clone

    assert job.search is not None
    params = candidates_of(job)
    folds = 1 if job.data.validation is not None else job.search.cv or 5
    plans: list[Mapping[str, Any]] = []
    for number in _candidates_to_plan(params):
        own = params[number]
        try:
            plans.append(plan(clone(estimator).set_params(**own)))
        except ScalelatentError as error:
            raise type(error)(f"candidate {number} {own}: {error}") from error
        except (TypeError, ValueError) as error:
            raise JobError(f"[search] candidate {number} {own}: {error}") from error
    most = max(plans, key=lambda needs: needs.get("peak_bytes_per_worker", 0))
    fits = len(params) * folds + (folds > 1)
    out = dict(most) | {"search": {"candidates": len(params), "folds": folds, "fits": fits}}
    for name in (name for name in most if name.startswith("expected_seconds")):
        if all(isinstance(needs.get(name), float) for needs in plans):
            out[name] = sum(needs[name] for needs in plans) / len(plans) * fits
    if estimator._shares_passes and "stages" in most:
        out["peak_bytes_per_worker"] += _shared_bytes(most, len(params) * folds, folds)
    if "seconds" in most:
        out["seconds"] = {name: seconds * fits for name, seconds in most["seconds"].items()}
    return out


def _candidates_to_plan(params: list[dict[str, Any]]) -> list[int]:
    """Return the indices of the candidates to plan: every n-th candidate, and the largest values.

    The candidate with the largest value of a parameter may need the most memory.
    """
    chosen = set(range(0, len(params), -(-len(params) // PLANNED)))
    for name in params[0] if len(chosen) < len(params) else ():
        if all(is_number(own.get(name)) for own in params):
            chosen.add(max(range(len(params)), key=lambda number: params[number][name]))
    return sorted(chosen)


def _shared_bytes(needs: Mapping[str, Any], fits: int, folds: int) -> int:
    """Return the bytes that ``fits`` need beyond one fit if groups of fits share a pass over the rows."""
    allowed, alone, together = int(ALLOWED_SHARE * needs["resources"]["memory"]), 0, 0
    for name, stage in needs["stages"].items():
        peak = stage["peak_bytes"]
        own = sum(stage["memory_bytes"].get(part, 0) for part in ITEMS_OF_EACH_FIT)
        others = {"estep": fits, "em": fits, "moments": folds, "svd": folds}.get(name, 1) - 1
        alone = max(alone, peak)
        together = max(together, min(peak + others * own, max(peak, allowed)))
    return together - alone
