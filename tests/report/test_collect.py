"""The data of figures, collected block by block, equal those that numpy computes from all rows."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from scalelatent import CapsuleRegression, Dataset, open_dataset
from scalelatent.data import create_dataset
from scalelatent.errors import DataError
from scalelatent.models.capsule.report_data import BLOCK_BYTES, collect_report_data, count_block_rows

# Bytes of a block (rows computed together): only a few dozen rows, so that the tests have several blocks.
SMALL_BLOCKS = 40_000


def squared_lengths(h, dim):
    """Return the squared lengths of capsules of dimension ``dim``, an array of shape (rows, capsules)."""
    return (h.astype(float) ** 2).reshape(len(h), -1, dim).sum(axis=2)


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
def test_confusion_matches_predict(digits, architecture):
    found = digits(capsule_dim=2, architecture=architecture)
    shown = collect_report_data(found.model, found.data, block_bytes=SMALL_BLOCKS)
    expected = np.zeros((10, 10), int)
    np.add.at(expected, (found.y, found.model.predict(found.x)), 1)
    assert np.array_equal(shown.confusion.counts, expected)
    assert shown.confusion.error == pytest.approx(1 - found.model.score(found.x, found.y))


def test_multiclass_points_are_normalised_latents(digits):
    found = digits(capsule_dim=2, architecture="multiclass")
    shown = collect_report_data(found.model, found.data, sample_rows=60, block_bytes=SMALL_BLOCKS)
    rows = shown.sample.rows
    assert len(rows) == 60
    assert np.ptp(np.diff(rows)) <= 1  # The sampled rows are evenly spaced.
    h = found.model.transform(found.x[rows]).astype(float)
    psi = h / np.sqrt((h**2).sum(axis=1, keepdims=True))
    for c, points in enumerate(shown.sample.points):
        assert points == pytest.approx(psi[:, 2 * c : 2 * c + 2], abs=1e-5)
        assert (np.linalg.norm(points, axis=1) <= 1 + 1e-6).all()
    assert np.array_equal(shown.sample.codes, found.y[rows])


def test_one_vs_all_points_are_of_each_members_own_class(digits):
    found = digits(capsule_dim=3, architecture="one_vs_all")
    shown = collect_report_data(found.model, found.data)
    h = found.model.transform(found.x).astype(float).reshape(-1, 10, 6)
    psi = h[:, :, :3] / np.sqrt((h**2).sum(axis=2, keepdims=True))
    for c, points in enumerate(shown.sample.points):
        assert points == pytest.approx(psi[:, c], abs=1e-5)


def test_prototypes_have_the_largest_shares_of_squared_latents(digits):
    found = digits(capsule_dim=4, architecture="multiclass")
    shown = collect_report_data(found.model, found.data, block_bytes=SMALL_BLOCKS)
    h = found.model.transform(found.x).astype(float)
    share = h**2 / (h**2).sum(axis=1, keepdims=True)
    for c in range(10):
        own = np.flatnonzero(found.y == c)
        best = own[share[own, 4 * c : 4 * c + 4].argmax(axis=0)]
        assert np.array_equal(shown.prototypes.rows[c], best)
        assert np.array_equal(shown.prototypes.x[c], found.x[best])


def test_prototypes_of_unequal_dimensions(digits):
    found = digits(capsule_dim=(1, 2, 3, 1, 2, 3, 1, 2, 3, 4))
    shown = collect_report_data(found.model, found.data)
    assert found.model._members.class_dims == [1, 2, 3, 1, 2, 3, 1, 2, 3, 4]
    assert (shown.prototypes.rows >= 0).sum(axis=1).tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 4]


def test_all_vs_all_prototypes(digits):
    found = digits(capsule_dim=2, architecture="all_vs_all")
    shown = collect_report_data(found.model, found.data, block_bytes=SMALL_BLOCKS)
    assert shown.sample is None
    # Scores of this architecture are shares of votes, not probabilities, so the report shows no reliability.
    assert shown.reliability is None
    h = found.model.transform(found.x).astype(float).reshape(-1, 45, 4)
    pairs = [(a, b) for a in range(10) for b in range(a + 1, 10)]
    squared = h**2 / (h**2).sum(axis=2, keepdims=True)
    own = np.flatnonzero(found.y == 0)
    mean = squared[own][:, [r for r, pair in enumerate(pairs) if pair[0] == 0], :2].mean(axis=1)
    assert np.array_equal(shown.prototypes.rows[0], own[mean.argmax(axis=0)])


def test_mistakes_and_reliability(digits):
    found = digits(capsule_dim=2)
    shown = collect_report_data(found.model, found.data, block_bytes=SMALL_BLOCKS)
    p, y = found.model.predict_proba(found.x), found.y
    guess, top = p.argmax(axis=1), p.max(axis=1)
    wrong = np.flatnonzero(guess != y)
    worst = wrong[np.argsort(-top[wrong], kind="stable")][:20]
    assert [row[1] for row in shown.mistakes.found] == worst.tolist()
    assert [row[2:4] for row in shown.mistakes.found] == [(y[i], guess[i]) for i in worst]
    assert shown.reliability.counts.sum() == len(y)
    assert shown.reliability.hits.sum() == (guess == y).sum()
    assert shown.reliability.confidence.sum() == pytest.approx(top.sum())
    assert shown.reliability.log_loss == pytest.approx(-np.log(p[np.arange(len(y)), y]).mean())


def test_block_size_changes_nothing(digits):
    found = digits(capsule_dim=2)
    one = collect_report_data(found.model, found.data, block_bytes=BLOCK_BYTES)
    many = collect_report_data(found.model, found.data, block_bytes=1)  # Each block has one row.
    assert np.array_equal(one.confusion.counts, many.confusion.counts)
    assert np.array_equal(one.sample.codes, many.sample.codes)
    assert one.sample.points[3] == pytest.approx(many.sample.points[3], abs=1e-5)


def test_weights_are_used_as_in_score(digits):
    found = digits(capsule_dim=2)
    weighted = found.data.with_weight(np.arange(1.0, len(found.y) + 1))
    shown = collect_report_data(found.model, weighted)
    assert shown.confusion.error == pytest.approx(1 - found.model.score(weighted))
    # A row of weight 2 counts like two equal rows, also in the reliability.
    repeated = np.repeat(np.arange(len(found.y)), np.arange(len(found.y)) % 3)
    twice = Dataset.from_arrays(found.x[repeated], found.y[repeated])
    weighted = found.data.with_weight(np.arange(len(found.y)) % 3)
    a, b = (collect_report_data(found.model, rows).reliability for rows in (weighted, twice))
    for name in ("counts", "confidence", "hits", "calibration_error", "log_loss"):
        assert getattr(a, name) == pytest.approx(getattr(b, name))


def test_figures_use_the_members_of_the_fit_after_a_parameter_has_changed(digits):
    found = digits(capsule_dim=2, architecture="one_vs_all")
    changed = CapsuleRegression().set_params(**found.model.get_params())
    vars(changed).update(vars(found.model))
    changed.set_params(architecture="multiclass", capsule_dim=5)
    before, after = (collect_report_data(model, found.data) for model in (found.model, changed))
    assert after.members.class_capsules == before.members.class_capsules
    assert np.array_equal(after.prototypes.rows, before.prototypes.rows)


def test_rows_without_labels_have_their_predicted_classes(digits):
    found = digits(capsule_dim=2)
    shown = collect_report_data(found.model, Dataset.from_arrays(found.x))
    assert not shown.labelled
    assert shown.confusion is None
    assert np.array_equal(shown.sample.codes, found.model.predict(found.x))
    assert not shown.mistakes.found


def test_rows_of_another_width_and_unknown_labels_are_refused(digits):
    found = digits(capsule_dim=2)
    with pytest.raises(DataError, match=r"has 5 features per row, but the model was fitted to rows of 64"):
        collect_report_data(found.model, Dataset.from_arrays(np.ones((3, 5)), [0, 1, 2]))
    with pytest.raises(DataError, match=r"11"):
        collect_report_data(found.model, Dataset.from_arrays(found.x[:3], [0, 11, 2]))


def test_block_rows_keep_the_budget():
    assert count_block_rows(10**9, 4, 8, 2, BLOCK_BYTES) == 1
    rows = count_block_rows(784, 1, 19_600, 50, BLOCK_BYTES)
    assert 1 < rows * 19_600 * 20 <= BLOCK_BYTES


def make_rows(url, n_rows):
    """Write a dataset of two classes shard by shard, so that this process never holds all rows."""
    writer = create_dataset(
        str(url), n_rows, (64,), "uint8", y_dtype="int64", classes=[0, 1], chunk_rows=2000
    )
    for i in range(writer.n_shards):
        start, stop = writer.shard_bounds(i)
        rng = np.random.default_rng(i)
        y = rng.integers(0, 2, stop - start)
        writer.write_shard(i, (rng.integers(0, 99, (stop - start, 64)) + 99 * y[:, None]).astype("u1"), y)
    return writer.finalize()


def test_memory_does_not_grow_with_the_rows(tmp_path):
    x = np.random.default_rng(0).integers(0, 255, (400, 64)).astype("u1")
    model = CapsuleRegression(capsule_dim=2, max_iter=2, random_state=0).fit(x, np.arange(400) % 2)
    peaks = {}
    for n in (20_000, 20_000, 200_000):  # The first round only warms caches.
        ds = open_dataset(str(tmp_path / f"{n}.zarr")) if n in peaks else make_rows(tmp_path / f"{n}.zarr", n)
        tracemalloc.start()
        shown = collect_report_data(model, ds)
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert shown.confusion.counts.sum() == n
    assert peaks[200_000] < 1.3 * peaks[20_000]
    assert peaks[200_000] < 64 * 200_000  # The rows themselves take more memory: 64 bytes each.
