"""Several objects in one image, by a network that was fitted on images of one."""

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
from scalelatent.models.hcn.kernels.exact import GRID
from scalelatent.models.hcn.model.arrangement import apart, widened
from scalelatent.models.hcn.model.layered_maps import Telling

from .fit import check_plain, image_of, known_or_not
from .output import FoundObjects

if TYPE_CHECKING:
    from .several import SeveralLayers


@dataclass(frozen=True, eq=False)
class SeveralObjects:
    """A fitted network under another class layer: images are larger, and several objects lie in them.

    Made by :meth:`~scalelatent.HierarchicalCompositionalNetwork.with_classes`; nothing is learned again.

    Attributes
    ----------
    classes_ : ndarray, shape (n_classes,)
    n_objects : int
        At most so many in an image.
    image_shape : (int, int)
        Height and width of the images.
    frame : (int, int)
        Those of an object: of the images of the fit.
    told : Telling
        The weights, over the larger images.
    device : str
        Of the forward pass.

    Notes
    -----
    A template of any class may lie at any place whose frame lies in the image, all with one chance, and
    frames of two objects do not overlap. Scores of templates at places are those of one forward pass, as
    :meth:`~scalelatent.HierarchicalCompositionalNetwork.transform` gives for one image; of them the choice
    with the largest sum is taken, and an object only where it explains more than its choice costs. The search
    for that choice is exact where 2,000 looks are enough, and tells where they are not.

    References
    ----------
    M. Lázaro-Gredilla et al., "Hierarchical compositional feature learning", arXiv:1611.02252 (2016),
    section 2.4.
    """

    classes_: np.ndarray
    n_objects: int
    image_shape: tuple[int, int]
    frame: tuple[int, int]
    told: Telling
    device: str = "auto"

    @classmethod
    def of(
        cls,
        network: SeveralLayers,
        beliefs: np.ndarray,
        image_shape: Sequence[int],
        n_objects: int,
        device: str,
    ) -> SeveralObjects:
        """Of a fitted network; refuses images smaller than its own."""
        own = network.layer.image[1:]
        sides = tuple(int(side) for side in image_shape)
        if len(sides) != 2 or sides[0] < own[0] or sides[1] < own[1]:
            raise DataError(
                f"image_shape={image_shape!r}: give the (height, width) of images, at least "
                f"{own[0]} x {own[1]}, which those of the fit are"
            )
        if n_objects < 1:
            raise ValueError(f"n_objects={n_objects}: give a whole number of at least 1")
        net = widened(network.telling, *sides)
        told = Telling(net, beliefs, network.template_classes)
        return cls(network.predicted, int(n_objects), (sides[0], sides[1]), own, told, device)

    @property
    def places(self) -> tuple[int, int]:
        """Rows and columns of places where a frame may lie."""
        return self.told.net.layers[-1].places[:2]

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores of the classes at each place, each that of its best template.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w) or (n, channels, h, w)

        Returns
        -------
        ndarray of float64, shape (n, rows, columns, classes)
            In nats, against an image in which nothing lies there. All are held in memory.

        Raises
        ------
        DataError
            Images of another shape, or of other values than those of the fit.
        """
        return np.concatenate([part for _, part in self._scores(X)])

    def predict(self, X: Any) -> FoundObjects:
        """Which objects lie in images, and where.

        Parameters
        ----------
        X : Dataset or array-like, shape (n, h, w) or (n, channels, h, w)
            Read and worked on in this process, some images at a time.

        Returns
        -------
        FoundObjects
            Labels, positions and scores.

        Raises
        ------
        DataError
            As in :meth:`decision_function`.
        """
        cost = math.log(math.prod(self.places) * self.told.net.n_templates)
        codes, positions, scores, exact = [], [], [], []
        for n_rows, found in self._scores(X):
            code = np.full((n_rows, self.n_objects), -1)
            position, score = np.full((*code.shape, 2), -1), np.zeros(code.shape)
            for row, at_places in enumerate(found):
                best = at_places.max(axis=2)
                places, proven = apart(best - cost, self.frame, self.n_objects)
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

    def _scores(self, X: Any) -> Iterator[tuple[int, np.ndarray]]:
        """Scores of classes at places of some images at a time, and how many these are."""
        ds, net = self._images(X), self.told.net
        backend, size = make_backend(self.device), self.told.wants.block_rows or 1
        with single_threaded():
            for start in range(0, len(ds), size):
                x = ds.read_x(start, min(start + size, len(ds)))
                check_finite(x, "X", start)
                pixels = net.layers[0].evidence_in(Block(x, None, None, start))
                scores = net.forward(self.told.weights, pixels, backend)[-1][1] / GRID
                of = self.told.of_template
                best = [scores[:, of == code].max(axis=1) for code in range(len(self.classes_))]
                yield len(x), np.stack(best, axis=3)

    def _images(self, X: Any) -> Dataset:
        """Images as a dataset; refuses those of another shape."""
        layer, X = self.told.net.layers[0], opened(X, "X")
        if not isinstance(X, Dataset):
            X = X if hasattr(X, "shape") else np.asarray(X)
            X = Dataset.from_arrays(X if layer.missing is None else known_or_not(X))
        check_plain(X, "X")
        if image_of(X.feature_shape) != layer.seen:
            raise DataError(
                f"{X.url or 'X'}: images are {X.feature_shape}, but with_classes was asked for "
                f"{layer.seen[1]} x {layer.seen[2]}: give such images, or ask for theirs"
            )
        return X
