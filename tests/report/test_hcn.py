"""The report of a compositional network shows its numbers and the data of its figures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from scalelatent import Dataset, HierarchicalCompositionalNetwork
from scalelatent.errors import DataError
from scalelatent.generators.images import image_set
from scalelatent.models.hcn.report import collect_part_numbers, collect_parts
from scalelatent.models.hcn.report_figures import (
    count_sign_changes,
    plot_features,
    plot_filled,
    plot_parts,
    plot_weight_counts,
)
from scalelatent.report.runfiles import RunFiles
from scalelatent.report.style import ACCENT, COLORS, LINE, WARN
from scalelatent.storage.disk import locate

X = image_set("letters", alphabet="AKT", noise=0.02, seed=1).rows(0, 420)[0]
PICTURES = ["features", "filled", "learning", "parts"]

PageOf = Callable[..., tuple[str, list[str]]]


@cache
def fitted() -> HierarchicalCompositionalNetwork:
    how = {"p01": 1e-4, "p10": 1e-4, "p_weight": 0.4, "p_sparsity": 1e-6, "n_epochs": 3}
    model = HierarchicalCompositionalNetwork([(4, (8, 6))], random_state=0, n_jobs=1, **how)
    return model.fit(X[:300], validation=X[300:360])


def test_the_page_has_all_sections(page_of: PageOf, tmp_path: Path) -> None:
    model, data = fitted(), Dataset.from_arrays(X[360:])
    page, names = page_of(tmp_path, model, data)
    assert names == PICTURES
    assert "4 features of 8 x 6 on images of 24 x 24, learned online" in page
    assert f"{100 * (1 - model.score(data)):.2f} %" in page
    assert f"{int(model.used_[0].sum())} of 4" in page
    assert f"{100 * model.history_[-1]['compression']:.2f} % at the end" in page
    assert 'src="http' not in page


def test_page_names_the_sample_size_and_prefers_the_exact_score(tmp_path: Path) -> None:
    model, data = fitted(), Dataset.from_arrays(X)
    evidence = collect_parts(model, data, sample_rows=50)
    assert evidence.sampled == 50
    run = RunFiles(locate(tmp_path), history=[])
    assert "bits sent of 50 images" in dict(collect_part_numbers(run, model, evidence, "test")[0])
    run.events = [{"event": "scored", "test_compression": 0.4321}]
    assert dict(collect_part_numbers(run, model, evidence, "test")[0])["bits sent"] == "43.21 %"
    assert "bits sent of 50 images" in dict(collect_part_numbers(run, model, evidence, "training")[0])


def test_images_are_decoded_as_the_model_does() -> None:
    model = fitted()
    evidence = collect_parts(model, Dataset.from_arrays(X[:200]))
    rows = np.linspace(0, 199, 8).astype(int)
    np.testing.assert_array_equal(evidence.images[:, 0], X[rows] == 1)
    np.testing.assert_array_equal(evidence.places, model.transform(X[:200])[rows])
    np.testing.assert_array_equal(evidence.made, model.reconstruct(X[:200])[rows])
    known = np.ones(X[:200].shape, bool)
    known[:, 12:] = False
    half = np.linspace(0, 199, 100).astype(int)
    np.testing.assert_array_equal(evidence.filled.made, model.inpaint(X[:200], known)[half])
    wrong = (model.inpaint(X[:200], known)[half][:, 0] != X[half])[:, 12:].mean()
    assert evidence.filled.error_shares == pytest.approx((wrong, X[half][:, 12:].mean()))


def test_pages_without_rows_or_of_other_rows(page_of: PageOf, tmp_path: Path) -> None:
    page, names = page_of(tmp_path, fitted(), None)
    assert names == ["features", "learning"]
    assert "made without images" in page
    (tmp_path / "b").mkdir()
    page, _ = page_of(tmp_path / "b", fitted(), Dataset.from_arrays(X[:, :5]))
    assert "has 120 features per row, but the model was fitted to rows of 576" in page


def test_pages_of_colours_unknown_pixels_and_one_image(page_of: PageOf, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = (rng.random((1, 2, 40, 70)) < 0.2).astype(np.float32)
    x[0, :, :, 60:] = np.nan
    how = {"online": False, "n_epochs": 2, "missing": float("nan"), "n_jobs": 1, "random_state": 0}
    model = HierarchicalCompositionalNetwork([(200, (3, 2))], p01=0.1, p10=0.1, **how)
    page, names = page_of(tmp_path, model.fit(x), Dataset.from_arrays(x))
    # The fit of one image reports one record, but the curve of the picture "learning" needs two.
    assert names == [name for name in PICTURES if name != "learning"]
    assert "every other band of 2 lines was hidden" in page
    assert "2 channels, learned with stored messages" in page


def test_figures_show_the_given_data() -> None:
    corner = np.array([[[1, 1], [1, 0]]], bool)
    weights = np.stack([corner, ~corner])
    image = np.zeros((1, 1, 3, 4), bool)
    image[0, 0, :2, :2] = corner
    image[0, 0, 2, 3] = True
    places = np.zeros((1, 2, 3, 2), np.uint8)
    places[0, 0, 0, 0] = 1
    made = np.zeros_like(image)
    made[0, 0, :2, :2] = corner
    made[0, 0, 0, 3] = True
    _, features, where, compared = plot_parts(image, places, weights, made, np.zeros_like(image)).axes
    on = np.argwhere((features.images[0].get_array() == to_rgb(COLORS[0])).all(axis=2))
    assert on.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert [(text.get_text(), text.get_position()) for text in where.texts] == [("0", (0.5, 0.5))]
    for pixel, color in (((2, 3), ACCENT), ((0, 3), WARN)):
        assert tuple(compared.images[0].get_array()[pixel]) == to_rgb(color)
    first, second = plot_features(weights, np.array([True, False]), np.array([0.5, 0.0])).axes
    assert (first.get_xlabel(), second.get_xlabel()) == ("0.5", "not used")
    assert tuple(second.images[0].get_array()[1, 1]) == to_rgb(LINE)
    records = [
        {"pass": p, "rows_seen": seen, "weights_on": 3, "weights_changed": changed, "compression": 0.5}
        for p, seen, changed in ((1, 100, 8), (1, 200, 12), (2, 400, 6))
    ]
    assert count_sign_changes(records).tolist() == [8, 4, 3]
    upper, lower = plot_weight_counts(records, warmup_images=50).axes
    assert upper.lines[0].get_xydata().tolist() == [[150, 3], [250, 3], [450, 3]]
    assert lower.lines[0].get_ydata().tolist() == [50, 50, 50]
    known = np.ones_like(image)
    known[..., 2, :] = False
    given = plot_filled(image, known, made).axes[1].images[0].get_array()
    assert (given[2] != 1).all()
    empty = np.zeros((0, 1, 3, 4), bool)
    for wrong, words in (
        (lambda: plot_parts(empty, places[:0], weights, empty, empty), "no images"),
        (lambda: plot_filled(empty, empty, empty), "no images"),
        (lambda: plot_weight_counts([{"pass": 1}]), "no record"),
    ):
        with pytest.raises(DataError, match=words):
            wrong()
