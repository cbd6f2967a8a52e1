"""The fit of a bootstrap network as steps, what it is told, and what it will need."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from scalelatent.contract.parameters import is_number
from scalelatent.contract.stats import Stats
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.errors import warn_user
from scalelatent.estimators.steps import (
    Begin,
    Collect,
    Derive,
    Encode,
    Gather,
    Learn,
    Remember,
    Rows,
    Steps,
)
from scalelatent.kernels.streams import stream
from scalelatent.models.mbn.model.layers import Layer, make_layers, schedule
from scalelatent.models.mbn.model.network import LayerCoder
from scalelatent.models.mbn.model.pca import (
    CodeCounts,
    Components,
    PcaState,
    StreamedPca,
    kernel_components,
)

from .decay import GRID, SAMPLE_ROWS, choose_decay

# Up to so many rows the matrix of their inner products gives all components at once.
KERNEL_ROWS = 1024
# Components that a share of the variance is first looked for in, and at most.
FIRST_COMPONENTS, MOST_COMPONENTS = 32, 1024
# The sums of a pass that looks for a share are no larger, but for the first components.
SHARE_BYTES = 2**25
# Below so many clusterings NMI falls, on images and text alike.
FEW_CLUSTERINGS = 50


def layers_of(model: Any, train: Dataset, decay: float, seed: int) -> tuple[Layer, ...]:
    """The layers of a network over some rows.

    Raises
    ------
    ValueError
        See :func:`~scalelatent.models.mbn.model.layers.schedule` and
        :func:`~scalelatent.models.mbn.model.layers.make_layers`.
    """
    return make_layers(
        schedule(len(train), model.k1, decay, model.k_last, model.n_classes),
        n_rows=len(train),
        n_features=train.n_features,
        n_clusterings=int(model.n_clusterings),
        fraction=float(model.feature_fraction),
        metric=model.metric,
        csr=train.is_sparse,
        dtype=str(train.dtype),
        seed=seed,
    )


def fit_steps(model: Any, rows: Mapping[str, Rows]) -> Steps:
    """A whole fit, see :mod:`.steps`; sets the model's learned attributes."""
    all_rows = (
        "centroids of a bootstrap network are drawn from all rows; clean or leave out the bad ones first"
    )
    model.seed_, rows = yield Begin({"max_iter": None}, keeps_records=True, all_rows=all_rows)
    train = rows["train"].dataset
    decay = model.decay
    if decay == "auto":
        about = {"rows": min(SAMPLE_ROWS, len(train)), "tries": len(GRID)}
        chosen = yield Remember(
            "decay", lambda: {"decay": np.array(choose_decay(model, train, model.seed_))}, about
        )
        decay = float(chosen["decay"])
        model._check_chosen(decay)
    model.decay_ = float(decay)
    layers = layers_of(model, train, model.decay_, model.seed_)
    below: Rows | None = rows["train"]
    centroids, codes = [], {}
    for layer in layers:
        about = {"layer": layer.number, "layers": len(layers), "k": layer.k}
        sets = yield Gather(f"gather-l{layer.number}", layer, below, about)
        kept = model.keep_codes or layer is layers[-1]
        over = () if model.keep_codes or layer.number == 1 else (f"code-l{layer.number - 1}",)
        coder = LayerCoder(layer, sets, 0, layer.n_clusterings)
        below = yield Encode(f"code-l{layer.number}", coder, below, kept=kept, over=over, about=about)
        centroids.append(sets)
        if kept and below is not None:
            codes[layer.number] = below.dataset
    components: Components | None = None
    history: list[dict[str, Any]] = []
    if model.output == "pca":
        components, history = yield from pca_steps(model, layers[-1], codes[len(layers)], "pca")
    model._keep(layers, centroids, codes, components, history)


def most_components(layer: Layer) -> int:
    """Components that a share of the variance is looked for in at most."""
    # Twice as many columns are iterated as there are components.
    some = SHARE_BYTES // (16 * layer.n_clusterings * layer.k)
    return max(FIRST_COMPONENTS, min(some, MOST_COMPONENTS))


def pca_steps(
    model: Any, layer: Layer, codes: Dataset, name: str
) -> Generator[Any, Any, tuple[Components, list[dict[str, Any]]]]:
    """Principal components of a layer's codes, and records of the passes that they took."""
    wanted = model.n_components
    if wanted is None:
        wanted = model.n_classes or 2
    share = float(wanted) if is_number(wanted) and wanted < 1 else None
    if len(codes) <= KERNEL_ROWS:
        found = yield Derive(_all_components, (codes, layer.k, model.device))
        count = (found.reaching(share) or len(found.offset)) if share is not None else int(wanted)
        return _filled(found.first(count), count), []
    stats: Stats = yield Collect(f"{name}-counts", CodeCounts(layer.n_clusterings, layer.k), Rows(codes))
    history: list[dict[str, Any]] = []
    count, most = FIRST_COMPONENTS if share is not None else int(wanted), most_components(layer)
    while True:
        learner = StreamedPca.of(np.array(stats["counts"]), len(codes), count)
        start = learner.start(stream(model.seed_, "mbn-pca"))
        stage = name if share is None else f"{name}-{count}"
        result = yield Learn(stage, learner, start, {"train": Rows(codes)}, None, _no_predictor)
        history += result.history
        found = learner.components(result.state)
        if share is None:
            _warn_unsettled(learner, result.state)
            return _filled(found, count), history
        reached = found.reaching(share)
        if reached is not None or learner.n_components < count or count >= most:
            _warn_unsettled(learner, result.state)
            if reached is None and learner.n_components == count:
                _warn_short(share, found)
            return found.first(reached or len(found.offset)), history
        count = min(2 * count, most)


def warn_few_clusterings(model: Any) -> None:
    """Warn where too few clusterings vote for rows of one cluster to share a code above the first layer.

    Warns
    -----
    UserWarning
        Below :data:`FEW_CLUSTERINGS`, from where on NMI stays (benchmarks/choosing.py, mbn_clustering.py).
    """
    if model.n_clusterings < FEW_CLUSTERINGS:
        warn_user(
            f"n_clusterings={model.n_clusterings}: with fewer than {FEW_CLUSTERINGS} hardly two rows share a "
            "code above the first layer, and clusters are lost, those of text above all: take 100 or more"
        )


def _warn_unsettled(learner: StreamedPca, state: PcaState) -> None:
    if state.iteration >= learner.max_iter and state.residual > learner.tol:
        warnings.warn(
            f"the {learner.n_components} components of the output have not settled in {learner.max_iter} "
            f"passes (residual {state.residual:.1e}, wanted {learner.tol:.0e}): the last ones may be mixed "
            "with others; fewer settle sooner (n_components)",
            ConvergenceWarning,
            stacklevel=2,
        )


def _warn_short(share: float, found: Components) -> None:
    reached = found.variance.sum() / max(found.total_variance, 1e-300)
    warnings.warn(
        f"n_components={share:g} is not reached: {len(found.offset)} components, the most that a share is "
        f"looked for in, explain {reached:.3f} of the variance; give a smaller share, or a number of "
        "components",
        UserWarning,
        stacklevel=2,
    )


def _no_predictor(state: Any) -> Any:
    raise NotImplementedError("a bootstrap network predicts nothing")


def _all_components(codes: Dataset, k: int, device: str) -> Components:
    backend = make_backend("reference" if device == "reference" else "cpu")
    return kernel_components(np.ascontiguousarray(codes.read_x(0, len(codes))), k, backend.kernel)


def _filled(found: Components, count: int) -> Components:
    """As many components as were asked for: where rows lie in fewer dimensions, the last ones are zeros."""
    missing = count - len(found.offset)
    if missing <= 0:
        return found
    table = np.concatenate([found.table, np.zeros((*found.table.shape[:2], missing))], axis=2)
    zeros = np.zeros(missing)
    return Components(
        table,
        np.concatenate([found.offset, zeros]),
        np.concatenate([found.variance, zeros]),
        found.total_variance,
    )


def layer_components(model: Any, number: int, codes: Dataset) -> Components:
    """Components of a lower layer, which the fit did not need, from the codes that it kept."""
    from scalelatent.estimators.session import FitSession

    # No worker of an enclosing cluster sees codes in memory.
    here = not codes.is_stored
    with FitSession(model._kind, device=model.device, n_jobs=model.n_jobs, in_process=here) as session:
        session.begin(model.seed_, {}, {})
        components, _ = session.answer(pca_steps(model, model._layers[number - 1], codes, f"pca-l{number}"))
    return components
