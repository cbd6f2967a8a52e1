"""Figures of a report contain the numbers that they are given."""

from __future__ import annotations

import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex

from scalelatent.errors import DataError
from scalelatent.models.capsule.report_figures import (
    find_rounds,
    plot_history,
    plot_latents,
    plot_prototypes,
    project_on_leading_plane,
    puts_classes_across,
)
from scalelatent.report.figures import plot_confusion, plot_reliability
from scalelatent.report.pictures import choose_colormap_range, image_shape, plot_mistakes
from scalelatent.report.style import class_style, png_bytes

PNG = b"\x89PNG"


def make_history(n=30, validation=True):
    """Return the records of n passes (at most 36), in rounds of 12 passes with one threshold nu each."""
    return [
        {
            "pass": i + 1,
            "objective": 2.0 / (i + 1),
            "train_error": 0.5 / (i + 1),
            "validation_error": 0.6 / (i + 1) + 0.001 * i if validation else None,
            "round": 1 + i // 12,
            "nu": (0.8, 0.6, 0.4)[i // 12],
        }
        for i in range(n)
    ]


def find_line(axes, label):
    return next(drawn for drawn in axes.lines if drawn.get_label() == label)


def test_history_has_normalised_loss_errors_and_rounds():
    records = make_history()
    upper, lower = plot_history(records, capsules=10).axes
    expected = [record["objective"] / np.log(10) for record in records]
    assert upper.lines[0].get_ydata() == pytest.approx(expected)
    assert find_line(lower, "training").get_ydata() == pytest.approx(
        [100 * r["train_error"] for r in records]
    )
    validation = np.array([100 * r["validation_error"] for r in records])
    assert find_line(lower, "validation").get_ydata() == pytest.approx(validation)
    best = lower.lines[2]
    assert best.get_xdata()[0] == validation.argmin() + 1
    assert f"{validation.min():.2f} %" in best.get_label()
    assert [text.get_text() for text in upper.texts] == ["ν = 0.8", "ν = 0.6", "ν = 0.4"]  # noqa: RUF001
    bands = np.array([(patch.get_x(), patch.get_x() + patch.get_width()) for patch in upper.patches])
    assert bands == pytest.approx(np.array([(0.5, 12.5), (12.5, 24.5), (24.5, 30.5)]))


def test_history_without_validation_of_one_pass_and_of_members():
    one = make_history(1, validation=False)
    upper, lower = plot_history(one, ensemble=True).axes
    assert lower.get_legend_handles_labels()[1][0] == "training"
    assert "validation" not in " ".join(lower.get_legend_handles_labels()[1])
    assert upper.lines[0].get_marker() == "o"  # A point needs a marker to be visible.
    assert upper.texts[0].get_text() == "round 1"
    assert png_bytes(upper.figure).startswith(PNG)
    with pytest.raises(DataError, match="no passes"):
        plot_history([])


def test_records_within_a_pass_are_drawn_where_they_were_made():
    """Each of two passes over 100 rows has four records, which are drawn at quarters of the pass."""
    seen = [25, 50, 75, 100, 125, 150, 175, 200]
    records = [
        {"pass": 1 + i // 4, "rows_seen": n, "objective": 1 / n, "train_error": 10 / n, "round": 1 + i // 4,
         "nu": [0.8, 0.0][i // 4]}
        for i, n in enumerate(seen)
    ]  # fmt: skip
    upper, lower = plot_history(records).axes
    assert upper.lines[0].get_xdata() == pytest.approx(np.array(seen) / 100)
    assert "in pass 2" in lower.lines[1].get_label()
    bands = np.array([(patch.get_x(), patch.get_x() + patch.get_width()) for patch in upper.patches])
    assert bands == pytest.approx(np.array([(0.125, 1.125), (1.125, 2.125)]))


def test_plain_em_has_no_rounds():
    records = [{"pass": i, "objective": 1 / i, "train_error": 0.0, "round": 1, "nu": 0.0} for i in (1, 2, 3)]
    upper, _ = plot_history(records).axes
    assert not upper.patches
    assert find_rounds([{"pass": 1}]) == []


def test_confusion_numbers_and_class_errors():
    counts = np.array([[8, 2, 0], [0, 5, 0], [0, 0, 0]])
    matrix, bars = plot_confusion(counts, ["a", "b", "c"]).axes
    texts = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in matrix.texts}
    assert texts == {(0, 0): "8", (0, 1): "2", (1, 1): "5"}
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([20, 0, 0])
    assert bars.texts[2].get_text().strip() == "no rows"
    colors = matrix.images[0].get_array()
    assert to_hex(colors[1, 0]) == "#ffffff"  # A cell without mistakes is white.
    assert colors[0, 0, 2] > colors[0, 0, 0]  # Hits are blue.
    assert colors[0, 1, 0] > colors[0, 1, 2]  # Mistakes are orange.


def test_reliability_draws_bins_with_rows():
    counts, confidence, hits = np.array([0, 2, 8]), np.array([0, 1.0, 7.2]), np.array([0, 1, 6])
    upper, lower = plot_reliability(counts, confidence, hits).axes
    assert upper.lines[1].get_xydata() == pytest.approx(np.array([[0.5, 0.5], [0.9, 0.75]]))
    assert [bar.get_height() for bar in lower.patches] == [0, 2, 8]


def test_latents_of_two_dimensions_are_drawn_unchanged():
    rng = np.random.default_rng(0)
    points, codes = [rng.uniform(-0.7, 0.7, (30, 2)) for _ in range(3)], np.arange(30) % 3
    figure = plot_latents(points, codes, ["a", "b", "c"])
    for c, axes in enumerate(figure.axes[:3]):
        others, own = axes.collections
        assert np.array_equal(own.get_offsets(), points[c][codes == c])
        assert to_hex(own.get_facecolor()[0]) == class_style(c)[0]
        assert np.array_equal(others.get_offsets(), points[c][codes != c])
        expected = [class_style(code)[0] for code in codes[codes != c]]
        assert [to_hex(color) for color in others.get_facecolor()] == expected
        assert axes.texts[0].get_text() == "abc"[c]


def test_more_dimensions_are_drawn_in_the_leading_plane():
    rng = np.random.default_rng(1)
    points = rng.normal(size=(200, 5)) * [0.4, 0.01, 0.3, 0.01, 0.01] + [0.2, 0, 0, 0, 0]
    points /= np.maximum(1, np.linalg.norm(points, axis=1, keepdims=True))
    plane, share = project_on_leading_plane(points, np.ones(200, bool))
    assert share > 0.99
    assert np.linalg.norm(plane, axis=1) == pytest.approx(np.linalg.norm(points[:, [0, 2]], axis=1), abs=0.03)
    assert (plane.sum(axis=0) >= 0).all()
    axes = plot_latents([points], np.zeros(200, int), ["a"]).axes[0]
    assert np.asarray(axes.collections[-1].get_offsets()) == pytest.approx(plane)
    assert "100 %" in [text.get_text() for text in axes.texts]


def test_one_dimension_is_a_strip_with_lanes():
    values, codes = np.linspace(-1, 1, 40)[:, None], np.arange(40) % 2
    axes = plot_latents([values, values], codes, ["a", "b"]).axes[1]
    offsets = np.asarray(axes.collections[-1].get_offsets())
    assert offsets[:, 0] == pytest.approx(values[codes == 1, 0])
    assert (np.abs(offsets[:, 1] - 1) < 0.5).all()


def test_the_prototype_mosaic_contains_every_picture():
    x = np.arange(2 * 3 * 64.0).reshape(2, 3, 64)
    present = np.ones((2, 3), bool)
    present[1, 2] = False
    mosaic = np.ma.filled(
        plot_prototypes(x, present, ["a", "b"], (8, 8)).axes[0].images[0].get_array(), np.nan
    )
    assert np.array_equal(mosaic[:8, 9:17], x[0, 1].reshape(8, 8))
    assert np.array_equal(mosaic[9:17, :8], x[1, 0].reshape(8, 8))
    assert np.isnan(mosaic[9:17, 18:26]).all()


def test_few_elements_of_many_classes_are_drawn_in_a_row():
    assert puts_classes_across(10, 2)
    x = np.arange(10 * 2 * 64.0).reshape(10, 2, 64)
    axes = plot_prototypes(x, np.ones((10, 2), bool), list("abcdefghij"), (8, 8)).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list("abcdefghij")
    assert np.array_equal(axes.images[0].get_array()[9:17, 18:26], x[2, 1].reshape(8, 8))


def test_image_shapes_are_guessed_from_the_width():
    assert image_shape((3, 32)) == (3, 32)
    assert image_shape((32, 32, 3)) == (32, 32, 3)
    # Nine values count as columns of a table, which are more likely than an image of 3 x 3 pixels.
    assert image_shape((9,)) is None
    assert choose_colormap_range(np.zeros((0, 4))) == ("gray", 0.0, 1.0)


def test_mistakes_show_class_and_prediction():
    x = np.zeros((12, 64))
    figure = plot_mistakes(x, ["four"] * 12, ["nine"] * 12, [0.9] * 12, (8, 8))
    assert figure.axes[11].get_title() == "four → nine\n90 %"
    assert not figure.axes[12].axison


def test_figures_do_not_change_matplotlibs_settings_and_are_reproducible():
    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    files = [png_bytes(plot_confusion(np.eye(3, dtype=int), list("abc"))) for _ in range(2)]
    assert files[0] == files[1]
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot


@pytest.mark.parametrize("n_classes", [2, 50])
@pytest.mark.slow
def test_figures_have_any_number_of_classes(n_classes):
    assert len({class_style(c) for c in range(n_classes)}) == n_classes
    names = [f"class {c}" for c in range(n_classes)]
    counts = np.eye(n_classes, dtype=int)
    assert png_bytes(plot_confusion(counts, names)).startswith(PNG)
    points = [np.zeros((n_classes, 2))] * n_classes
    figure = plot_latents(points, np.arange(n_classes), names)
    assert sum(axes.axison or bool(axes.collections) for axes in figure.axes) == n_classes
