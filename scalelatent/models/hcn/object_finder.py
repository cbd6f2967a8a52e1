"""Find several objects in one image with a network that was fitted on images of single objects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.data import Dataset
from scalelatent.data.read.containers import opened
from scalelatent.engine.backend import make_backend
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import DataError
from scalelatent.estimators.inputs import check_finite
from scalelatent.models.hcn.model.multi_layer_maps import FixedNetwork
from scalelatent.models.hcn.model.object_search import choose_places, enlarge

from .fit import check_images, replace_nan, to_image_shape
from .output import FoundObjects

if TYPE_CHECKING:
    from .multi_layer import MultiLayer


@dataclass(frozen=True, eq=False)
class ObjectFinder:
    """Finder of several objects in one image, which may be larger than the images of the fit.

    :meth:`~scalelatent.HierarchicalCompositionalNetwork.with_classes` returns a finder. The finder uses the
    fitted network with a class layer that allows several objects, and learns nothing.

    Attributes
    ----------
    classes_ : ndarray, shape (n_classes,)
        Labels of the classes, in the order of the scores.
    n_objects : int
        Largest number of objects per image.
    image_shape : (int, int)
        Height and width of the images in which the finder looks for objects.
    frame : (int, int)
        Height and width of the frame of an object, equal to the size of the images of the fit.
    network : FixedNetwork
        The fitted network, for images of ``image_shape``.
    device : str
        Device of the forward pass, which computes the scores: "auto", "cpu" or "gpu".

    Notes
    -----
    A template is a feature of the last layer, which looks like a whole object. All templates and all
    positions inside the image have equal prior probabilities. The frames of two objects do not overlap.
    ``predict`` returns the set of objects with the largest sum of gains. The gain of an object is its score
    minus log(number of templates x number of positions), and must be positive. The search in an image ends
    after 2,000 sets; ``exact`` is True if the search ended earlier, with a proof that no set is better.

    References
    ----------
    M. Lázaro-Gredilla et al., "Hierarchical compositional feature learning", arXiv:1611.02252 (2016),
    section 2.4.
    """

    classes_: np.ndarray
    n_objects: int
    image_shape: tuple[int, int]
    frame: tuple[int, int]
    network: FixedNetwork
    device: str = "auto"

    @classmethod
    def from_network(
        cls,
        network: MultiLayer,
        weight_log_odds: np.ndarray,
        image_shape: Sequence[int],
        n_objects: int,
        device: str,
    ) -> ObjectFinder:
        """Return the finder for a network with fitted log odds of weights, and images of ``image_shape``.

        Raises
        ------
        DataError
            If ``image_shape`` is not two numbers, or is smaller than the images of the fit.
        ValueError
            If ``n_objects`` is below 1.
        """
        own = network.layer.image[1:]
        sides = tuple(int(side) for side in image_shape)
        if len(sides) != 2 or sides[0] < own[0] or sides[1] < own[1]:
            raise DataError(
                f"image_shape={image_shape!r}: give the (height, width) of the images, at least "
                f"{own[0]} x {own[1]} as in the fit"
            )
        if n_objects < 1:
            raise ValueError(f"n_objects={n_objects}: give a whole number of at least 1")
        fixed = FixedNetwork(enlarge(network.labelled_net, *sides), weight_log_odds)
        return cls(network.prediction_labels, int(n_objects), (sides[0], sides[1]), own, fixed, device)

    @property
    def places(self) -> tuple[int, int]:
        """Number of vertical and of horizontal positions that a frame can take in an image."""
        return self.network.net.layers[-1].places[:2]

    def decision_function(self, X: Any) -> np.ndarray:
        """Return for each class and position the largest score of the class's templates (top features).

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w) or (n, channels, h, w)

        Returns
        -------
        ndarray of float64, shape (n, rows, columns, classes)
            Log probability ratio, in nats, of a template at the position and no template there; in memory.

        Raises
        ------
        DataError
            If images do not have the shape ``image_shape``, or if the fit does not accept their pixels.
        """
        return np.concatenate(list(self._iterate_scores(X)))

    def predict(self, X: Any) -> FoundObjects:
        """Find the objects in images and their positions.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w) or (n, channels, h, w)
            Images, which are read in blocks in this process.

        Returns
        -------
        FoundObjects
            Labels, positions and scores of the objects.

        Raises
        ------
        DataError
            If images do not have the shape ``image_shape``, or if the fit does not accept their pixels.
        """
        cost = math.log(math.prod(self.places) * self.network.net.n_templates)
        codes, positions, scores, exact = [], [], [], []
        for found in self._iterate_scores(X):
            code = np.full((len(found), self.n_objects), -1)
            position, score = np.full((*code.shape, 2), -1), np.zeros(code.shape)
            for row, at_places in enumerate(found):
                best = at_places.max(axis=2)
                places, proven = choose_places(best - cost, self.frame, self.n_objects)
                exact.append(proven)
                for i, place in enumerate(places):
                    code[row, i], position[row, i] = at_places[place].argmax(), place
                    score[row, i] = best[place]
            codes.append(code)
            positions.append(position)
            scores.append(score)
        code = np.concatenate(codes)
        none = np.str_("") if self.classes_.dtype.kind == "U" else np.int64(-1)
        labels = np.where(code < 0, none, self.classes_[code])
        return FoundObjects(labels, np.concatenate(positions), np.concatenate(scores), np.array(exact))

    def _iterate_scores(self, X: Any) -> Iterator[np.ndarray]:
        """Yield for each block of images the scores, in nats, of all classes at each position."""
        ds, backend = self._open_images(X), make_backend(self.device)
        size = self.network.requirements.block_rows or 1
        with single_threaded():
            for start in range(0, len(ds), size):
                x = ds.read_x(start, min(start + size, len(ds)))
                check_finite(x, "X", start)
                yield self.network.class_scores(backend, Block(x, None, None, start))

    def _open_images(self, X: Any) -> Dataset:
        """Return images as a dataset; raise a DataError for sparse or weighted rows and for other shapes."""
        layer, X = self.network.net.layers[0], opened(X, "X")
        if not isinstance(X, Dataset):
            X = X if hasattr(X, "shape") else np.asarray(X)
            X = Dataset.from_arrays(X if layer.missing is None else replace_nan(X))
        check_images(X, "X")
        if to_image_shape(X.feature_shape) != layer.input_shape:
            raise DataError(
                f"{X.url or 'X'}: images are {X.feature_shape}, but with_classes was called for "
                f"{layer.input_shape[1]} x {layer.input_shape[2]}: give images of that shape, or call "
                "with_classes again"
            )
        return X
