"""How a session serves the steps of models that learn by short steps over rows in an order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scalelatent.data import Dataset
from scalelatent.engine.batch_loop import LoopResult
from scalelatent.engine.callbacks import Callbacks
from scalelatent.engine.incremental import DropLeaves, KeptLeaves
from scalelatent.engine.online_loop import fit_online
from scalelatent.engine.order import warn_if_sorted

from .steps import LearnOnline, Rows

if TYPE_CHECKING:
    from .session import FitSession


class OnlineSteps:
    """Serves :class:`.steps.LearnOnline`.

    Parameters
    ----------
    session : FitSession
    """

    def __init__(self, session: FitSession) -> None:
        self._session = session

    def learn(self, name: str, step: LearnOnline) -> LoopResult:
        """Run an online learner to its end.

        Warns
        -----
        UserWarning
            The rows are sorted by label, and the order of rows cannot make up for it.
        """
        session = self._session
        order, work, options = step.order(session.options), step.learner, session.options
        callbacks, every = list(session.callbacks.callbacks), options.get("checkpoint_steps")
        datasets = {part: self._weighed(rows) for part, rows in step.rows.items()}
        drop = None
        if step.keeps_leaves:
            assert session.store is not None, "Begin asks for records"
            folder, run = session.store.ref
            work = KeptLeaves(step.learner, folder, f"{session.kind}_{name}", run)
            drop = DropLeaves(work)
            callbacks, every = [*callbacks, drop], every or order.n_steps
        elif order.buffer_rows < order.segment(0)[1]:
            # Not for leaves, whose totals are over all rows: their order does not matter.
            warn_if_sorted(datasets["train"], order)
        stage = session.stage(name, work, datasets, step.classes)
        session.callbacks.on_stage({"stage": stage.name, "rows": order.n_rows})
        result = fit_online(
            session.executor,
            stage,
            step.state,
            order=order,
            n_epochs=step.n_epochs,
            callbacks=Callbacks(callbacks),
            store=session.store,
            checkpoint_seconds=options.get("checkpoint_seconds", 30.0),
            checkpoint_steps=every,
            report_steps=options.get("report_steps"),
            validate_steps=options.get("validate_steps"),
        )
        through = bool(result.history) and result.history[-1]["steps"] >= step.n_epochs * order.n_steps
        if drop is not None and (through or step.learner.is_done(result.state)):
            drop.all()
        return result

    def _weighed(self, rows: Rows) -> Dataset:
        """The rows; those that a mask leaves out weigh 0."""
        dataset, mask = self._session.rows(rows), rows.mask
        if mask is None:
            return dataset
        weight = dataset.read_weight(0, len(dataset)) if dataset.has_weight else None
        weight = np.ones(len(dataset)) if weight is None else weight.copy()
        weight[mask.start : mask.stop] = 0
        name = "-".join([*(name for name, _ in rows.maps), f"without-{mask.start}-{mask.stop}"])
        return self._session.visible(name, dataset.with_weight(weight))
