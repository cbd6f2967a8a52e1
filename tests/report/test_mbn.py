"""The report of a bootstrap network shows its numbers and the data of its figures."""

from __future__ import annotations

import json
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import load_digits

from scalelatent import Dataset, MultilayerBootstrapNetwork
from scalelatent.errors import DataError
from scalelatent.evaluation import output_scores as outputs
from scalelatent.evaluation import retrieval_accuracy, score_clusters
from scalelatent.evaluation.scoring import score_dataset
from scalelatent.models.mbn import report as mbn
from scalelatent.models.mbn.report import collect_evidence, list_numbers, make_pictures
from scalelatent.models.mbn.report_figures import plot_layers, plot_output, plot_retrieval
from scalelatent.report.build import build_report
from scalelatent.report.runfiles import read_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    """Run the file benchmarks/mbn_figures.py (figures of the paper), and return its functions by name."""
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are in the repository alone")
    return runpy.run_path(str(BENCHMARKS / "mbn_figures.py"))


@cache
def fitted(**params: Any) -> tuple[MultilayerBootstrapNetwork, np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    x, y = x[:300].astype(np.uint8), y[:300]
    given = {"n_clusterings": 20, "decay": 0.5, "n_classes": 10, "random_state": 0, "n_jobs": 1}
    return MultilayerBootstrapNetwork(**{**given, **params}).fit(x), x, y


def test_page_shows_scores_layers_and_settings(tmp_path: Path) -> None:
    model, x, y = fitted()
    (tmp_path / "job.json").write_text(json.dumps({"job": {"name": "digits"}, "data": {"train": "x.zarr"}}))
    page = Path(build_report(tmp_path, model=model, data=Dataset.from_arrays(x, y))).read_text()
    assert "4 layers of 20 clusterings, k = 150 → 75 → 37 → 18" in page
    for heading in ("Output of each layer", "Retrieval accuracy", "NMI", "clustering accuracy"):
        assert heading in page
    assert 'src="http' not in page
    assert page.count("data:image/png;base64,") == 3
    names = sorted(file.name for file in (tmp_path / "report").iterdir())
    assert names == ["index.html", "layers.png", "output.png", "retrieval.png"]
    assert "metrics.jsonl is missing" not in page


def test_pages_of_rows_without_labels_of_topics_and_without_rows(tmp_path: Path) -> None:
    model, x, _ = fitted()
    page = Path(build_report(tmp_path, model=model, data=Dataset.from_arrays(x))).read_text()
    assert "have no classes" in page
    assert "Retrieval accuracy" not in page
    topics = scipy.sparse.random_array((300, 6), density=0.3, rng=0, format="csr") > 0
    data = Dataset.from_arrays(x, topics.astype(np.uint8))
    page = Path(build_report(tmp_path, model=model, data=data)).read_text()
    assert "Retrieval accuracy" in page
    assert "clustering accuracy" not in page
    page = Path(build_report(tmp_path, model=model)).read_text()
    assert "made without rows" in page
    page = Path(build_report(tmp_path, model=model, data=Dataset.from_arrays(x[:, :5]))).read_text()
    assert "has 5 features per row, but the model was fitted to rows of 64" in page


def test_evidence_of_a_sample_matches_its_rows() -> None:
    model, x, y = fitted()
    whole = collect_evidence(model, Dataset.from_arrays(x, y))
    np.testing.assert_array_equal(whole.output, model.transform(x))
    assert whole.ks == model.ks_
    assert whole.clusters is not None
    assert whole.clusters["accuracy"] > 0.5
    sparse = collect_evidence(model, Dataset.from_arrays(scipy.sparse.csr_array(x), y))
    np.testing.assert_array_equal(sparse.output, whole.output)
    assert sparse.clusters is not None
    some = collect_evidence(model, Dataset.from_arrays(x, y), sample_rows=100)
    assert (len(some.output), some.n_rows) == (100, 300)
    rows = np.linspace(0, 299, 100).astype(int)
    np.testing.assert_array_equal(some.output, model.transform(x[rows]))
    assert some.codes is not None
    np.testing.assert_array_equal(np.array(some.class_names, int)[some.codes], y[rows])


def test_recorded_scores_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = fitted()
    data = Dataset.from_arrays(x, y)
    scores = score_clusters(model, data)
    assert scores["nmi"] == score_dataset(model, data, ["nmi"])["nmi"]
    (tmp_path / "job.json").write_text(json.dumps({"data": {"train": "x.zarr", "test": "x.zarr"}}))

    def reported() -> str:
        page = Path(build_report(tmp_path, model=model, data=data)).read_text()
        return re.search(r"NMI</th><td>(.*?)</td>", page).group(1)

    # Without recorded scores, the report computes the scores.
    assert reported().startswith(f"{100 * scores['nmi']:.2f} % for the clusters of smallest inertia")
    assert "mean of 50 restarts" in reported()
    record = {"event": "scored", **{f"test_{name}": value for name, value in scores.items()}, "test_nmi": 0.5}
    (tmp_path / "events.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.setattr(mbn, "score_clusters", lambda *_: pytest.fail("computed again"))
    assert reported().startswith("50.00 % for")


def test_only_a_sample_of_many_rows_is_clustered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = fitted()
    monkeypatch.setattr(outputs, "MAX_CLUSTERED_ROWS", 120)
    data, seen = Dataset.from_arrays(x, y), []
    found = score_clusters(model, data, progress=lambda done, total: seen.append((done, total)))
    assert (found["clustered_rows"], found["restarts"]) == (120, 50)
    assert max(seen) == (50, 50)
    rows = np.linspace(0, 299, 120).astype(int)
    assert found["nmi"] == score_clusters(model, Dataset.from_arrays(x[rows], y[rows]))["nmi"]
    evidence = collect_evidence(model, data, sample_rows=50)
    reported = dict(list_numbers(read_run(tmp_path), model, evidence, "test")[1])
    assert reported["rows in the figures"] == "50, evenly spaced"
    assert reported["rows that k-means clustered"] == "120, evenly spaced"


def test_output_codes_are_drawn_in_their_plane() -> None:
    model, x, y = fitted(output="codes")
    evidence = collect_evidence(model, Dataset.from_arrays(x, y))
    np.testing.assert_allclose(evidence.output, evidence.layers[-1], rtol=1e-6)
    # Rows are ranked by the number of codes that they share; they are not clustered.
    ranked = retrieval_accuracy(model.codes(), y, metric="overlap")
    assert evidence.retrieval is not None
    np.testing.assert_array_equal(evidence.retrieval.accuracy, ranked.accuracy)
    assert evidence.clusters is None
    captions = [picture.caption for picture in make_pictures(evidence, "test")]
    assert captions[0].startswith("The first two components of the codes of")
    assert "the number of codes that two rows share" in captions[2]


def test_figures_show_the_given_data(paper: dict[str, Any]) -> None:
    points, codes = np.arange(24.0).reshape(12, 2), np.arange(12)
    drawn = plot_output(points, codes, [str(i) for i in range(12)]).axes[0]
    found = np.concatenate([c.get_offsets() for c in drawn.collections])
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, points.tolist()))
    assert len(drawn.collections) == 2  # Twelve classes need two kinds of markers.
    one = plot_output(points[:, :1], None, []).axes[0]
    assert one.get_ylabel() == "rank"
    assert len(plot_layers([points] * 5, list("abcde"), codes, []).axes) == 5
    figure = paper["plot_outlier"](points, points, -points, codes, 3)
    assert figure.axes[2].lines[0].get_xydata().tolist() == [[-6, -7]]


def test_curves_show_the_given_data(paper: dict[str, Any]) -> None:
    sweep = paper["Sweep"]("wine", [0.1, 0.5], [0.8, 0.5], [0.9, 0.7], [0.01, 0.02], [0.0, 0.1], 0.5)
    axes = paper["plot_sweeps"]([sweep, sweep], "decay").axes
    assert len(axes) == 2
    assert [line.get_ydata().tolist() for line in axes[0].lines[:2]] == [[0.8, 0.5], [0.9, 0.7]]
    assert axes[0].lines[2].get_xdata()[0] == 0.5
    curve = plot_retrieval({"MBN": ([1, 3], [0.5, 0.25])}).axes[0]
    assert curve.lines[0].get_xydata().tolist() == [[1, 0.5], [3, 0.25]]
    with pytest.raises(DataError, match="nothing|no scores"):
        paper["plot_sweeps"]([], "decay")


def test_synthetic_points_are_reproducible_and_have_uneven_density(paper: dict[str, Any]) -> None:
    synthetic_points = paper["synthetic_points"]
    for shape in paper["SHAPES"]:
        rows, classes = synthetic_points(shape)
        np.testing.assert_array_equal(rows, synthetic_points(shape)[0])
        assert len(rows) == len(classes)
        assert len(np.unique(classes)) >= 2
    rows, classes = synthetic_points("Gaussian")
    spread = [rows[classes == c].std() for c in range(3)]
    assert max(spread) > 3 * min(spread)
    assert len(paper["outlier_example"]()[0]) == 201
