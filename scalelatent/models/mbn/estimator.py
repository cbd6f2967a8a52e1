"""The estimator `MultilayerBootstrapNetwork`: its parameters, outputs, and how it is saved."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.exceptions import NotFittedError
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from scalelatent.data import Dataset
from scalelatent.engine.plan import Resources
from scalelatent.engine.rowsets import StoredSets, UncopiedSets
from scalelatent.errors import DataError, RunError
from scalelatent.estimators._sklearn import wrap_output
from scalelatent.estimators.base import OutputName, SavedModelState, StreamedEstimator
from scalelatent.estimators.fit_services import FitCall
from scalelatent.estimators.fitted_attributes import FIT_AGAIN, FittedAttribute
from scalelatent.estimators.gpu_results import follows_rows
from scalelatent.estimators.inputs import is_in_memory
from scalelatent.estimators.session import CallbackList, LocationLike
from scalelatent.models.mbn.model.layers import Layer, make_schedule
from scalelatent.models.mbn.model.network import Network
from scalelatent.models.mbn.model.pca import CodeProjection, Components
from scalelatent.storage.disk import Location

from .fit import check_resources, fit_steps, in_memory_bytes, layer_components, plan, warn_few_clusterings
from .output import Centroids, encode_network, open_network, read_into_memory, write_centroids
from .parameters import PARAMETERS

if TYPE_CHECKING:
    from scalelatent.data.schema import DatasetSpec
    from scalelatent.typing import ClientLike, LabelsLike, RandomState, RowsLike, WeightsLike


# Without a run folder and a cluster, a network is kept in memory if its rows, centroids and codes (numbers of
# nearest centroids) take at most this many bytes.
MAX_BYTES_IN_MEMORY = 2**27
# Attributes that only a fit with output="pca" sets.
COMPONENT_ATTRIBUTES = (
    "components_",
    "mean_projection_",
    "explained_variance_",
    "explained_variance_ratio_",
)


class MultilayerBootstrapNetwork(StreamedEstimator):
    """Nonlinear dimensionality reduction by layers of random clusterings.

    Each layer has ``n_clusterings`` clusterings, whose centroids are random rows of its input on random
    columns. The output of a row is the number of its nearest centroid in each clustering. Each layer has
    fewer centroids than the layer below; principal components of the last layer's codes are the output.
    Nothing is optimised. The network accepts numpy arrays, memmaps, zarr and dask arrays, scipy CSR and
    :class:`~scalelatent.Dataset` rows of any number. The result has the same bits in this process and on a
    Dask cluster, because distances that float32 cannot order are compared in float64.

    Parameters
    ----------
    n_clusterings : int, default 400
        Number of clusterings of each layer (V in the paper); above 100 the result hardly changes.
    n_pools : int, "auto" or "paper"
        Number of pools of the first layer. A pool is a draw of min(2 k1, rows) rows and of features, which
        several clusterings share; each of them takes k1 of the rows as centroids. Time, memory and disk are
        proportional to the number. If it is "paper", each clustering draws its own rows and features. "auto"
        is "paper" for fewer than 1,000 rows or 32 features, else 40.
    k1 : int or None
        Number of centroids of each clustering of the first layer. None means half of the rows, which suits
        up to some thousand rows.
    decay : float or "auto", default "auto"
        Ratio of the numbers of centroids of a layer and the layer below; 0.5 in the paper. Highly nonlinear
        data need a larger one. "auto" tries small networks on at most 1,000 rows, without labels. It chooses
        that of 0.1, 0.2, ..., 0.9 whose clusters are reproduced best from half of the features.
    k_last : int or None
        Least number of centroids of a layer. None means 1.5 times ``n_classes``.
    feature_fraction : float, default 0.5
        Share of the columns (in upper layers: of the one-hot units of the codes) that a clustering uses.
    metric : {"euclidean", "cosine"}
        Distance of the first layer; the cosine suits text.
    n_components : int or None
        Number of components of the output. None means ``n_classes``, or 2 without it. If the codes have fewer
        dimensions, the last components are zeros.
    n_classes : int or None
        Expected number of clusters, from which `k_last` is derived. None means 2.
    output : {"pca", "codes"}
        Result of ``transform``: principal components, or the numbers of the nearest centroids (codes).
    keep_codes : bool
        Keep the codes of all layers instead of the last one, for outputs of lower layers.
    random_state : int, Generator, RandomState or None
        Seed of the random draws. None draws a seed and keeps it in ``seed_``.
    device : {"auto", "cpu", "gpu"}
    n_jobs : int or None
        Number of threads in this process; the result does not depend on it. None means the setting of
        ``joblib.parallel_config``, else all cores.

    Attributes
    ----------
    ks_ : list of int
        Number of centroids of a clustering, for each layer.
    decay_ : float
    components_ : ndarray of float64, shape (components, n_clusterings * ks_[-1])
        Components of the last layer's codes in one-hot form; the largest entry of each is positive.
    mean_projection_ : ndarray of float64, shape (components,)
        Product of the mean one-hot row and each component.
    explained_variance_, explained_variance_ratio_ : ndarray of float64, shape (components,)
    history_ : list of dict
        One record per pass of the PCA over the rows; empty for at most 1,024 rows, which need no passes.
    n_iter_ : int
        Number of passes of the PCA over the rows.
    seed_ : int
    n_features_in_ : int

    Notes
    -----
    ``fit`` ignores labels and weights, and uses no validation rows. Centroids and codes are in ``run_dir``,
    or in a temporary folder that is removed with the estimator. If rows and codes take at most 128 MiB, the
    network keeps a copy of them in memory and writes no folder.

    References
    ----------
    X.-L. Zhang, "Multilayer bootstrap networks", Neural Networks 103 (2018).

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> x = load_digits().data[:300].astype("uint8")
    >>> m = MultilayerBootstrapNetwork(n_clusterings=50, decay=0.5, n_classes=10, random_state=0)
    >>> m.fit_transform(x).shape, m.ks_
    ((300, 10), [150, 75, 37, 18])
    """

    _kind = "mbn"
    _parameters = PARAMETERS
    _fitted_attribute = "_layers"
    _validates = False
    _rounds_rows = True
    ks_ = FittedAttribute(FIT_AGAIN)
    components_ = FittedAttribute(FIT_AGAIN)
    mean_projection_ = FittedAttribute(FIT_AGAIN)
    explained_variance_ = FittedAttribute(FIT_AGAIN)
    explained_variance_ratio_ = FittedAttribute(FIT_AGAIN)
    decay_: float
    _layers: tuple[Layer, ...]
    _centroids: tuple[Centroids, ...]
    # The three dictionaries have the number of a layer as key. Codes are numbers of nearest centroids.
    _codes: dict[int, Dataset]  # codes of the training rows, from the fit
    _run_codes: dict[int, DatasetSpec]  # codes of a loaded network's training rows, in the run folder
    _components: dict[int, Components]  # principal components of the codes
    # Function that removes the temporary folder with the centroids; None if there is no such folder.
    _remove_folder: Callable[[], object] | None = None

    def __init__(
        self,
        *,
        n_clusterings: int = 400,
        n_pools: int | str = "auto",
        k1: int | None = None,
        decay: float | str = "auto",
        k_last: int | None = None,
        feature_fraction: float = 0.5,
        metric: str = "euclidean",
        n_components: int | None = None,
        n_classes: int | None = None,
        output: str = "pca",
        keep_codes: bool = False,
        random_state: RandomState = None,
        device: str = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.n_clusterings = n_clusterings
        self.n_pools = n_pools
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

    def _training_rows(
        self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None, *, reset: bool = True
    ) -> Dataset:
        return self._given_rows(X, reset=reset, least_rows=2 if reset else 1)

    def _validation_dataset(self, X: RowsLike, y: LabelsLike | None) -> Dataset:
        return self._make_labelled_rows(X, y, reset=False)

    def _search_rows(self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
        if sample_weight is not None:
            raise DataError("sample_weight: a bootstrap network uses all rows equally: leave out the weights")
        return self._make_labelled_rows(X, y, reset=True)

    def _scored_rows(self, X: RowsLike, y: LabelsLike | None, sample_weight: WeightsLike | None) -> Dataset:
        return self._make_labelled_rows(X, y, reset=False)

    def _make_labelled_rows(self, X: RowsLike, y: LabelsLike | None, *, reset: bool) -> Dataset:
        """Return the rows with their labels ``y``, which only scores of the output use."""
        rows = self._training_rows(X, None, None, reset=reset)
        if y is None:
            return rows
        if isinstance(X, Dataset):
            raise DataError("X is a Dataset, which has its own labels, but y is given as well: leave out y")
        x = rows.read_x(0, len(rows)) if is_in_memory(X) else X
        return Dataset.from_arrays(x, y, feature_names=rows.feature_names)

    _fit_steps = fit_steps
    _plan = plan

    def _open_run_dir(
        self, train: Dataset, resources: Resources, call: FitCall
    ) -> AbstractContextManager[LocationLike | None]:
        warn_few_clusterings(self)
        return self._make_folder(train, resources, call)

    @contextmanager
    def _make_folder(
        self, train: Dataset, resources: Resources, call: FitCall
    ) -> Iterator[LocationLike | None]:
        """Check free memory and disk; yield the folder of the network, or None to keep it in memory.

        The folder is the run folder, or a temporary one, which is removed with the estimator, or at once if
        the fit fails.
        """
        small = call.run_dir is None and call.client is None
        small = small and in_memory_bytes(self, train) <= MAX_BYTES_IN_MEMORY
        place = tempfile.gettempdir() if call.run_dir is None else call.run_dir
        places = None if call.resume or small else (place, call.engine.get("scratch"))
        self._check_decay = partial(check_resources, self, train, resources, places)
        temporary = None
        try:
            if self.decay != "auto":
                self._check_decay(float(self.decay))
            if call.run_dir is None and not small:
                temporary = tempfile.mkdtemp(prefix="scalelatent-mbn-")
            yield temporary or call.run_dir
        except BaseException:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            del self._check_decay
        self._keep_or_remove_folder(temporary)

    def _keep_or_remove_folder(self, temporary: str | None) -> None:
        """Read a small network into memory, or keep its folder ``temporary`` as long as the estimator.

        Then remove the temporary folder of the previous fit, if there is one.
        """
        before, self._remove_folder = self._remove_folder, None
        if temporary is not None:
            stored = [sets for sets in self._centroids if isinstance(sets, StoredSets | UncopiedSets)]
            assert len(stored) == len(self._centroids)  # a fit with a folder keeps no centroids in memory
            sizes = [sets.dataset.nbytes for sets in stored]
            if sum(sizes) + sum(codes.nbytes for codes in self._codes.values()) > MAX_BYTES_IN_MEMORY:
                self._remove_folder = weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            else:
                self._centroids, self._codes = read_into_memory(stored, self._codes)
                shutil.rmtree(temporary, ignore_errors=True)
        if before is not None:
            before()

    def _keep(
        self,
        layers: tuple[Layer, ...],
        centroids: Sequence[Centroids],
        codes: Mapping[int, Dataset],
        components: Components | None,
        history: list[dict[str, Any]],
    ) -> None:
        self._layers, self._centroids, self._codes = layers, tuple(centroids), dict(codes)
        self._run_codes = {}
        self._set_fitted_attributes(ks_=[layer.k for layer in layers])
        self._set_components(components)
        self.history_, self.n_iter_ = history, len(history)

    def _set_components(self, components: Components | None) -> None:
        self._components: dict[int, Components] = {}
        if components is None:
            # Delete the attributes, which an earlier fit with output="pca" may have set.
            for name in COMPONENT_ATTRIBUTES:
                self.__dict__.pop(name, None)
            return
        d = len(components.offset)
        self._components[len(self._layers)] = components
        table = np.ascontiguousarray(components.table.reshape(-1, d).T)
        table.flags.writeable = False  # transform uses another copy, so changes to this one have no effect
        self._set_fitted_attributes(
            components_=table,
            mean_projection_=components.offset,
            explained_variance_=components.variance,
            explained_variance_ratio_=components.variance / max(components.total_variance, 1e-300),
        )

    @follows_rows
    def fit_transform(self, X: RowsLike, y: LabelsLike | None = None, **fit_params: Any) -> Any:
        """Fit the network, and return its output for the training rows, which the fit has computed.

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
        return self._transform_training_rows(None, None, None, False, ())

    def schedule(self, n_rows: int) -> list[int]:
        """Return the number of centroids per clustering of each layer, for a number of training rows.

        Parameters
        ----------
        n_rows : int

        Returns
        -------
        list of int

        Raises
        ------
        ValueError
            ``k1`` is above ``n_rows``, the schedule has no layer, or ``decay="auto"`` before a fit.

        Examples
        --------
        >>> MultilayerBootstrapNetwork(k1=100, decay=0.5, n_classes=10).schedule(1000)
        [100, 50, 25]
        """
        decay = getattr(self, "decay_", None) if self.decay == "auto" else float(self.decay)
        if decay is None:
            raise NotFittedError(
                "decay='auto' is chosen by fit from the rows: fit the network first, or give decay a number"
            )
        return make_schedule(n_rows, self.k1, decay, self.k_last, self.n_classes)

    _transformed: OutputName = ("output", None)

    @property
    def _output_metric(self) -> str:
        return "overlap" if self.output == "codes" else "cosine"

    @follows_rows
    def transform(
        self,
        X: RowsLike,
        *,
        layer: int | None = None,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Return the output of the network: principal components of the last layer's codes.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features), or None
            None means the training rows, whose codes the fit has kept.
        layer : int or None
            Number of the layer from 1, or from the end (-1 is the last); None means the last. Components of a
            lower layer are computed at first use from the codes of the training rows (``keep_codes``, or the
            run folder of a loaded model), and saved with the model.
        out : path or URL, optional
            Dataset to which the output is written, instead of returning an array.
        client, overwrite, callbacks
            Cluster that writes ``out``; whether an existing ``out`` is replaced; callbacks for progress.

        Returns
        -------
        ndarray of float32, shape (n, components); a lazy array for a dask array; a Dataset with ``out``
            A data frame if ``set_output`` asks for one. With ``output="codes"`` the codes instead of
            components.

        Raises
        ------
        DataError
            The rows have another width or contain NaN or infinity, or there is no such layer.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x = np.random.default_rng(0).normal(size=(60, 5))
        >>> m = sl.MultilayerBootstrapNetwork(n_clusterings=50, n_components=2, random_state=0).fit(x)
        >>> m.transform(x[:7]).shape
        (7, 2)
        """
        if X is None:
            found = self._transform_training_rows(layer, out, client, overwrite, callbacks)
        else:
            found = self._map(X, ("output", layer), out, client, overwrite, callbacks)
        return wrap_output(self, found, X)

    @follows_rows
    def codes(
        self,
        X: RowsLike = None,
        *,
        layer: int = -1,
        out: str | Path | None = None,
        client: ClientLike | None = None,
        overwrite: bool = False,
        callbacks: CallbackList = (),
    ) -> Any:
        """Return the codes of a layer: the number of the nearest centroid in each clustering.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features), or None
            None means the training rows; the fit keeps the codes of lower layers only with ``keep_codes``.
        layer : int
            Number of the layer from 1, or from the end (-1 is the last).
        out, client, overwrite, callbacks
            As in :meth:`transform`.

        Returns
        -------
        ndarray of uint16 or uint32, shape (n, n_clusterings); a lazy array for a dask array; a Dataset with
        ``out``

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x = np.random.default_rng(0).normal(size=(60, 5))
        >>> m = sl.MultilayerBootstrapNetwork(n_clusterings=50, random_state=0).fit(x)
        >>> c = m.codes()
        >>> c.shape, bool((c == m.codes(x)).all()), int(c.max()) < m.ks_[-1]
        ((60, 50), True, True)
        """
        if X is not None:
            return self._map(X, ("codes", layer), out, client, overwrite, callbacks)
        check_is_fitted(self)
        found = self._training_codes(layer)
        if out is not None:
            return found.save(out, overwrite=overwrite)
        self._check_room(found.nbytes, len(found))
        return found.read_x(0, len(found))

    def _resolve_layer_number(self, layer: int | None) -> int:
        count = len(self._layers)
        number = count if layer is None else layer + count + 1 if layer < 0 else layer
        if isinstance(layer, bool) or not 1 <= number <= count:
            raise DataError(f"layer={layer!r}: this network has layers 1 to {count}")
        return int(number)

    def _row_map(self, output: OutputName, layer: int | None = None) -> Network:
        output, layer = output if isinstance(output, tuple) else (output, layer)
        check_is_fitted(self)
        number = self._resolve_layer_number(layer)
        projection = None
        if output == "output" and self.output == "pca":
            projection = CodeProjection.from_components(self._find_components(number))
        return Network(self._layers[:number], self._centroids[:number], projection)

    def _find_components(self, number: int) -> Components:
        """Return the principal components of a layer's output; compute them at the first call."""
        if number not in self._components:
            codes = self._find_codes(number)
            if codes is None:
                raise DataError(
                    f"this network has no components of layer {number}: take codes(X, layer={number}) "
                    "(--codes), or fit with keep_codes=True (keep_codes = true in a job's [model]): the run "
                    f"folder then has its codes; without a job call transform(None, layer={number}) before "
                    "save"
                )
            self._components[number] = layer_components(self, number, codes)
        return self._components[number]

    def _find_codes(self, number: int) -> Dataset | None:
        """Return the codes of the training rows in a layer, or None if they were not kept.

        Raise an error if another fit has written other codes to the run folder.
        """
        codes = self._codes.get(number)
        left = codes.spec() if codes is not None and codes.is_stored else self._run_codes.get(number)
        return codes if left is None else Dataset.from_spec(left)

    def _transform_training_rows(
        self,
        layer: int | None,
        out: str | Path | None,
        client: ClientLike | None,
        overwrite: bool,
        callbacks: CallbackList,
    ) -> Any:
        if self.output == "codes":
            return self.codes(layer=-1 if layer is None else layer, out=out, overwrite=overwrite)
        projection = self._row_map("output", layer).projection
        assert projection is not None  # output="pca" always has a projection to components
        return self._map_rows(self._training_codes(layer), projection, out, client, overwrite, callbacks)

    def _training_codes(self, layer: int | None) -> Dataset:
        number = self._resolve_layer_number(layer)
        codes = self._find_codes(number)
        if codes is None:
            numbers = sorted({*self._codes, *self._run_codes})
            kept = f"those of {numbers}" if numbers else "none (a loaded model has none)"
            raise DataError(
                f"codes of the training rows in layer {number} were not kept, but {kept}: fit with "
                "keep_codes=True, or pass the rows"
            )
        return codes

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.transformer_tags.preserves_dtype = []
        return tags

    def __getstate__(self) -> dict[str, Any]:
        if self._remove_folder is not None:
            raise RunError(
                "a copy or pickle of this network would lack its centroids, which are in a temporary folder "
                "that is removed with the original: use save(PLACE) and load_model(PLACE)"
            )
        return super().__getstate__()

    def _state(self) -> SavedModelState:
        return encode_network(self)

    def _beside_saved(self) -> Callable[[Location], dict[str, str]]:
        return partial(write_centroids, self._layers, self._centroids)

    def _restore_at(self, saved: SavedModelState, place: Location | None, run: Location | None) -> None:
        assert place is not None
        values, arrays = saved
        network = open_network(values, arrays, place, run)
        self._keep(network.layers, network.centroids, {}, network.components, [])
        self._components |= network.lower_components
        self._run_codes = network.codes
        self.n_iter_, self.decay_ = values["n_iter"], values["decay"]
