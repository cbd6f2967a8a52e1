"""The report of a compositional network with several layers shows its numbers and the data of its figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from scalelatent import Dataset, HierarchicalCompositionalNetwork
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.report_figures import (
    MAX_GRID_SIDE,
    make_direction_colors,
    plot_edges,
    plot_samples,
    plot_templates,
)
from scalelatent.models.hcn.report_multi_layer import complete_images, find_edges
from scalelatent.report.style import COLORS

pytestmark = pytest.mark.filterwarnings("ignore:.*weights still changed")

X, Y = image_set("traits", size=5, gap=1).rows(0, 160)
PICTURES = ["features", "features-2", "filled", "samples", "templates"]

PageOf = Callable[..., tuple[str, list[str]]]


@cache
def fitted(labelled: bool = True, templates: int = 2) -> HierarchicalCompositionalNetwork:
    layers = [(4, 5), (3, 2)]
    model = HierarchicalCompositionalNetwork(
        layers, templates=templates, online=False, n_epochs=4, random_state=0, n_jobs=1
    )
    return model.fit(X[:60], np.array(["one", "other"])[Y[:60].astype(int)] if labelled else None)


@pytest.mark.parametrize("labelled", [True, False])
def test_the_page_of_several_layers_has_all_sections(page_of: PageOf, labelled: bool, tmp_path: Path) -> None:
    model, data = fitted(labelled), Dataset.from_arrays(X[60:])
    page, names = page_of(tmp_path, model, data)
    assert [name for name in names if name != "learning"] == PICTURES
    assert "4 features of 1 x 5 x 5 under 3 features of 4 x 2 x 2" in page
    assert f"Images of each {'class' if labelled else 'cluster'} (rows)" in page
    assert f"{100 * complete_images(model, data).error_shares[0]:.2f} %" in page
    assert "lower half was hidden" in page


def test_hidden_halves_are_completed_by_the_model() -> None:
    model = fitted()
    filled = complete_images(model, Dataset.from_arrays(X[60:].reshape(100, -1)))
    known = np.ones(X[60:].shape, bool)
    known[:, known.shape[1] // 2 :] = False
    np.testing.assert_array_equal(filled.images[:, 0], X[60:] == 1)
    np.testing.assert_array_equal(filled.given[:, 0], known)
    np.testing.assert_array_equal(filled.made, model.inpaint(X[60:], known))
    wrong = filled.made[:, 0][~known] != X[60:][~known]
    assert filled.error_shares == pytest.approx((wrong.mean(), X[60:][~known].mean()))
    assert 0 < wrong.mean() < 1


def test_pages_without_rows_with_unusable_rows_and_with_filters(page_of: PageOf, tmp_path: Path) -> None:
    page, names = page_of(tmp_path, fitted(), None)
    assert "filled" not in names
    assert "made without images" in page
    (tmp_path / "b").mkdir()
    page, _ = page_of(tmp_path / "b", fitted(), Dataset.from_arrays(X[:, :5]))
    assert f"but the model was fitted to rows of {X[0].size}" in page
    grey = image_set("traits", size=5, gap=1, blur=0.5, grain=2).rows(0, 20)[0]
    model = HierarchicalCompositionalNetwork([(4, 5)], templates=2, filters=4, n_epochs=2, random_state=0)
    (tmp_path / "c").mkdir()
    page, names = page_of(tmp_path / "c", model.fit(grey), Dataset.from_arrays(grey))
    assert "filled" not in names
    assert "edges" in names
    assert "coloured by the strongest of 4 directions" in page
    (tmp_path / "d").mkdir()
    page, names = page_of(tmp_path / "d", model, Dataset.from_arrays(grey / np.float32(255)))
    assert "edges" not in names
    assert "filters need grey images of whole numbers" in page


def test_edges_are_those_that_the_filters_find() -> None:
    grey = image_set("traits", size=5, gap=1, blur=0.5, grain=2).rows(0, 40)[0]
    model = HierarchicalCompositionalNetwork([(4, 5)], templates=2, filters=8, n_epochs=1, random_state=0)
    with pytest.warns(UserWarning, match="all weights are off"):
        model.fit(grey)
    images, edges, made = find_edges(model, Dataset.from_arrays(grey))
    assert images.dtype == np.uint8
    assert (images[1:, None] == grey).all(axis=(2, 3)).any(axis=1).all()
    assert edges[0].any(axis=(1, 2)).all()  # The first image, a disc, has edges of all directions.
    assert edges.sum(axis=1).max() == 1
    np.testing.assert_array_equal(made, model.reconstruct(images[1:]))
    drawn = plot_edges(images, edges, made)
    n, colors = len(images), make_direction_colors(8)
    assert len({tuple(color) for color in colors}) == 8
    picture = drawn.axes[n + 1].images[0].get_array()
    channel, y, x = np.argwhere(edges[1])[0]
    np.testing.assert_allclose(picture[y, x], colors[channel])
    assert (picture[~edges[1].any(axis=0)] == 1).all()
    key = drawn.axes[2 * n].images[0].get_array()
    assert (key == 1).all()  # The disc has no image made by templates, so this field is white.


def test_figures_show_the_given_data() -> None:
    weights = np.zeros((2, 3, 2, 2), bool)
    weights[1, 2, 0, 1] = True
    figure, drawn = plot_templates(weights, ["class a", "class b"])
    assert drawn == (2, 3)
    pictures = [axes.images[0].get_array() for axes in figure.axes]
    assert tuple(pictures[5][0, 1]) == to_rgb(COLORS[2])
    assert sum(int((picture != 1).any(axis=2).sum()) for picture in pictures) == 1
    assert figure.axes[3].get_ylabel() == "1: class b"
    many = np.zeros((MAX_GRID_SIDE + 3, 2, 1, 1), bool)
    many[3:] = True
    figure, drawn = plot_templates(many, [str(k) for k in range(len(many))])
    assert drawn == (MAX_GRID_SIDE, 2)
    assert figure.axes[0].get_ylabel() == "3: 3"
    images = np.zeros((2, 3, 1, 2, 2), bool)
    images[1, 0, 0, 1, 0] = True
    axes = plot_samples(images, ["class a", "class b"]).axes
    assert np.argwhere((axes[3].images[0].get_array() != 1).any(axis=2)).tolist() == [[1, 0]]
    assert (axes[3].get_ylabel(), axes[4].get_ylabel()) == ("class b", "")
