"""Search that fits its candidates one after the other, because they cannot share passes over the rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import clone

from scalelatent.errors import DataError
from scalelatent.estimators.session import FitSession
from scalelatent.storage.disk import Location, locate

from .candidates import Candidate
from .criterion import Scoring

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Client

    from scalelatent.estimators.base import StreamedEstimator


def fit_separately(
    candidates: Sequence[Candidate],
    session: FitSession,
    scoring: Scoring,
    seed: int,
    *,
    keeps_best: bool,
    client: Client | None,
    run_dir: str | Path | None,
    n_jobs: int | None,
    engine: Mapping[str, Any] | None,
) -> dict[str, float]:
    """Fit and score candidates one by one, or read their stored results; return scores by candidate key."""
    scores: dict[str, float] = {}
    best: Candidate | None = None
    notify = session.callbacks.on_event
    options = {"client": client, "engine": engine, "callbacks": session.callbacks}
    for position, one in enumerate(candidates):
        stored = session.store.load_result(f"candidate-{one.key}") if session.store else None
        location = None if run_dir is None else locate(run_dir).at("candidates").at(one.key)
        about = {"candidate": one.number, "fit": position + 1, "fits": len(candidates)}
        if one.model.random_state is None:
            one.model.set_params(random_state=seed)
        if n_jobs is not None:
            one.model.set_params(n_jobs=n_jobs)
        if stored is None:
            rows = {"rows": len(one.rows["train"].dataset)}
            session.callbacks.on_stage({"stage": f"search: fit {position + 1} of {len(candidates)}", **rows})
            params = _describe_candidate(one.model, one.number, candidates)
            notify({"event": "candidate", **about, "params": params})
            _fit_and_score(one, location, keeps_best, options, scoring, scores)
            stored = {
                "score": scores.get(one.key, float("nan")),
                "error": one.error,
                "passes": one.passes,
                "seconds": one.seconds,
                "score_seconds": one.score_seconds,
            }
            if session.store:
                session.store.save_result(f"candidate-{one.key}", stored)
            notify({"event": "candidate_scored", **about, "score": stored["score"], "seconds": one.seconds})
        else:
            one.error, one.passes = stored["error"], int(stored["passes"])
            one.seconds, one.score_seconds = float(stored["seconds"]), float(stored["score_seconds"])
            if one.error is None:
                scores[one.key] = float(stored["score"])
        loser: Candidate | None = one
        if keeps_best and one.key in scores and (best is None or scores[one.key] > scores[best.key]):
            best, loser = one, best
        if loser is not None:
            _discard_model(loser, run_dir)
    if best is not None and not best.model.__sklearn_is_fitted__():
        # The interrupted search has fitted the best candidate, so its model is loaded from the run folder.
        assert run_dir is not None
        _fit_model(best, locate(run_dir).at("candidates").at(best.key), keeps_best, options)
    return scores


def _describe_candidate(
    model: StreamedEstimator, number: int, candidates: Sequence[Candidate]
) -> dict[str, Any]:
    """Return the parameters that differ between candidates; objects are replaced by their ``repr``."""
    described = {}
    for name, value in model.get_params(deep=False).items():
        others = (one.model.get_params(deep=False)[name] for one in candidates if one.number != number)
        if any(repr(value) != repr(other) for other in others) and name != "random_state":
            described[name] = value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
    return described


def _fit_and_score(
    one: Candidate,
    location: Location | None,
    validates: bool,
    options: Mapping[str, Any],
    scoring: Scoring,
    scores: dict[str, float],
) -> None:
    began = time.perf_counter()
    try:
        _fit_model(one, location, validates, options)
    except (FloatingPointError, np.linalg.LinAlgError) as error:
        one.error, one.seconds = str(error), time.perf_counter() - began
        return
    except (ValueError, DataError) as error:
        raise type(error)(f"candidate {one.number} ({one.key}): {error}") from error
    one.passes, one.seconds = int(one.model.n_iter_), time.perf_counter() - began
    began = time.perf_counter()
    scores[one.key] = scoring(one.model, one.validation.dataset)
    one.score_seconds = time.perf_counter() - began


def _fit_model(
    one: Candidate, location: Location | None, validates: bool, options: Mapping[str, Any]
) -> None:
    own = dict(options)
    if validates and one.model._validates:
        own["validation"] = one.validation.dataset
    if location is not None:
        own |= {"run_dir": location.url, "resume": True}
    one.model._search_fit(one.rows["train"].dataset, **own)


def _discard_model(one: Candidate, run_dir: str | Path | None) -> None:
    """Discard the fitted model of a candidate that is not the best, and delete the run folder of its fit."""
    one.model = clone(one.model)
    if run_dir is not None:
        locate(run_dir).at("candidates").at(one.key).clear()
