"""Input checks, settings and saved state of ``partial_fit`` of capsule regression."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.finite import LARGEST_VALUE
from scalelatent.contract.learners import Backend
from scalelatent.data.schema import check_label_values
from scalelatent.engine.backend import make_backend
from scalelatent.estimators.inputs import check_finite, validate_rows
from scalelatent.models.capsule.model.members import Members, build_members
from scalelatent.models.capsule.model.predict import RowFrame
from scalelatent.models.capsule.model.running import RowSums, RunningCapsule, StreamOptions
from scalelatent.models.capsule.model.start import parse_schedule
from scalelatent.reductions.intercept import Intercept, map_rows

from .fit import CAPSULE_DIM, get_batch_rows, resolve_class_weight, warn_of_algorithm

if TYPE_CHECKING:
    from .estimator import CapsuleRegression

# Number of rows of a Dataset that are read at a time.
READ_ROWS = 8192
# Parameters that a step reads. They are checked again only if one of these parameters has changed.
STEP_PARAMETERS = (
    "algorithm", "nu_schedule", "kappa", "t0", "batch_rows", "n_chains", "ridge", "class_weight", "device",
)  # fmt: skip


@lru_cache(maxsize=1)
def get_cpu_backend() -> Backend:
    """Return the CPU backend, which is created once."""
    return make_backend("cpu")


def begin_stream(
    model: CapsuleRegression, x: np.ndarray, codes: np.ndarray, n_classes: int, rng: np.random.Generator
) -> RunningCapsule:
    """Return the state of a first ``partial_fit``, with first weights from the first rows."""
    if not (model.projection is None or model.projection == "auto"):
        raise ValueError(
            f"projection={model.projection!r}: partial_fit starts before there are rows to take directions "
            "from. Set projection=None, or call fit first and continue from there"
        )
    dim = min(CAPSULE_DIM, x.shape[1]) if model.capsule_dim is None else model.capsule_dim
    members = build_members(model.architecture, n_classes, dim)
    return RunningCapsule.begin(members, x, codes, model.init, float(model.init_scale), rng)


def continue_from(stream: RunningCapsule, w: np.ndarray) -> None:
    """Make the state of ``partial_fit`` continue from the weights (D, p) of a fit."""
    if stream.sums is None:
        raise ValueError(
            "this model was saved by an older scalelatent, without the sums that partial_fit needs: fit it "
            "again"
        )
    stream.w = stream.average = w


def save_stream(stream: RunningCapsule) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the values and arrays of the state of ``partial_fit`` that a model file stores."""
    arrays = {"ridge": stream.ridge}
    if stream.w is not None:
        stream.discard_inverses()  # so that this model and the saved model continue with the same bits
        arrays["running_W"] = stream.w
    if stream.sums is not None:
        arrays |= {
            "moment": np.stack(stream.sums.moment),
            "moment_weight": stream.sums.weight,
            "moment_rows": stream.sums.count,
        }
    return {"seen_rows": stream.rows, "prior_variance": stream.variance}, arrays


def restore_stream(
    members: Members, w: np.ndarray, values: dict[str, Any], arrays: dict[str, np.ndarray]
) -> RunningCapsule:
    """Return the state of ``partial_fit`` of a saved model whose weights are ``w`` (D, p)."""
    sums = None
    if "moment" in arrays:
        weight = arrays["moment_weight"]
        # Models of earlier versions have no count of the rows; use the weight of the rows instead.
        sums = RowSums(tuple(arrays["moment"]), weight, arrays.get("moment_rows", weight))
    running = arrays.get("running_W")
    return RunningCapsule(
        members,
        running,
        None if running is None else w,
        sums,
        values.get("prior_variance", 0.0),
        values.get("seen_rows", 0.0),
        # Models of earlier versions were saved without the ridge, which was a parameter only.
        arrays.get("ridge", np.zeros(w.shape[1])),
    )


def estimate_intercept(x: np.ndarray) -> Intercept:
    """Return the intercept from the first rows (n, p) of ``partial_fit``; the mean is 0 for a single row."""
    mean = x.mean(axis=0, dtype=np.float64) if len(x) > 1 else np.zeros(x.shape[1])
    length = float(np.sqrt(np.mean(np.sum((x - mean) ** 2, axis=1))))
    return Intercept(mean.astype(np.float32), length or 1.0)


def apply_frame(frame: RowFrame, x: np.ndarray) -> np.ndarray:
    """Return rows (n, features) after intercept and projection, float32 (n, columns of W)."""
    matrix = frame.matrix
    dtype = np.float32 if matrix is None else np.float64
    rows = map_rows(frame.intercept, get_cpu_backend(), x, dtype, "stream")
    return rows if matrix is None else (rows @ matrix).astype(np.float32)


def stream_options(model: CapsuleRegression) -> StreamOptions:
    """Return the settings of a step; check them only after a change, because the check is slow."""
    given = tuple(getattr(model, name) for name in STEP_PARAMETERS)
    kept = vars(model).get("_stream_kept")
    if kept is not None and kept[0] == given:
        return kept[1]
    model._check_params()
    warn_of_algorithm(model)
    if model.device == "gpu":
        raise ValueError(
            "device='gpu': partial_fit runs on the processor, because its batches have few rows; leave "
            "device='auto', or use fit"
        )
    if isinstance(model.class_weight, str) and model.class_weight == "balanced":
        raise ValueError(
            "class_weight='balanced': partial_fit does not know how many rows of each class will come; "
            "give the weights as a dict, or sample_weight"
        )
    options = StreamOptions(
        nu=float(parse_schedule(model.nu_schedule)[0][0]),
        kappa=float(model.kappa),
        t0=float(model.t0),
        batch_rows=get_batch_rows(model),
        ridge=None if model.ridge is None else float(model.ridge),
    )
    model._stream_kept = given, options
    return options


def sort_classes(classes: Any) -> np.ndarray:
    """Return the sorted classes of a first call."""
    if classes is None:
        raise ValueError(
            "classes must be passed on the first call to partial_fit: all labels that any call will have"
        )
    found = np.unique(np.asarray(classes))
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError(f"classes={list(classes)!r} contains NaN or infinity: give the labels of y")
    return found


def check_same_classes(classes: Any, known: np.ndarray) -> None:
    """Raise ValueError if the classes differ from those of the first call."""
    if classes is not None and classes is not known and not np.array_equal(np.unique(classes), known):
        raise ValueError(
            f"classes={list(classes)!r} is not the same as on the first call to partial_fit, or in fit: "
            f"{known.tolist()}. Omit classes, or start with a new model"
        )


def check_rows(
    model: CapsuleRegression, X: Any, y: Any, classes: np.ndarray, *, reset: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and class codes; numeric arrays of the right shape skip scikit-learn's slow checks."""
    if y is None:
        raise ValueError(f"{type(model).__name__} requires y to be passed, but the target y is None")
    plain = type(X) is np.ndarray and X.ndim == 2 and X.dtype.kind in "fiub" and len(X) > 0
    if reset or not plain or X.shape[1] != model.n_features_in_ or type(y) is not np.ndarray or y.ndim != 1:
        check_label_values(y, "y")
        X, y = validate_rows(model, X, y, reset=reset, dtype="numeric", order="C", ensure_all_finite=False)
    elif len(y) != len(X):
        raise ValueError(f"X has {len(X)} rows, but y has {len(y)} labels: give one label per row")
    check_finite(X, "X", largest=LARGEST_VALUE)
    codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
    other = classes[codes] != y
    if other.any():
        new = np.unique(np.asarray(y)[other]).tolist()
        raise ValueError(
            f"y contains label(s) {new}, which are not among the classes {classes.tolist()} of the first "
            "call to partial_fit or of fit; pass all classes in the first call of a new model"
        )
    return X, codes.astype(np.int32)


def resolve_row_weights(
    class_weight: Mapping[Any, float] | str | None, sample_weight: Any, codes: np.ndarray, classes: np.ndarray
) -> np.ndarray | None:
    """Return the weight of each row, sample weight times class weight, or None."""
    weight = None
    if sample_weight is not None:
        weight = np.asarray(sample_weight, dtype=np.float64)
        if weight.shape != codes.shape or not (np.isfinite(weight) & (weight >= 0)).all():
            raise ValueError(
                f"sample_weight has shape {weight.shape} for {len(codes)} rows: give one finite weight "
                "of at least 0 per row"
            )
    if class_weight is not None:
        own = resolve_class_weight(class_weight, classes, np.zeros(len(classes)))
        assert own is not None
        weight = own[codes] if weight is None else weight * own[codes]
    return weight
