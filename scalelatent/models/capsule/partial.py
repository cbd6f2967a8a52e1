"""``partial_fit`` of capsule regression: a stream of rows, eager, one row or more at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Self

import numpy as np

from scalelatent.contract.finite import LARGEST
from scalelatent.data.schema import refuse_mixed
from scalelatent.engine.backend import make_backend
from scalelatent.estimators.base import check_finite, is_plain, validated
from scalelatent.kernels.streams import resolve_seed, stream
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.running import RowSums, RunningCapsule, StreamOptions
from scalelatent.models.capsule.model.start import schedule_arrays

from .online_fit import batch_rows
from .settings import CAPSULE_DIM, class_weights

READ_ROWS = 8192
# Parameters that a step reads: checked again where one has changed.
_READ = (
    "algorithm", "nu_schedule", "kappa", "t0", "batch_rows", "n_chains", "ridge", "aggressiveness",
    "class_weight", "device",
)  # fmt: skip


@lru_cache(maxsize=1)
def _backend() -> Any:
    return make_backend("cpu")


class PartialFit:
    """The method, for :class:`.capsule.CapsuleRegression`."""

    # What the estimator has: parameters, and attributes of a fit.
    algorithm: Any
    architecture: Any
    capsule_dim: Any
    class_weight: Any
    device: Any
    init: Any
    init_scale: Any
    kappa: Any
    nu_schedule: Any
    projection: Any
    random_state: Any
    ridge: Any
    t0: Any
    aggressiveness: Any
    best_validation_error_: float | None
    mean_member_validation_error_: float | None
    classes_: Any
    history_: list[dict[str, Any]]
    n_features_in_: int
    n_iter_: int
    projection_: Any
    seed_: int
    W_: Any
    _set_learned: Any
    _members: Members
    # What a fit saw: sums of its rows, and how many it took over all its passes; a stream goes on from there.
    _sums: RowSums | None
    _seen_rows: float
    _running: RunningCapsule | None
    _training_rows: Any

    def partial_fit(self, X: Any, y: Any = None, classes: Any = None, *, sample_weight: Any = None) -> Self:
        """Learn from some more rows, at once and in this process.

        Goes on from a fit, from a loaded model or from earlier calls. A first call begins anew: it needs
        ``classes``, works on unprojected rows, and starts from the subspaces of its rows where there are
        enough of each class, else at random. A step is one of stepwise EM with a step size that falls with
        the rows seen (``kappa``, ``t0``, ``batch_rows``), without momentum, under the first threshold of
        ``nu_schedule``; ``algorithm="passive_aggressive"`` takes passive-aggressive steps. Second moments are
        those of all rows so far, with a prior worth as many rows as there are features, which fades.

        Parameters
        ----------
        X : array-like, shape (n, features), or Dataset
            One row or more.
        y : array-like, shape (n,); a Dataset brings its own
        classes : array-like or None
            All classes that will ever come; needed in the first call.
        sample_weight : array-like, shape (n,), or None

        Returns
        -------
        self

        Raises
        ------
        ValueError
            ``classes`` missing in the first call or different later; a label that is none of them; another
            number of features; a parameter out of range.
        DataError
            NaN or infinite values, naming row and feature.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> rng = np.random.default_rng(0)
        >>> x, y = rng.normal(size=(200, 2)) * [[3.0, 0.3]], np.zeros(200, dtype=int)
        >>> x, y = np.concatenate([x, x[:, ::-1]]), np.concatenate([y, y + 1])
        >>> order, m = rng.permutation(400), sl.CapsuleRegression(capsule_dim=1, random_state=0)
        >>> for i in order:
        ...     m = m.partial_fit(x[i : i + 1], y[i : i + 1], classes=[0, 1])
        >>> bool(m.score(x, y) > 0.8)
        True
        """
        options = self._stream_options()
        if hasattr(self, "W_"):
            self._check_same_classes(classes)
        elif classes is None:
            raise ValueError(
                "classes must be passed on the first call to partial_fit: all labels that will ever come"
            )
        if is_plain(X) and not hasattr(X, "tocsr"):
            self._learn(X, y, sample_weight, classes, options)
            return self
        ds = self._training_rows(X, y, sample_weight, reset=not hasattr(self, "W_"))
        for a in range(0, len(ds), READ_ROWS):
            b = min(a + READ_ROWS, len(ds))
            weight = ds.read_weight(a, b) if ds.has_weight else None
            rows = ds.read_x(a, b)
            rows = rows.toarray() if ds.is_sparse else rows.reshape(b - a, -1)
            self._learn(rows, ds.read_y(a, b), weight, classes, options)
        return self

    def _learn(self, X: Any, y: Any, sample_weight: Any, classes: Any, options: StreamOptions) -> None:
        first = not hasattr(self, "W_")
        known = _sorted_classes(classes) if first else self.classes_
        x, codes = self._checked_rows(X, y, known, first)
        weight = self._row_weights(sample_weight, codes, known)
        if first:
            self._begin_stream(x, codes, known)
        elif self._running is None:
            if self._sums is None:
                raise ValueError(
                    "this model was saved by an older scalelatent, without what partial_fit needs: fit it "
                    "again"
                )
            self._running = RunningCapsule(self._members, self.W_, self.W_, self._sums, 0.0, self._seen_rows)
        running = self._running
        assert running is not None
        if self.projection_ is not None:
            x = x.astype(np.float64) @ self.projection_
        running.learn(np.ascontiguousarray(x, dtype=np.float32), codes, weight, options, _backend())
        self._set_learned(W_=running.average)
        # Those of a fit were of other weights.
        self.best_validation_error_ = self.mean_member_validation_error_ = None

    def _begin_stream(self, x: np.ndarray, codes: np.ndarray, classes: np.ndarray) -> None:
        """First weights from the first rows."""
        if not (self.projection is None or self.projection == "auto"):
            raise ValueError(
                f"projection={self.projection!r}: partial_fit begins before there are rows to take "
                "directions from. Set projection=None, or call fit first and go on from there"
            )
        dim = min(CAPSULE_DIM, x.shape[1]) if self.capsule_dim is None else self.capsule_dim
        members = build_members(self.architecture, len(classes), dim)
        self.seed_ = resolve_seed(self.random_state)
        rng = stream(self.seed_, "capsule-start")
        self._running = RunningCapsule.begin(members, x, codes, self.init, float(self.init_scale), rng)
        self._members, self.best_validation_error_ = members, None
        self.mean_member_validation_error_ = None
        self.n_iter_, self.history_ = 0, []
        average = self._running.average
        self._set_learned(classes_=classes, W_=average, capsule_dims_=members.dims, projection_=None)

    # -- checks ----------------------------------------------------------------------------------------------

    def _stream_options(self) -> StreamOptions:
        """Settings of a step; checked once, for a check costs more than a step of one row."""
        given = tuple(getattr(self, name) for name in _READ)
        kept = self.__dict__.get("_stream_kept")
        if kept is not None and kept[0] == given:
            return kept[1]
        self._check_params()  # type: ignore[attr-defined]
        if self.device == "gpu":
            raise ValueError(
                "device='gpu': partial_fit runs on the processor, for batches of a few rows; leave device="
                "'auto', or use fit"
            )
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced': partial_fit does not know how many rows of each class will come; "
                "give the weights as a dict, or sample_weight"
            )
        options = StreamOptions(
            passive=self.algorithm == "passive_aggressive",
            nu=float(schedule_arrays(self.nu_schedule)[0][0]),
            kappa=float(self.kappa),
            t0=float(self.t0),
            batch_rows=batch_rows(self),
            ridge=float(self.ridge),
            aggressiveness=float(self.aggressiveness),
        )
        self._stream_kept = given, options
        return options

    def _check_same_classes(self, classes: Any) -> None:
        if (
            classes is not None
            and classes is not self.classes_
            and not np.array_equal(np.unique(classes), self.classes_)
        ):
            raise ValueError(
                f"classes={list(classes)!r} is not the same as on the first call to partial_fit, or in fit: "
                f"{self.classes_.tolist()}. Leave it out, or begin with a new model"
            )

    def _checked_rows(
        self, X: Any, y: Any, classes: np.ndarray, first: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows and class codes. scikit-learn's checks take longer than a step of one row: arrays that are
        plainly right do without.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        plain = type(X) is np.ndarray and X.ndim == 2 and X.dtype.kind in "fiub" and len(X) > 0
        if (
            first
            or not plain
            or X.shape[1] != self.n_features_in_
            or type(y) is not np.ndarray
            or y.ndim != 1
        ):
            refuse_mixed(y, "y")
            X, y = validated(self, X, y, reset=first, dtype="numeric", order="C", ensure_all_finite=False)
        elif len(y) != len(X):
            raise ValueError(f"X has {len(X)} rows, but y has {len(y)} labels: give one label a row")
        check_finite(X, "X", largest=LARGEST)
        codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
        other = classes[codes] != y
        if other.any():
            new = np.unique(np.asarray(y)[other]).tolist()
            raise ValueError(
                f"y holds label(s) {new}, which are none of the classes {classes.tolist()} of the first call "
                "to partial_fit or of fit: a new class needs a new model (name all classes in its first call)"
            )
        return X, codes.astype(np.int32)

    def _row_weights(self, sample_weight: Any, codes: np.ndarray, classes: np.ndarray) -> np.ndarray | None:
        weight = None
        if sample_weight is not None:
            weight = np.asarray(sample_weight, dtype=np.float64)
            if weight.shape != codes.shape or not (np.isfinite(weight) & (weight >= 0)).all():
                raise ValueError(
                    f"sample_weight has shape {weight.shape} for {len(codes)} rows: give one finite weight "
                    "of at least 0 a row"
                )
        if self.class_weight is not None:
            own = class_weights(self.class_weight, classes, np.zeros(len(classes)))
            assert own is not None
            weight = own[codes] if weight is None else weight * own[codes]
        return weight


def _sorted_classes(classes: Any) -> np.ndarray:
    found = np.unique(np.asarray(classes))
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError(f"classes={list(classes)!r} holds NaN or infinity: give the labels that y will hold")
    return found
