"""Networks accept images as lists, memmaps and dask arrays, also with NaN, and write outputs as datasets."""

from __future__ import annotations

from functools import cache
from typing import Any

import dask.array as da
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from sklearn.datasets import load_digits

import scalelatent as sl
from scalelatent.errors import DataError
from scalelatent.estimators.base import warn_reduced
from scalelatent.models.hcn.estimator import HierarchicalCompositionalNetwork

pytestmark = pytest.mark.filterwarnings("ignore:messages of")

OPTIONS = {"p01": 1e-2, "p10": 1e-2, "p_sparsity": 1e-2, "n_epochs": 6, "random_state": 3}


def draw_images(n: int) -> np.ndarray:
    """Return n images with 2 % of pixels on, where two random features of three flip pixels anywhere."""
    rng = np.random.default_rng(0)
    features = np.array([[[1, 1], [1, 0], [1, 0]], [[0, 1], [1, 1], [0, 1]], [[1, 0], [0, 1], [1, 1]]])
    x = rng.random((n, 7, 6)) < 0.02
    for image in x:
        for f in rng.integers(0, 3, 2):
            r, c = rng.integers(0, 5, 2)
            image[r : r + 3, c : c + 2] ^= features[f].astype(bool)
    return x.astype(np.uint8)


X = draw_images(60)


def make_network(**params: Any) -> HierarchicalCompositionalNetwork:
    return HierarchicalCompositionalNetwork(**{"layers": [(3, (3, 2))], **OPTIONS, **params})


@cache
def get_fitted() -> HierarchicalCompositionalNetwork:
    m = make_network().fit(X)
    assert m.transform(X).sum() > 60
    return m


def assert_same(one: HierarchicalCompositionalNetwork, other: HierarchicalCompositionalNetwork) -> None:
    assert_array_equal(one.beliefs_[0], other.beliefs_[0])


def make_counted_array(computed: list[int]) -> Any:
    def count(block: np.ndarray) -> np.ndarray:
        computed.append(len(block))
        return block

    return da.from_array(X, chunks=(13, 7, 6)).map_blocks(count, meta=np.empty((0, 0, 0), np.uint8))


@pytest.mark.parametrize("given", [X[:, None], X.tolist(), list(X), X.astype(bool), np.asfortranarray(X)])
def test_images_of_any_dtype_and_container_give_the_same_bits(given: Any) -> None:
    assert_same(make_network().fit(given), get_fitted())
    assert_array_equal(get_fitted().transform(given), get_fitted().transform(X))


def test_flat_rows_and_memmaps_are_images(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", X)
    assert_same(make_network().fit(np.load(tmp_path / "x.npy", mmap_mode="r")), get_fitted())
    m = make_network(image_shape=(7, 6)).fit(X.reshape(60, -1))
    assert_same(m, get_fitted())
    assert_array_equal(m.transform(X.reshape(60, -1)), get_fitted().transform(X))


def test_validation_is_an_array_a_pair_or_a_dataset() -> None:
    m = make_network().fit(X[:40], validation=X[40:])
    for validation in ((X[40:], None), sl.Dataset.from_arrays(X[40:]), da.from_array(X[40:])):
        other = make_network().fit(X[:40], validation=validation)
        assert m.history_[-1]["compression"] == other.history_[-1]["compression"]


def test_lazy_images_are_learned_and_stay_lazy() -> None:
    computed: list[int] = []
    x, m = make_counted_array(computed), get_fitted()
    assert_same(make_network().fit(x), m)
    computed.clear()
    lazy = m.transform(x), m.reconstruct(x), m.inpaint(x, np.ones(X.shape, bool))
    assert not computed
    assert [a.shape for a in lazy] == [(60, 5, 5, 3), (60, 1, 7, 6), (60, 1, 7, 6)]
    # The order of pixel updates depends on the index of the row in the whole array, not in the dask chunk.
    for found, want in zip(lazy, (m.transform(X), m.reconstruct(X), X[:, None]), strict=True):
        assert found.dtype == np.uint8
        assert_array_equal(found.compute(scheduler="single-threaded"), want)
    assert sum(computed) >= 180
    places = m.infer(x).places
    assert_array_equal(places, m.infer(X).places)
    with pytest.raises(DataError, match="was fitted on"):
        m.transform(x.transpose(0, 2, 1))


@pytest.mark.parametrize("threshold", [None, 100.0], ids=["binary", "threshold"])
def test_nan_marks_a_pixel_as_unknown(threshold: float | None, tmp_path: Any) -> None:
    unknown = np.random.default_rng(1).random(X.shape) < 0.1
    levels = X * (1.0 if threshold is None else 200.0)
    holes, marked = np.where(unknown, np.nan, levels), np.where(unknown, -7.0, levels)
    other = make_network(missing=-7, threshold=threshold).fit(marked)
    m = make_network(missing=float("nan"), threshold=threshold).fit(holes)
    assert_same(m, other)
    np.save(tmp_path / "x.npy", holes)
    lazy = da.from_array(holes, chunks=(20, 7, 6))
    for given in (lazy, np.load(tmp_path / "x.npy", mmap_mode="r")):
        assert_same(make_network(missing=np.nan, threshold=threshold).fit(given), m)
    filled = m.inpaint(holes)[:, 0]
    assert filled[unknown].any()
    assert_array_equal(filled, other.inpaint(marked)[:, 0])
    assert_array_equal(filled[~unknown], X[~unknown])
    assert_array_equal(filled, m.inpaint(lazy).compute()[:, 0])
    m.save(tmp_path / "m.zarr")
    assert_array_equal(sl.load_model(tmp_path / "m.zarr").transform(holes), m.transform(holes))
    with pytest.raises(DataError, match=r"contains NaN: row \d+, feature \d+"):
        make_network().fit(holes)
    with pytest.raises(DataError, match="infinite"):
        make_network(missing=np.nan, threshold=1).fit(np.where(unknown, np.inf, levels))


@pytest.mark.parametrize(
    ("image", "features"),
    [((8, 6), (8, 6)), ((30, 30), (8, 6)), ((8, 4), (8, 4)), ((5, 5), (5, 5)), ((4, 28), (4, 12)),
     ((3, 4, 5), (4, 5)), ((1, 60), (1, 48))],
)  # fmt: skip
def test_default_features_are_reduced_and_logged_once(
    image: tuple[int, ...], features: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    warn_reduced.cache_clear()
    x = (np.random.default_rng(0).random((12, *image)) < 0.3).astype("u1")
    for _ in range(2):
        m = HierarchicalCompositionalNetwork(n_epochs=1, random_state=0).fit(x)
        assert (m.layers, m.layers_, m.batch_size_) == (None, [(32, features)], 5)
    asked = HierarchicalCompositionalNetwork([(32, features)], n_epochs=1, batch_size=5, random_state=0)
    assert_same(m, asked.fit(x))
    # The parameters by which a run folder identifies its fit have the default size, not the reduced one.
    assert m._deciding_parameters()["layers"] == ((32, (8, 6)),)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (features != (8, 6))
    assert all(
        f"layers is [(32, {features})] instead of its default [(32, (8, 6))], because images of X" in one
        for one in messages
    )


def test_given_layers_are_not_reduced() -> None:
    with pytest.raises(DataError, match="features of 8 x 6 are larger than images of 7 x 6"):
        HierarchicalCompositionalNetwork([(32, (8, 6))]).fit(X)


@pytest.mark.parametrize("width", [16, 48])
def test_small_flat_rows_are_images_of_one_row(width: int) -> None:
    """Flat rows are images of height 1, and default features have the width of the rows.

    Each row is the OR of some of five patterns.
    """
    rng = np.random.default_rng(0)
    patterns = rng.random((5, width)) < 0.3
    x = ((rng.random((300, 5)) < 0.3).astype(int) @ patterns > 0).astype("u1")
    m = HierarchicalCompositionalNetwork(random_state=0).fit(x)
    assert m.layers_ == [(32, (1, width))]
    assert m.compression_ < 0.7
    assert m.transform(x).shape == (300, 1, 1, 32)


def test_long_flat_rows_need_a_shape() -> None:
    flat = np.tile(X.reshape(60, -1), 2)[:, :64]
    with pytest.raises(DataError, match="rows are flat, of 64 pixels, .* set image_shape"):
        HierarchicalCompositionalNetwork(n_epochs=1).fit(flat)
    m = HierarchicalCompositionalNetwork(n_epochs=1, image_shape=(8, 8)).fit(flat)
    assert m.layers_ == [(32, (8, 6))]
    assert make_network(layers=[(3, (1, 4))], n_epochs=1).fit(flat).layers_ == [(3, (1, 4))]


def test_a_single_image_is_fitted(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    warn_reduced.cache_clear()
    image = (load_digits().images[:1] > 8).astype("u1")
    m = HierarchicalCompositionalNetwork(random_state=0).fit(image)
    assert "batch_size is 1 instead of its default 5, because the number of images in X is 1" in caplog.text
    assert (m.batch_size, m.batch_size_) == (None, 1)
    assert m.compression_ < 1
    assert_array_equal(m.reconstruct(image)[:, 0], image)
    m.save(tmp_path / "m.zarr")
    again = sl.load_model(tmp_path / "m.zarr")
    assert (again.batch_size_, again.layers_) == (1, m.layers_)
    assert again.partial_fit(image).batch_size_ == 5
    with pytest.raises(DataError, match="batch_size=5 = 5 images is larger than the data, 1"):
        HierarchicalCompositionalNetwork(batch_size=5).fit(X[:1])


REFUSED = [
    (lambda m: make_network().fit(np.zeros((5, 1, 1, 7, 6))), "has 5 dimensions: give images"),
    (lambda m: make_network().fit(X[:0]), r"0 sample\(s\)"),
    (lambda m: make_network().fit(np.ma.masked_equal(X, 1)), "row 0, feature 3"),
    (lambda m: make_network().fit(X[:40], validation=X[40:] * 3), "pixel [0-9]+ is 3: pixels must be 0 or 1"),
    (lambda m: make_network().fit(X[:40], validation=X[40:, :5]), "validation has 30 features"),
    (
        lambda m: make_network().fit(X[:40], validation=X[40:].transpose(0, 2, 1)),
        "but the training images have",
    ),
    (lambda m: m.transform(X[0]), r"X is one image, 7 x 6: give X\[None\]"),
    (lambda m: m.transform(np.stack([X, X], 1)), "was fitted on"),
    (lambda m: m.inpaint(X, True), "known is .*: give a bool for each pixel"),
    (lambda m: m.sample(0), "n_samples=0: give a whole number"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_images_and_arguments_are_refused(use: Any, message: str) -> None:
    with pytest.raises((DataError, ValueError), match=message):
        use(get_fitted())


def test_a_stream_may_start_with_one_image() -> None:
    m = make_network().partial_fit(X[:1]).partial_fit(X[1:5])
    assert m.transform(X).shape == (60, 5, 5, 3)


def test_images_without_known_pixels_are_refused() -> None:
    with pytest.raises(DataError, match="all pixels are unknown"):
        make_network(missing=0).fit(np.zeros_like(X))


def test_outputs_are_datasets(tmp_path: Any) -> None:
    m = get_fitted()
    stored = sl.Dataset.from_arrays(X).save(tmp_path / "x.zarr", chunk_rows=16)
    known = np.random.default_rng(2).random(X.shape) < 0.6
    mask = sl.Dataset.from_arrays(known).save(tmp_path / "known.zarr")
    written = {
        "places": (m.transform(stored, out=tmp_path / "s.zarr"), m.transform(X)),
        "made": (m.reconstruct(stored, out=tmp_path / "r.zarr"), m.reconstruct(X)),
        "filled": (m.inpaint(stored, mask, out=tmp_path / "f.zarr"), m.inpaint(X, known)),
    }
    for out, want in written.values():
        assert isinstance(out, sl.Dataset)
        assert tuple(out.feature_shape) == want.shape[1:]
        assert_array_equal(out.read_x(0, 60).reshape(want.shape), want)
    with pytest.raises(DataError, match=r"exists"):
        m.transform(stored, out=tmp_path / "s.zarr")
    with pytest.raises(DataError, match="give a bool for each pixel"):
        m.inpaint(X, known.astype(float))
    with pytest.raises(DataError, match="give a bool for each pixel"):
        m.inpaint(X, known.transpose(0, 2, 1))


def test_output_frames_have_a_column_for_each_feature_and_position() -> None:
    pandas = pytest.importorskip("pandas")
    m = make_network().fit(X)
    names = m.get_feature_names_out()
    assert len(names) == m._n_features_out == 75
    assert m.transform(X).shape == (60, 5, 5, 3)
    frame = m.set_output(transform="pandas").transform(X)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(names)
    assert_array_equal(frame.to_numpy(), get_fitted().transform(X).reshape(60, -1))
