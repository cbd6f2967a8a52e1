"""A capsule model that learns from a stream of rows, eager, one row or more at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from scalelatent.contract.finite import LARGEST_VALUE
from scalelatent.contract.learners import Backend
from scalelatent.data.schema import check_label_values
from scalelatent.engine.backend import make_backend
from scalelatent.estimators.inputs import check_finite, validated
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.predict import RowFrame
from scalelatent.models.capsule.model.running import RowSums, RunningCapsule, StreamOptions
from scalelatent.models.capsule.model.start import schedule_arrays
from scalelatent.reductions.intercept import Intercept, mapped_rows

from .fit import CAPSULE_DIM, batch_rows, class_weights

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

READ_ROWS = 8192
# Parameters that a step reads: checked again where one has changed.
READ = (
    "algorithm", "nu_schedule", "kappa", "t0", "batch_rows", "n_chains", "ridge", "aggressiveness",
    "class_weight", "device",
)  # fmt: skip


@lru_cache(maxsize=1)
def cpu_backend() -> Backend:
    """The processor's, made once."""
    return make_backend("cpu")


@dataclass
class CapsuleStream:
    """What a stream goes on from: sums of the rows of a fit, then the model of the moment.

    ``sums`` is None of models that were saved without; ``seen_rows`` are those of all passes of a fit.
    """

    members: Members
    sums: RowSums | None
    seen_rows: float
    # float64 (columns of W,): that of the fit
    ridge: np.ndarray
    running: RunningCapsule | None = None

    @classmethod
    def begin(
        cls,
        model: CapsuleRegression,
        x: np.ndarray,
        codes: np.ndarray,
        n_classes: int,
        rng: np.random.Generator,
    ) -> Self:
        """First weights from the first rows."""
        if not (model.projection is None or model.projection == "auto"):
            raise ValueError(
                f"projection={model.projection!r}: partial_fit begins before there are rows to take "
                "directions from. Set projection=None, or call fit first and go on from there"
            )
        dim = min(CAPSULE_DIM, x.shape[1]) if model.capsule_dim is None else model.capsule_dim
        members = build_members(model.architecture, n_classes, dim)
        running = RunningCapsule.begin(members, x, codes, model.init, float(model.init_scale), rng)
        return cls(members, None, 0.0, running.ridge, running)

    def copy(self) -> CapsuleStream:
        """Return a stream that learns on without a change of this one."""
        running = self.running
        if running is not None:
            running = replace(running, _inverses=dict(running._inverses))
        return replace(self, running=running)

    def learn(
        self,
        w: np.ndarray | None,
        x: np.ndarray,
        codes: np.ndarray,
        weight: np.ndarray | None,
        options: StreamOptions,
    ) -> np.ndarray:
        """Learn from rows, going on from a fit's W; returns the weights that predict."""
        if self.running is None:
            if self.sums is None:
                raise ValueError(
                    "this model was saved by an older scalelatent, without what partial_fit needs: fit it "
                    "again"
                )
            assert w is not None
            self.running = RunningCapsule(self.members, w, w, self.sums, 0.0, self.seen_rows, self.ridge)
        x = np.ascontiguousarray(x, dtype=np.float32)
        self.running.learn(x, codes, weight, options, cpu_backend())
        return self.running.average

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(values, arrays) to save."""
        arrays, running, sums = {"ridge": self.ridge}, self.running, self.sums
        if running is not None:
            running.renew()  # so that this model and the saved one go on alike
            arrays["running_W"], sums = running.w, running.sums
        if sums is not None:
            arrays |= {
                "moment": np.stack(sums.moment),
                "moment_weight": sums.weight,
                "moment_rows": sums.count,
            }
        values = {
            "seen_rows": self.seen_rows if running is None else running.rows,
            "prior_variance": 0.0 if running is None else running.variance,
        }
        return values, arrays

    @classmethod
    def restored(
        cls, members: Members, w: np.ndarray, values: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> Self:
        # Models of earlier versions were saved without the ridge: one number, a parameter.
        ridge = arrays.get("ridge", np.zeros(w.shape[1]))
        stream = cls(members, None, values.get("seen_rows", 0.0), ridge)
        if "moment" in arrays:
            weight = arrays["moment_weight"]
            # Models of earlier versions have no count of the rows: as if these weighed 1.
            stream.sums = RowSums(tuple(arrays["moment"]), weight, arrays.get("moment_rows", weight))
        if "running_W" in arrays:
            assert stream.sums is not None
            own = stream.sums, values["prior_variance"], values["seen_rows"]
            stream.running = RunningCapsule(members, arrays["running_W"], w, *own, ridge)
        return stream


def first_intercept(x: np.ndarray) -> Intercept:
    """Return the intercept of a stream, from its first rows (n, p); one row alone has no mean."""
    mean = x.mean(axis=0, dtype=np.float64) if len(x) > 1 else np.zeros(x.shape[1])
    length = float(np.sqrt(np.mean(np.sum((x - mean) ** 2, axis=1))))
    return Intercept(mean.astype(np.float32), length or 1.0)


def framed(frame: RowFrame, x: np.ndarray) -> np.ndarray:
    """Return rows (n, features) with their intercept, projected: float32 (n, columns of W)."""
    matrix = frame.matrix
    dtype = np.float32 if matrix is None else np.float64
    rows = mapped_rows(frame.intercept, cpu_backend(), x, dtype, "stream")
    return rows if matrix is None else (rows @ matrix).astype(np.float32)


def stream_options(model: CapsuleRegression) -> StreamOptions:
    """Settings of a step; checked once, for a check costs more than a step of one row."""
    given = tuple(getattr(model, name) for name in READ)
    kept = vars(model).get("_stream_kept")
    if kept is not None and kept[0] == given:
        return kept[1]
    model._check_params()
    if model.device == "gpu":
        raise ValueError(
            "device='gpu': partial_fit runs on the processor, for batches of a few rows; leave device="
            "'auto', or use fit"
        )
    if isinstance(model.class_weight, str) and model.class_weight == "balanced":
        raise ValueError(
            "class_weight='balanced': partial_fit does not know how many rows of each class will come; "
            "give the weights as a dict, or sample_weight"
        )
    options = StreamOptions(
        passive=model.algorithm == "passive_aggressive",
        nu=float(schedule_arrays(model.nu_schedule)[0][0]),
        kappa=float(model.kappa),
        t0=float(model.t0),
        batch_rows=batch_rows(model),
        ridge=None if model.ridge is None else float(model.ridge),
        aggressiveness=float(model.aggressiveness),
    )
    model._stream_kept = given, options
    return options


def sorted_classes(classes: Any) -> np.ndarray:
    """The classes of a first call."""
    if classes is None:
        raise ValueError(
            "classes must be passed on the first call to partial_fit: all labels that will ever come"
        )
    found = np.unique(np.asarray(classes))
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError(f"classes={list(classes)!r} holds NaN or infinity: give the labels that y will hold")
    return found


def check_same_classes(classes: Any, known: np.ndarray) -> None:
    """Refuse other classes than those of the first call."""
    if classes is not None and classes is not known and not np.array_equal(np.unique(classes), known):
        raise ValueError(
            f"classes={list(classes)!r} is not the same as on the first call to partial_fit, or in fit: "
            f"{known.tolist()}. Leave it out, or begin with a new model"
        )


def checked_rows(
    model: CapsuleRegression, X: Any, y: Any, classes: np.ndarray, first: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and class codes; arrays that are plainly right do without scikit-learn's slow checks."""
    if y is None:
        raise ValueError(f"{type(model).__name__} requires y to be passed, but the target y is None")
    plain = type(X) is np.ndarray and X.ndim == 2 and X.dtype.kind in "fiub" and len(X) > 0
    if first or not plain or X.shape[1] != model.n_features_in_ or type(y) is not np.ndarray or y.ndim != 1:
        check_label_values(y, "y")
        X, y = validated(model, X, y, reset=first, dtype="numeric", order="C", ensure_all_finite=False)
    elif len(y) != len(X):
        raise ValueError(f"X has {len(X)} rows, but y has {len(y)} labels: give one label a row")
    check_finite(X, "X", largest=LARGEST_VALUE)
    codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
    other = classes[codes] != y
    if other.any():
        new = np.unique(np.asarray(y)[other]).tolist()
        raise ValueError(
            f"y holds label(s) {new}, which are none of the classes {classes.tolist()} of the first call "
            "to partial_fit or of fit: a new class needs a new model (name all classes in its first call)"
        )
    return X, codes.astype(np.int32)


def row_weights(
    class_weight: Mapping[Any, float] | str | None, sample_weight: Any, codes: np.ndarray, classes: np.ndarray
) -> np.ndarray | None:
    """Weight of each row, or None."""
    weight = None
    if sample_weight is not None:
        weight = np.asarray(sample_weight, dtype=np.float64)
        if weight.shape != codes.shape or not (np.isfinite(weight) & (weight >= 0)).all():
            raise ValueError(
                f"sample_weight has shape {weight.shape} for {len(codes)} rows: give one finite weight "
                "of at least 0 a row"
            )
    if class_weight is not None:
        own = class_weights(class_weight, classes, np.zeros(len(classes)))
        assert own is not None
        weight = own[codes] if weight is None else weight * own[codes]
    return weight
