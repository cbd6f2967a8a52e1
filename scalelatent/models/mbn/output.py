"""What a fitted bootstrap network gives of rows: codes of its layers, and the output made of them."""

from __future__ import annotations

from typing import Any

from sklearn.utils.validation import check_is_fitted

from scalelatent.data import Dataset, open_dataset
from scalelatent.errors import DataError
from scalelatent.estimators._sklearn import wrap_output
from scalelatent.models.mbn.model.layers import Layer
from scalelatent.models.mbn.model.network import Network
from scalelatent.models.mbn.model.pca import CodeProjection, Components
from scalelatent.storage.disk import Location

from .fit import layer_components


class NetworkOutput:
    """``transform`` and ``codes`` of a fitted network; arrays of the first follow ``set_output``.

    A class of its own, since scikit-learn would wrap whatever a transformer's own ``transform`` returns.
    """

    output: str
    _map: Any
    _map_rows: Any
    _check_room: Any
    _layers: tuple[Layer, ...]
    _centroids: tuple[Any, ...]
    _codes: dict[int, Dataset]
    _left: dict[int, Location]
    _components: dict[int, Components]

    def transform(
        self,
        X: Any,
        *,
        layer: int | None = None,
        out: Any = None,
        client: Any = None,
        overwrite: bool = False,
        callbacks: Any = (),
    ) -> Any:
        """Output of the network: principal components of the last layer's codes.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features), or None
            None: the training rows, whose codes the fit has left.
        layer : int or None
            Of which layer's codes, from 1 (or from the end, -1 being the last); None is the last. Components
            of a lower one are made when they are first asked for, of codes that the fit has left
            (``keep_codes``; also in the run folder that a model was loaded from), and saved with the model.
        out : url or None
            Write a dataset of them there instead of returning an array.
        client, overwrite, callbacks
            Where ``out`` is written from, whether it may be replaced, progress.

        Returns
        -------
        ndarray of float32, shape (n, components); a lazy array for a dask array; a Dataset with ``out``
            A data frame where ``set_output`` asks for one. With ``output="codes"`` codes in place of
            components.

        Raises
        ------
        DataError
            Rows of another width, or that cannot be used; no such layer.

        Examples
        --------
        >>> import numpy as np, scalelatent as sl
        >>> x = np.random.default_rng(0).normal(size=(60, 5))
        >>> m = sl.MultilayerBootstrapNetwork(n_clusterings=50, n_components=2, random_state=0).fit(x)
        >>> m.transform(x[:7]).shape
        (7, 2)
        """
        if X is None:
            found = self._of_training_rows(layer, out, client, overwrite, callbacks)
        else:
            found = self._map(X, ("output", layer), out, client, overwrite, callbacks)
        return wrap_output(self, found, X)

    def _number(self, layer: int | None) -> int:
        count = len(self._layers)
        number = count if layer is None else layer + count + 1 if layer < 0 else layer
        if isinstance(layer, bool) or not 1 <= number <= count:
            raise DataError(f"layer={layer!r}: this network has layers 1 to {count}")
        return int(number)

    def _row_map(self, what: Any, layer: int | None = None) -> Network:
        what, layer = what if isinstance(what, tuple) else (what, layer)
        check_is_fitted(self)
        number = self._number(layer)
        projection = None
        if what == "output" and self.output == "pca":
            projection = CodeProjection.of(self._components_of(number))
        return Network(self._layers[:number], self._centroids[:number], projection)

    def _components_of(self, number: int) -> Components:
        """Of a layer; those of a lower one are made now, where its codes are at hand."""
        if number not in self._components:
            codes = self._codes_of(number)
            if codes is None:
                raise DataError(
                    f"this network has no components of layer {number}: take codes(X, layer={number}) "
                    "(--codes), or fit with keep_codes=True (keep_codes = true in a job's [model]): its run "
                    f"folder gives them; without a job call transform(None, layer={number}) before save"
                )
            self._components[number] = layer_components(self, number, codes)
        return self._components[number]

    def _codes_of(self, number: int) -> Dataset | None:
        """Codes of the training rows in a layer, which the fit or the run folder holds."""
        if number not in self._codes and number in self._left:
            self._codes[number] = open_dataset(self._left[number].url)
        return self._codes.get(number)

    def _of_training_rows(
        self, layer: int | None, out: Any, client: Any, overwrite: bool, callbacks: Any
    ) -> Any:
        if self.output == "codes":
            return self.codes(layer=-1 if layer is None else layer, out=out, overwrite=overwrite)
        projection = self._row_map("output", layer).projection
        return self._map_rows(self._training_codes(layer), projection, out, client, overwrite, callbacks)

    def _training_codes(self, layer: int | None) -> Dataset:
        number = self._number(layer)
        codes = self._codes_of(number)
        if codes is None:
            numbers = sorted({*self._codes, *self._left})
            kept = f"those of {numbers}" if numbers else "none (a loaded model has none)"
            raise DataError(
                f"codes of the training rows in layer {number} were not kept, but {kept}: fit with "
                "keep_codes=True, or pass the rows"
            )
        return codes

    def codes(
        self,
        X: Any = None,
        *,
        layer: int = -1,
        out: Any = None,
        client: Any = None,
        overwrite: bool = False,
        callbacks: Any = (),
    ) -> Any:
        """Codes of a layer: in each clustering the number of the nearest centroid.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, features), or None
            None: the training rows, whose codes the fit has left (below the last layer with ``keep_codes``).
        layer : int
            From 1, or from the end.
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

    @property
    def _n_features_out(self) -> int:
        return int(self._row_map("output").output()[0][0])
