"""Multilayer bootstrap networks as a scikit-learn estimator."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin, clone
from sklearn.exceptions import NotFittedError

from scalelatent.data import Dataset
from scalelatent.deploy.clusters import current_client
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.plan import find_resources
from scalelatent.errors import DataError, RunError
from scalelatent.estimators.base import (
    _CHECKS,
    StreamedEstimator,
    check_finite,
    is_plain,
    validated,
)
from scalelatent.estimators.learned import FIT_AGAIN, Learned
from scalelatent.estimators.steps import Rows, Steps
from scalelatent.models.mbn.model.layers import Layer, schedule
from scalelatent.models.mbn.model.pca import Components
from scalelatent.storage.disk import Location

from .fit import fit_steps, warn_few_clusterings
from .output import NetworkOutput
from .parameters import PARAMETERS
from .plan import check_room, plan
from .saved import into_memory, load_network, network_to_saved, write_centroids

# Networks up to this size live in memory where no run folder was asked for.
MEMORY_BYTES = 2**27
COMPONENT_ATTRIBUTES = (
    "components_",
    "mean_projection_",
    "explained_variance_",
    "explained_variance_ratio_",
)


class MultilayerBootstrapNetwork(
    NetworkOutput, ClassNamePrefixFeaturesOutMixin, TransformerMixin, StreamedEstimator
):
    """Nonlinear dimensionality reduction by layers of random clusterings.

    Each layer has ``n_clusterings`` clusterings, whose centroids are random rows of what it sees on random
    columns of it; a row's output is the number of its nearest centroid in each. Layers have fewer and fewer
    centroids; the principal components of the last one's codes are the output. Nothing is optimised. Fits
    numpy arrays, memmaps, zarr and dask arrays, scipy CSR and :class:`~scalelatent.Dataset` rows of any
    number, in process or on a Dask cluster, with the same bits: nearest centroids are those of the rows in
    float32, and what float32 leaves in question is decided in float64.

    Parameters
    ----------
    n_clusterings : int, default 400
        V, of each layer; above 100 the result hardly changes.
    k1 : int or None
        Centroids of the first layer's clusterings. None: half of the rows, which suits up to some thousand.
    decay : float or "auto", default 0.5
        delta: k_{l+1} = floor(delta k_l). Larger for highly nonlinear data. "auto": of 0.1, 0.2, ..., 0.9 the
        one whose clusters are found again best from half of the features, by small networks on at most 1,000
        of the rows; no labels are used. ``n_classes``, where it is known, is the number of these clusters.
    k_last : int or None
        Fewest centroids that a layer may have. None: 1.5 times ``n_classes``.
    feature_fraction : float, default 0.5
        a: share of the columns (above the first layer of the one-hot units) that a clustering looks at.
    metric : {"euclidean", "cosine"}
        Of the first layer; cosine suits text.
    n_components : int, float in (0, 1) or None
        Components of the output, or the share of the variance that they have to explain (of more than 1,024
        rows some hundreds are looked for, of a wide last layer fewer - 41 of 400 clusterings of 125 units -
        with a warning where they fall short). None: ``n_classes``, or 2.
        Where the codes have fewer dimensions than a number given here, the last components are zeros.
    n_classes : int or None
        Expected number of clusters, which ends the layers. None stands for 2.
    output : {"pca", "codes"}
        What ``transform`` gives.
    keep_codes : bool
        Keep the codes of all layers, not of the last alone; for outputs of lower layers.
    random_state : int, Generator, RandomState or None
        None draws a seed and keeps it in ``seed_``. A seed never changes the speed.
    device : {"auto", "cpu", "gpu"}
    n_jobs : int or None
        Threads in this process; None is what ``joblib.parallel_config`` says, else all cores. The result is
        the same for any number.

    Attributes
    ----------
    ks_ : list of int
        Centroids of each layer's clusterings.
    decay_ : float
    components_ : ndarray of float64, shape (components, n_clusterings * ks_[-1])
        On one-hot codes; the entry of largest magnitude of each is positive.
    mean_projection_ : ndarray of float64, shape (components,)
        The mean row on them.
    explained_variance_, explained_variance_ratio_ : ndarray of float64, shape (components,)
    history_ : list of dict
        One record a pass of the output's EM-PCA; empty where few rows need none.
    n_iter_ : int
        Passes of it.
    seed_ : int
    n_features_in_ : int

    References
    ----------
    X.-L. Zhang, "Multilayer bootstrap networks", Neural Networks 103 (2018).

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> x = load_digits().data[:300].astype("uint8")
    >>> m = MultilayerBootstrapNetwork(n_clusterings=50, n_components=10, n_classes=10, random_state=0)
    >>> m.fit_transform(x).shape, m.ks_
    ((300, 10), [150, 75, 37, 18])
    """

    _kind = "mbn"
    _parameters = PARAMETERS
    _sign_of_fit = "_layers"
    _saves_datasets = True
    _folder: Any = None
    _validates = False

    @property
    def _output_metric(self) -> str:
        return "overlap" if self.output == "codes" else "cosine"

    ks_ = Learned(FIT_AGAIN)
    components_ = Learned(FIT_AGAIN)
    mean_projection_ = Learned(FIT_AGAIN)
    explained_variance_ = Learned(FIT_AGAIN)
    explained_variance_ratio_ = Learned(FIT_AGAIN)

    def __init__(
        self,
        *,
        n_clusterings: int = 400,
        k1: int | None = None,
        decay: float | str = 0.5,
        k_last: int | None = None,
        feature_fraction: float = 0.5,
        metric: str = "euclidean",
        n_components: int | float | None = None,
        n_classes: int | None = None,
        output: str = "pca",
        keep_codes: bool = False,
        random_state: Any = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.n_clusterings = n_clusterings
        self.k1 = k1
        self.decay = decay
        self.k_last = k_last
        self.feature_fraction = feature_fraction
        self.metric = metric
        self.n_components = n_components
        self.n_classes = n_classes
        self.output = output
        self.keep_codes = keep_codes
        self.random_state = random_state
        self.device = device
        self.n_jobs = n_jobs

    # -- fit
    # --------------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        validation: Any = None,
        client: Any = None,
        run_dir: Any = None,
        resume: bool = False,
        callbacks: Callback | Sequence[Callback] = (),
        engine: Mapping[str, Any] | None = None,
        verbose: bool | None = None,
    ) -> MultilayerBootstrapNetwork:
        """Build the layers one after the other, then the output.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features)
            numpy, memmap, zarr and dask arrays, lists, scipy CSR rows (other sparse formats are converted).
            Labels and weights are not used.
        y : ignored
        validation : None
            There is nothing to validate.
        client : distributed.Client or None
            A cluster to run on; None takes the enclosing ``with sl.cluster(…)``, else this process.
        run_dir : path or None
            Folder for centroids, codes and checkpoints, shared by all workers. None: a temporary one, which
            goes with the estimator; a small network is held in memory.
        resume : bool
            Go on with the fit that ``run_dir`` holds.
        callbacks : Callback or sequence
        engine : dict or None
            block_rows, leaf_rows, checkpoint_seconds, checkpoint_passes, scratch, keep_scratch, cache.
        verbose : bool or None
            Show progress: a display that moves on a terminal and in a notebook, lines elsewhere. None: in a
            notebook alone.

        Returns
        -------
        self

        Raises
        ------
        DataError
            Rows that cannot be used, naming dataset and row.
        ValueError
            A parameter out of range.
        PlanError
            Centroids that memory or disk cannot hold.
        RunError
            The run folder holds another fit; the cluster has no workers.

        Warns
        -----
        LongFitWarning
            It would take over an hour: with the time, and what would shorten it.
        UserWarning
            Fewer than 50 clusterings.

        Examples
        --------
        See the class.
        """
        self._check_params()
        warn_few_clusterings(self)
        train = self._rows_without_labels(X)
        if validation is not None:
            raise DataError(
                "validation rows were given, but MultilayerBootstrapNetwork learns without labels and has "
                "nothing to validate: leave them out ([data] validation)"
            )
        resources = find_resources(client or current_client(), self.n_jobs, None)
        place = tempfile.gettempdir() if run_dir is None else run_dir
        places = None if resume else (place, (engine or {}).get("scratch"))
        if self.decay != "auto":
            check_room(self, train, resources, places, float(self.decay))
        # Of decay="auto", what none of its decays has room for is refused at once.
        self._check_plan(partial(plan, self, train, resources, engine))
        self._check_chosen = partial(check_room, self, train, resources, places)
        own = None if run_dir is not None else tempfile.mkdtemp(prefix="scalelatent-mbn-")
        try:
            self._fit_by_steps(train, None, client, run_dir, resume, callbacks, engine, verbose, own)
        except BaseException:
            if own is not None:
                shutil.rmtree(own, ignore_errors=True)
            raise
        finally:
            del self._check_chosen
        self._settle(own)
        return self

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Fit, and give the output of the training rows, whose codes are at hand.

        Parameters
        ----------
        X, y, **fit_params
            As in :meth:`fit`.

        Returns
        -------
        ndarray of float32, shape (n, components)
            The same as ``fit(X).transform(X)``.

        Examples
        --------
        See the class.
        """
        self.fit(X, y, **fit_params)
        return self._of_training_rows(None, None, None, False, ())

    def _rows_without_labels(self, X: Any, *, reset: bool = True) -> Dataset:
        if isinstance(X, Dataset) or not is_plain(X):
            ds = X if isinstance(X, Dataset) else Dataset.from_arrays(X)
            self._set_width(ds.n_features) if reset else self._check_width(ds, "X")
            return ds
        X = validated(self, X, reset=reset, ensure_min_samples=2 if reset else 1, **_CHECKS)
        check_finite(X, "X")
        return Dataset.from_arrays(X)

    def _search_rows(self, X: Any, y: Any, sample_weight: Any) -> Dataset:
        if sample_weight is not None:
            raise DataError("sample_weight: a bootstrap network takes each row alike: leave the weights out")
        return self._labelled_rows(X, y, reset=True)

    def _labelled_rows(self, X: Any, y: Any, *, reset: bool) -> Dataset:
        """Rows with the labels, if there are any, that an output is scored by."""
        rows = self._rows_without_labels(X, reset=reset)
        if y is None:
            return rows
        if isinstance(X, Dataset):
            raise DataError("y was given beside a Dataset, which brings its own labels: leave y out")
        return Dataset.from_arrays(rows.read_x(0, len(rows)) if is_plain(X) else X, y)

    def _scored_rows(self, X: Any, y: Any, sample_weight: Any) -> Dataset:
        return self._labelled_rows(X, y, reset=False)

    def _validation_rows(self, validation: Any) -> Dataset | None:
        if validation is None or isinstance(validation, Dataset):
            return validation
        try:
            X, y = validation
        except (TypeError, ValueError):
            raise DataError(
                f"validation={type(validation).__name__}: give a Dataset or a pair (X, y)"
            ) from None
        return self._labelled_rows(X, y, reset=False)

    def _fit_steps(self, rows: Mapping[str, Rows]) -> Steps:
        return fit_steps(self, rows)

    def _keep(
        self,
        layers: tuple[Layer, ...],
        centroids: Sequence[Any],
        codes: Mapping[int, Dataset],
        components: Components | None,
        history: list[dict[str, Any]],
    ) -> None:
        self._layers, self._centroids, self._codes = layers, tuple(centroids), dict(codes)
        self._left = {}
        self._set_learned(ks_=[layer.k for layer in layers])
        self._set_components(components)
        self.history_, self.n_iter_ = history, len(history)

    def _set_components(self, components: Components | None) -> None:
        self._components: dict[int, Components] = {}
        if components is None:
            # A fit before this one may have had an output.
            for name in COMPONENT_ATTRIBUTES:
                self.__dict__.pop(name, None)
            return
        d = len(components.offset)
        self._components[len(self._layers)] = components
        table = np.ascontiguousarray(components.table.reshape(-1, d).T)
        table.flags.writeable = False  # a copy: what is written into it would change nothing
        self._set_learned(
            components_=table,
            mean_projection_=components.offset,
            explained_variance_=components.variance,
            explained_variance_ratio_=components.variance / max(components.total_variance, 1e-300),
        )

    def _settle(self, own: str | None) -> None:
        """Take what is small out of a temporary folder, or keep the folder as long as this estimator."""
        if self._folder is not None:
            self._folder()
        self._folder = None
        if own is None:
            return
        sizes = [sets.dataset.nbytes for sets in self._centroids]
        if sum(sizes) + sum(codes.nbytes for codes in self._codes.values()) > MEMORY_BYTES:
            self._folder = weakref.finalize(self, shutil.rmtree, own, ignore_errors=True)
            return
        into_memory(self)
        shutil.rmtree(own, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        if self._folder is not None:
            raise RunError(
                "a copy or pickle of this network would be without its centroids, which lie in a temporary "
                "folder that goes with the original: use save(PLACE) and load_model(PLACE)"
            )
        return super().__getstate__()

    def plan(
        self,
        X: Any,
        y: Any = None,
        *,
        validation: Any = None,
        client: Any = None,
        memory_limit: str | int | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What ``fit`` would need, from shapes and a probe of a second; nothing is fitted.

        Parameters
        ----------
        X, y, validation, client, engine
            As in :meth:`fit`.
        memory_limit : str, int or None
            Of a worker, for example ``"4GB"``; None asks the cluster or this process.

        Returns
        -------
        dict
            Layers with their centroids, tasks, operations and bytes; peak bytes a worker, bytes of disk,
            seconds.

        Raises
        ------
        PlanError
            It cannot fit: naming the setting that would.

        Examples
        --------
        >>> x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
        >>> told = MultilayerBootstrapNetwork(n_clusterings=50).plan(x)
        >>> [layer["k"] for layer in told["layers"].values()]
        [25, 12, 6, 3]
        """
        new = clone(self)  # rows of another width leave this model as it is
        self._check_params()
        train = new._rows_without_labels(X)
        resources = find_resources(client or current_client(), self.n_jobs, memory_limit)
        return plan(new, train, resources, engine, measure=True)

    def schedule(self, n_rows: int) -> list[int]:
        """Centroids of each layer for a number of rows.

        Parameters
        ----------
        n_rows : int

        Returns
        -------
        list of int

        Raises
        ------
        ValueError
            k1 above ``n_rows``, a schedule without a layer, or ``decay="auto"`` before a fit has chosen.

        Examples
        --------
        >>> MultilayerBootstrapNetwork(k1=100, n_classes=10).schedule(1000)
        [100, 50, 25]
        """
        decay = getattr(self, "decay_", None) if self.decay == "auto" else float(self.decay)
        if decay is None:
            raise NotFittedError(
                "decay='auto' is chosen by fit from the rows: ask the fitted network, or give decay a number"
            )
        return schedule(n_rows, self.k1, decay, self.k_last, self.n_classes)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = []
        return tags

    # -- disk
    # -------------------------------------------------------------------------------------------------

    def _to_saved(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return network_to_saved(self)

    def _beside_saved(self) -> Callable[[Location], dict[str, str]]:
        return partial(write_centroids, self)

    @classmethod
    def _from_saved(
        cls, params: dict[str, Any], values: dict[str, Any], arrays: dict[str, np.ndarray], **places: Any
    ) -> MultilayerBootstrapNetwork:
        model = cls(**params)
        load_network(model, values, arrays, **places)
        return model
