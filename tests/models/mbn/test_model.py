"""Layers of bootstrap networks have the right sizes, features and codes (indices of nearest centroids)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from scalelatent.contract.learners import Block
from scalelatent.engine.backend import HostBackend, make_backend
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.mbn.model.layers import (
    FLOAT32_MAX,
    ArraySets,
    Layer,
    _largest_value,
    floor_share,
    make_layers,
    make_schedule,
)
from scalelatent.models.mbn.model.network import LayerCoder, Network
from tests.helpers import to_csr_rows

OPTIONS: dict[str, Any] = {
    "n_rows": 120,
    "n_features": 11,
    "n_clusterings": 9,
    "fraction": 0.5,
    "metric": "euclidean",
    "csr": False,
    "dtype": "uint8",
    "seed": 4,
}


def make_rows(n: int, p: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 9, (n, p)).astype(np.uint8)


def make_sets(layer: Layer, x: Any) -> ArraySets:
    parts = [layer.take(which, x, layer.rows(which)) for which in range(layer.n_clusterings)]
    return ArraySets(
        np.concatenate(parts) if layer.k_below or not layer.csr else CsrRows.concatenate(parts), layer.k
    )


def compute_codes(layer: Layer, x: Any, device: str = "cpu") -> np.ndarray:
    coder = LayerCoder(layer, make_sets(layer, x), 0, layer.n_clusterings)
    return coder.apply(coder.prepare(make_backend(device)), Block(x, None, None, 0))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((60_000, 8000, 0.5, None, 10), [8000, 4000, 2000, 1000, 500, 250, 125, 62, 31, 15]),
        ((100, None, 0.5, None, 10), [50, 25]),
        ((100, None, 0.9, 40, None), [50, 45, 40]),
        ((10, 3, 0.5, None, None), [3]),
        ((10, 10, 0.99, 2, 1), [10, 9, 8, 7, 6, 5, 4, 3, 2]),
    ],
)
def test_schedules_decrease_by_the_decay(arguments: tuple[Any, ...], expected: list[int]) -> None:
    assert make_schedule(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((50, 51, 0.5, None, 2), "k1=51 is more than the 50 rows .*: give at most 50, or None"),
        ((50, 1, 0.5, None, 2), "k1=1: a clustering needs at least 2 centroids"),
        ((3, None, 0.5, None, 2), r"k1=None \(half of 3 rows, 1\): a clustering needs"),
        (
            (50, 10, 0.5, None, 10),
            "k1=10 is too small for one layer, because 1.5 times n_classes=10 is 15: raise k1",
        ),
        (
            (50, 10, 0.5, 11, 10),
            "k1=10 is too small for one layer, because k_last=11: raise k1, or lower k_last",
        ),
        ((50, 10, 0.5, 1, 10), "k_last=1: a clustering needs at least 2 centroids"),
        ((50, 10, 1.0, None, 2), r"decay=1.0: give a number between 0 and 1 \(0.5 is the paper's\)"),
        ((50, 10, 0, None, 2), "decay=0: give a number between"),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


def test_a_fraction_that_selects_no_feature_is_refused() -> None:
    with pytest.raises(ValueError, match=r"feature_fraction=0.05 of 11 feature\(s\) selects nothing.*0.0909"):
        make_layers([5], **{**OPTIONS, "fraction": 0.05})
    with pytest.raises(ValueError, match="feature_fraction=1.5: give a number above 0 and up to 1"):
        make_layers([5], **{**OPTIONS, "fraction": 1.5})


@pytest.mark.parametrize("n", [*range(1, 100), 784, 1000, 47_236, 10**7])
def test_the_recommended_fraction_is_accepted(n: int) -> None:
    with pytest.raises(ValueError, match="give at least") as error:
        make_layers([5], **{**OPTIONS, "n_features": n, "fraction": 0.5 / n})
    suggested = float(str(error.value).split()[-1])
    assert make_layers([5], **{**OPTIONS, "n_features": n, "fraction": suggested})[0].n_columns == 1


def test_an_upper_layer_without_input_is_refused() -> None:
    options = {**OPTIONS, "n_features": 200, "n_clusterings": 4, "fraction": 0.01}
    reported = (
        r"layer 3: feature_fraction=0.01 of 24 one-hot units .* selects nothing: give at least 0.0416667"
    )
    with pytest.raises(ValueError, match=reported):
        make_layers([12, 6, 3], **options)
    layers = make_layers([12, 6, 3], **{**options, "fraction": 0.0416667})
    assert [int(layer.draw_units(0).sum()) for layer in layers[1:]] == [2, 1]


def test_shares_are_rounded_down_without_rounding_errors() -> None:
    for hundredths in range(1, 101):
        for n in (*range(1, 300), 784, 10**4, 10**9 + 7):
            assert floor_share(hundredths / 100, n) == hundredths * n // 100
    assert make_layers([5], **{**OPTIONS, "n_features": 100, "fraction": 0.29})[0].n_columns == 29
    assert make_schedule(100, 90, 0.7, None, None)[:2] == [90, 63]
    assert make_schedule(100, 4, np.nextafter(1, 0), 2, None) == [4, 3, 2]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_codes_equal_those_of_one_hot_products(device: str) -> None:
    """Layer 1 finds the nearest centroid on drawn columns, and upper layers on drawn one-hot columns."""
    x, options = make_rows(120, 11), OPTIONS
    layers = make_layers([40, 20, 7], **options)
    below, k_below = x, 0
    for layer in layers:
        codes = compute_codes(layer, below, device)
        assert codes.dtype == np.uint16
        onehot = None if not k_below else np.eye(k_below)[below].reshape(len(x), -1)
        for v in range(layer.n_clusterings):
            rows = layer.rows(v)
            assert len(rows) == layer.k
            if onehot is None:
                columns = layer.draw_columns(v)
                assert len(columns) == 5
                a = x[:, columns].astype(float)
                want = ((a[:, None] - a[rows]) ** 2).sum(axis=2).argmin(axis=1)
            else:
                units = layer.draw_units(v)[0].reshape(-1)
                assert units.sum() == units.size // 2
                want = (onehot[:, units] @ onehot[rows][:, units].T).argmax(axis=1)
            np.testing.assert_array_equal(codes[:, v], want)
        below, k_below = codes, layer.k


def test_codes_of_some_clusterings_and_rows_are_a_part_of_all_codes() -> None:
    x = make_rows(120, 11)
    layer = make_layers([40], **OPTIONS)[0]
    coder, whole = LayerCoder(layer, make_sets(layer, x), 0, 9), compute_codes(layer, x)
    part = coder.select_columns(2, 8).select_columns(1, 4)
    got = part.apply(make_backend("cpu"), Block(x[30:77], None, None, 30))
    np.testing.assert_array_equal(got, whole[30:77, 3:6])


def test_csr_rows_have_the_codes_of_dense_rows_in_all_layers() -> None:
    x = make_rows(120, 11) * (np.random.default_rng(2).random((120, 11)) < 0.4)
    results = []
    for rows, kind in ((x, {}), (to_csr_rows(x), {"csr": True})):
        layers = make_layers([40, 20], **{**OPTIONS, **kind})
        first = compute_codes(layers[0], rows)
        sets = (make_sets(layers[0], rows), make_sets(layers[1], first))
        if kind:
            inside = np.isin(sets[0].read(3).indices, layers[0].draw_columns(3))
            assert inside.all()
        network = Network(layers, sets)
        got = network.apply(network.prepare(make_backend("cpu")), Block(rows, None, None, 0))
        np.testing.assert_array_equal(got, compute_codes(layers[1], first))
        results.append(got)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_without_a_defined_distance_are_refused(sparse: bool) -> None:
    def check_rows(values: list[list[float]], metric: str) -> None:
        x = np.array(values)
        make_layers([2], **{**OPTIONS, "metric": metric})[0].check(to_csr_rows(x) if sparse else x, 100)

    check_rows([[0, 0], [1, 2]], "euclidean")
    with pytest.raises(
        ValueError, match="row 101 is all zeros, so its cosine is undefined: .* metric='euclidean'"
    ):
        check_rows([[0, 1], [0, 0]], "cosine")
    with pytest.raises(ValueError, match=r"row 101, feature 1 is nan$"):
        check_rows([[0, 1], [0, np.nan]], "euclidean")
    with pytest.raises(ValueError, match=r"row 100, feature 0 is -inf$"):
        check_rows([[-np.inf, 1], [0, 1]], "euclidean")
    limit = r"too large for products in float32: scale the features below 1e\+18"
    for value, why in (("1e+39", "beyond float32: scale the features"), ("-1e+20", limit), ("2e+18", limit)):
        reported = rf"row 101, feature 1 is {re.escape(value)}, {why}$"
        with pytest.raises(ValueError, match=reported):
            check_rows([[0, 1], [0, float(value)]], "euclidean")


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_the_largest_values_have_the_codes_of_the_reference(metric: str, csr: bool) -> None:
    limit, rng = _largest_value(11), np.random.default_rng(0)
    dense = (limit * rng.uniform(0.9, 0.999, (120, 11)) * rng.choice([-1, 1], (120, 11))).astype(np.float32)
    x = to_csr_rows(dense) if csr else dense
    layer = make_layers([40], **{**OPTIONS, "metric": metric, "csr": csr, "dtype": "float32"})[0]
    codes = compute_codes(layer, x)
    np.testing.assert_array_equal(codes, compute_codes(layer, x, "reference"))
    plain = make_layers([40], **{**OPTIONS, "metric": metric, "dtype": "float32"})[0]
    np.testing.assert_array_equal(codes, compute_codes(plain, (dense / limit).astype(np.float32)))
    assert len(np.unique(codes)) == 40


@pytest.mark.parametrize("width", [1, 2, 85, 86, 784, 47_236, 2**31])
def test_squared_lengths_of_the_largest_values_are_finite(width: int) -> None:
    limit = _largest_value(width)
    assert 4 * width * limit**2 <= FLOAT32_MAX < 400 * width * limit**2


def test_the_error_of_an_ensemble_follows_theorem_1() -> None:
    """By theorem 1 of Zhang (2018), a mean over V nearest centroids has the squared error e(V).

    e(V) = s^2 (1 / V + (1 - 1 / V) rho), with s^2 the squared error of one nearest centroid and rho the
    correlation of two. Half of the sets of rows estimate s^2 and rho from pairs of clusterings; the other
    half measure the errors. Clusterings that share fewer rows have a lower rho, so their mean is better.
    """
    largest, repeats, rhos = 32, 60, []
    # The points are far apart, so their errors are independent.
    points = np.array([[a, b] for a in (0.25, 0.5, 0.75) for b in (0.25, 0.5, 0.75)], dtype=np.float32)
    for k in (40, 160):
        errors = np.empty((repeats, len(points), largest, 2))
        for i in range(repeats):
            x = np.random.default_rng([5, i]).random((400, 2), dtype=np.float32)
            options = {**OPTIONS, "n_rows": 400, "n_features": 2, "n_clusterings": largest, "fraction": 1.0}
            layer = make_layers([k], **{**options, "dtype": "float32", "seed": i})[0]
            sets = make_sets(layer, x)
            codes = LayerCoder(layer, sets, 0, largest).apply(
                make_backend("cpu"), Block(points, None, None, 0)
            )
            for v in range(largest):
                errors[i, :, v] = sets.read(v)[codes[:, v]] - points
        pairs, held = errors[: repeats // 2], errors[repeats // 2 :]
        single = (pairs**2).mean()
        rho = (pairs[:, :, ::2] * pairs[:, :, 1::2]).mean() / single
        rhos.append(rho)
        for size in (1, 4, 8, 32):
            ensembles = held.reshape(*held.shape[:2], largest // size, size, 2).mean(axis=3)
            predicted = single * (1 / size + (1 - 1 / size) * rho)
            assert (ensembles**2).mean() == pytest.approx(predicted, rel=0.25), (k, size)
    assert 0 < rhos[0] < rhos[1] - 0.1


class RowRecorder(HostBackend):
    """CPU backend that records the rows that the kernels of nearest centroids receive."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def kernel(self, name: str) -> Any:
        body = super().kernel(name)
        if name not in ("mbn_nearest", "mbn_nearest_sparse"):
            return body
        return lambda x, *rest: (self.rows.append(x), body(x, *rest))[1]


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("dtype", ["i1", "?", "u2", "f8", "f4", "u1"])
def test_rows_of_any_type_are_converted_once_for_all_clusterings(dtype: str, csr: bool) -> None:
    x = (np.random.default_rng(2).integers(0, 9, (120, 11)) / (3 if dtype[0] == "f" else 1)).astype(dtype)
    (layer,) = make_layers([20], **{**OPTIONS, "dtype": str(x.dtype), "csr": csr})
    made = to_csr_rows if csr else np.asarray
    coder = LayerCoder(layer, make_sets(layer, made(x)), 0, layer.n_clusterings)
    backend = RowRecorder()
    codes = coder.apply(coder.prepare(backend), Block(made(x), None, None, 0))
    np.testing.assert_array_equal(codes, compute_codes(layer, made(x.astype("f4"))))
    first = backend.rows[0]
    assert len(backend.rows) == layer.n_clusterings
    assert all(rows is first for rows in backend.rows)
    assert first.dtype == ("u1" if dtype == "u1" and not csr else "f4")
    if csr:
        assert (first.indices.dtype, first.indptr.dtype) == ("i4", "i8")
