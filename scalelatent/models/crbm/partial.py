"""``partial_fit`` of conditional RBMs: a stream of rows, eager, in this process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np

from scalelatent.engine.backend import make_backend
from scalelatent.engine.chains import advance, run_chains
from scalelatent.engine.reading import Meter, Reader
from scalelatent.engine.threads import single_threaded
from scalelatent.kernels.streams import resolve_seed, stream
from scalelatent.models.crbm.model.energy import CrbmShape
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.state import CrbmState

from .fit import check_rows, check_shape, make_learner, shape_of
from .parameters import batch_size


class CrbmPartial:
    """The method, for :class:`.crbm.ConditionalRBM`."""

    batch_size: int | None
    batch_size_: int
    device: str
    init_scale: float
    random_state: Any
    best_epoch_: int
    best_validation_error_: float | None
    history_: list[dict[str, Any]]
    inference_: str
    n_iter_: int
    seed_: int
    _keep_parameters: Any
    _pairs: Any
    _shape: CrbmShape
    _theta: np.ndarray
    # What a stream goes on from beside the parameters; None after a fit or a load.
    _stream_state: CrbmState | None

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Learn from some more rows, at once: a step for each ``batch_size`` of them, in their order.

        Goes on from a fit, from a loaded model or from earlier calls; velocity and persistent chains begin
        anew after a fit, and where a changed parameter makes them others. Sweeps stay those of the epoch
        reached (``n_sweeps_``).

        Parameters
        ----------
        X : array-like, shape (n, x), Dataset or None
            One row or more.
        y : array-like or Dataset, shape (n, v)

        Returns
        -------
        self

        Raises
        ------
        DataError, ValueError
            As in :meth:`.ConditionalRBM.fit`; a call may have fewer rows than a batch.

        Examples
        --------
        >>> import scalelatent as sl
        >>> rng = np.random.default_rng(0)
        >>> m = sl.ConditionalRBM(n_hidden=2, learning_rate=0.5, random_state=0)
        >>> for _ in range(20):
        ...     x = rng.integers(0, 2, (20, 6)).astype("uint8")
        ...     m = m.partial_fit(x, 1 - x)
        >>> bool(m.score(x, 1 - x) > 0.9)
        True
        """
        self._check_params()  # type: ignore[attr-defined]
        first = not hasattr(self, "W_")
        ds = self._pairs(X, y, reset=first)
        check_rows(self, ds)
        if first:
            self.seed_ = resolve_seed(self.random_state)
            self._shape = shape_of(self, ds)
            self._theta = self._shape.start(stream(self.seed_, "crbm-start"), float(self.init_scale))
            self.n_iter_, self.history_ = 0, []
        learner = replace(
            make_learner(self, ds, None, self.seed_),
            n_chains=1,
            chain_rows=batch_size(self),
            local_steps=0,
        )
        check_shape(self, learner.shape)
        self.inference_, self.batch_size_ = learner.validation_inference, batch_size(self)
        epoch = 1 if first else self.best_epoch_
        state = None if first else self._stream_state
        if state is None:
            state = replace(learner.start(self._theta), iteration=epoch - 1)
        state = self._stream(learner, _fitting(learner, state), ds)
        self._keep_parameters(learner.shape, state.theta, epoch)
        self.best_validation_error_ = None  # that of a fit was of other parameters
        self._stream_state = state
        return self

    def _stream(self, learner: CrbmLearner, state: CrbmState, ds: Any) -> CrbmState:
        backend, size = make_backend(self.device), batch_size(self)
        reader = Reader(ds, None, Meter(), wants=learner.wants)
        seen = int(state.sums[2])
        with single_threaded():
            for a in range(0, len(ds), size):
                b = min(a + size, len(ds))
                # Numbers of rows go on over calls: they key the random numbers of Gibbs chains.
                numbers = np.arange(seen + a, seen + b, dtype=np.int64)
                x, v, weight = reader.read(a, b)
                block = reader.block(x, v, weight, seen + a, numbers, state.iteration)
                state = advance(learner, state, run_chains(learner, state, [block], backend), b - a)
        return state


def _fitting(learner: CrbmLearner, state: CrbmState) -> CrbmState:
    """The state of earlier calls, with a new velocity and new chains where parameters changed their size."""
    fresh = learner.start(state.theta)
    others = {
        name: getattr(fresh, name)
        for name in ("velocity", "particles")
        if getattr(fresh, name).shape != getattr(state, name).shape
    }
    return replace(state, **others)
