"""The CUDA kernels of mixtures of linear models, run on a processor, equal the reference."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.kernels import cuda
from scalelatent.models.linear_mixture.kernels import cpu, reference
from scalelatent.models.linear_mixture.kernels.reference import TangentSpec, group_rows, sort_by_code

KERNELS = {
    "lm_centre",
    "lm_lengths",
    "lm_scores",
    "lm_best",
    "lm_codes",
    "lm_scatter",
    "lm_grams",
    "lm_traces",
    "lm_tangents",
    "lm_products",
    "lm_distances",
}
SHAPE = (6, 7)
P = 42


def sum_leaf(body, means, bases, per_feature, blocks, spec=None, factors=None, first=1.0):
    """Return the sums of a leaf (a fixed range of rows), computed from its blocks.

    Each block is a pair (rows, groups of the rows). All sums start from the number ``first``.
    """
    k, p, q = bases.shape
    shapes = [(k, p), (k, p) if per_feature else (k,), (k, q, p)]
    shapes += [(0, 0, 0), (0, 0)] if spec is None else [(k, q, q), (k, 7)]
    fields = [np.full(shape, first) for shape in shapes]
    sums = body.open_sums(*fields)
    total, square, scatter, gram, trace = sums
    for x, groups in blocks:
        packed = body.pack_bases(means, bases, per_feature)
        body.add_scatter(packed, x, groups, total, square, scatter, gram)
        if spec is not None:
            still = body.pack_bases(0 * means, bases, False)
            body.add_tangent_scatter(still, x, groups, spec, factors, scatter, trace)
    body.close_sums(sums, *fields)
    return fields


@pytest.fixture(scope="session")
def emulated(emulate):
    return emulate("linear_mixture")


@pytest.fixture
def gpu(fake):
    yield importlib.import_module("scalelatent.models.linear_mixture.kernels.gpu")
    # The kernels must not use CuPy's product, whose precision depends on the environment variable CUPY_TF32.
    assert "matmul" not in {name for name, _ in fake.LAUNCHED}


@pytest.fixture(params=[cuda.MAX_GRID_Y, 2], ids=["", "small grid"])
def _grids(request, monkeypatch):
    """Run each test with grids as large as CUDA allows and with grids of two rows of thread blocks.

    In a small grid, a thread block must loop over several parts of the work.
    """
    monkeypatch.setattr(cuda, "MAX_GRID_Y", request.param)


def make_scores(k: int, h: int, own: bool):
    rng = np.random.default_rng(k)
    means, bases = rng.normal(size=(k, P)), rng.normal(size=(k, P, h)) / np.sqrt(P)
    if own:
        noise = np.exp(rng.normal(size=(k, P)))
        return reference.factor_scores(means, bases, noise, np.full(k, 1 / k), np.zeros(P))
    return reference.error_scores(means, bases, means.mean(axis=0))


@pytest.mark.usefixtures("_grids")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("n", "k", "h"), [(0, 3, 2), (1, 1, 0), (9, 300, 3), (20, 10, 12)])
def test_emulated_scores_equal_the_reference(gpu, emulated, monkeypatch, n, k, h, own):
    monkeypatch.setattr(gpu, "PRODUCTS", 7 * k * (h + 1))  # Room for the scores of 7 rows at a time.
    scores, starts = make_scores(k, h, own), np.array([0, k // 3, k // 2, k])
    x = np.random.default_rng(0).normal(size=(n, P)).astype("f4")
    ours, theirs = gpu.make_scorer(scores, starts), reference.make_scorer(scores, starts)
    for run, stop in ((0, 3), (1, 3)):
        wanted = reference.all_scores(theirs, x, run, stop)
        np.testing.assert_allclose(gpu.all_scores(ours, x, run, stop), wanted, rtol=1e-4, atol=1e-3)
        best, index = gpu.nearest(ours, x, run, stop)
        least, where = reference.nearest(theirs, x, run, stop)
        np.testing.assert_allclose(best, least, rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(index, where)
    runs = sort_by_code(np.arange(n) % 3, 3)
    best, index = gpu.nearest_own(ours, x, *runs)
    least, where = reference.nearest_own(theirs, x, *runs)
    np.testing.assert_allclose(best, least, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(index, where)


def test_dropped_components_are_never_chosen(gpu, emulated):
    scores = make_scores(6, 2, False)
    scores.c[:3] = np.inf
    x = np.random.default_rng(0).normal(size=(5, P)).astype("f4")
    best, index = gpu.nearest(gpu.make_scorer(scores, np.array([0, 3, 6])), x, 0, 2)
    assert (best[:, 0] == np.inf).all()
    assert not index[:, 0].any()
    assert (index[:, 1] >= 3).all()


@pytest.mark.usefixtures("_grids")
@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("n", [0, 1, 60])
def test_emulated_statistics_equal_the_reference(gpu, emulated, n, per_feature):
    rng, k, q = np.random.default_rng(n), 4, 8
    means, bases = rng.normal(size=(k, P)), rng.normal(size=(k, P, q)) / np.sqrt(P)
    x, groups = rng.normal(size=(n, P)).astype("f4"), group_rows(rng.integers(0, 3, n), k, rng.random(n))
    spec, factors = TangentSpec(reference.TANGENTS, SHAPE, 0.6), rng.random((k, 7))
    blocks = [(x, groups), (x[: n // 2], group_rows(np.arange(n // 2) % 2, k))]
    found = [sum_leaf(body, means, bases, per_feature, blocks, spec, factors) for body in (gpu, reference)]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("_grids")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("n", "h", "t"), [(0, 2, 7), (1, 0, 7), (7, 5, 7), (3, 2, 1), (3, 2, 4), (2, 1, 0)])
def test_emulated_tangent_distance_equals_the_reference(gpu, emulated, monkeypatch, n, h, t, own):
    monkeypatch.setattr(gpu, "PAIRS", 9)
    scores, rng = make_scores(6, h, own), np.random.default_rng(2)
    x, candidates = rng.normal(size=(n, P)).astype("f4"), rng.integers(0, 6, (n, 3)).astype("i4")
    names = reference.TANGENTS[:t]
    tangents = gpu.tangent_rows(x, SHAPE, names, 0.6)
    wanted = reference.tangent_rows(x, SHAPE, names, 0.6)
    np.testing.assert_allclose(tangents, wanted, rtol=1e-4, atol=1e-5)
    found = gpu.tangent_distance(gpu.pack_tangent_scores(scores), x, tangents, candidates)
    expected = reference.tangent_distance(reference.pack_tangent_scores(scores), x, wanted, candidates)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.slow
def test_more_groups_than_rows_of_the_grid_are_computed(gpu):
    n, k = cuda.MAX_GRID_Y + 2, cuda.MAX_GRID_Y + 2
    x, groups = np.arange(n, dtype="f4")[:, None] % 7, group_rows(np.arange(n), k)
    total = sum_leaf(gpu, np.zeros((k, 1)), np.zeros((k, 1, 0)), False, [(x, groups)])[0]
    np.testing.assert_array_equal(total, x + 1)


def test_sums_that_stay_on_the_device_have_the_bits_of_sums_of_each_block(gpu, emulated):
    rng, k, q = np.random.default_rng(1), 3, 4
    means, bases = rng.normal(size=(k, P)), rng.normal(size=(k, P, q))
    blocks = [
        (rng.normal(size=(n, P)).astype("f4"), group_rows(rng.integers(0, k, n), k, rng.random(n)))
        for n in (20, 7, 1)
    ]
    together = sum_leaf(gpu, means, bases, True, blocks, first=0.0)
    apart = [sum_leaf(gpu, means, bases, True, [block], first=0.0) for block in blocks]
    for ours, *parts in zip(together, *apart, strict=True):
        theirs = np.zeros_like(ours)
        for part in parts:  # The host adds the sums of the blocks in the same order as the kernel.
            theirs += part
        np.testing.assert_array_equal(ours, theirs)


def test_more_tangents_than_there_are_kinds_are_refused(gpu):
    x, tangents = np.zeros((1, P), dtype="f4"), np.zeros((1, 8, P), dtype="f4")
    with pytest.raises(ValueError, match="tangents has 8 tangents per row; give at most 7"):
        gpu.tangent_distance(
            gpu.pack_tangent_scores(make_scores(1, 1, False)), x, tangents, np.zeros((1, 1), dtype="i4")
        )


def test_the_cuda_file_has_the_expected_kernels_and_constants(gpu, emulated):
    assert set(emulated.names) == KERNELS
    assert f"constexpr int THREADS = {gpu.THREADS};" in gpu._kernels.text
    assert f"constexpr int MOST_TANGENTS = {len(reference.TANGENTS)};" in gpu._kernels.text


@pytest.fixture(params=["numba", pytest.param("cupy", marks=pytest.mark.gpu)])
def full_size(request):
    """Return the kernels of a processor, or, in tests marked ``gpu``, those of a device."""
    if request.param == "numba":
        return cpu
    request.getfixturevalue("real")
    return importlib.import_module("scalelatent.models.linear_mixture.kernels.gpu")


@pytest.mark.slow
@pytest.mark.parametrize(("n", "shape", "k", "h"), [(5, (3, 3), 2, 0), (3000, (28, 28), 60, 12)])
def test_kernels_at_full_size_equal_the_reference(full_size, n, shape, k, h):
    device = full_size
    rng, p = np.random.default_rng(n), shape[0] * shape[1]
    means, bases = rng.normal(size=(k, p)), np.linalg.qr(rng.normal(size=(k, p, h or 1)))[0]
    scores = reference.error_scores(means, bases[:, :, :h], means.mean(axis=0))
    x, starts = rng.normal(size=(n, p)).astype("f4"), np.array([0, k // 2, k])
    wanted = reference.all_scores(reference.make_scorer(scores, starts), x, 0, 2)
    best, index = device.nearest(device.make_scorer(scores, starts), x, 0, 2)
    np.testing.assert_allclose(best[:, 1], wanted[:, k // 2 :].min(axis=1), rtol=1e-4, atol=1e-2)
    chosen = np.take_along_axis(wanted, index.astype(int), axis=1)
    np.testing.assert_allclose(chosen, best, rtol=1e-4, atol=1e-2)
    groups, found = group_rows(rng.integers(0, k, n), k, rng.random(n)), []
    spec, factors = TangentSpec(reference.TANGENTS, shape, 0.6), rng.random((k, 7))
    for body in (device, reference):
        found.append(sum_leaf(body, means, bases, False, [(x, groups)], spec, factors))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize(
    "options",
    [{}, {"assignment": "soft"}, {"likelihood": "factor-analysis"}, {"block_rows": 64, "leaf_rows": 128}],
)
def test_a_whole_fit_on_the_gpu_equals_that_of_a_processor(fake, options):
    rng, y = np.random.default_rng(0), np.arange(300) % 2
    x = (rng.normal(size=(300, 4)) @ rng.normal(size=(4, 20)) + 3.0 * y[:, None]).astype("f4")
    engine = {name: options[name] for name in ("block_rows", "leaf_rows") if name in options}
    settings = {name: value for name, value in options.items() if name not in engine}
    settings |= {"n_components": 3, "n_dims": 3, "max_iter": 4, "n_jobs": 1, "random_state": 0}
    history = {
        device: sl.LinearMixtureClassifier(device=device, **settings).fit(x, y, engine=engine).history_
        for device in ("cpu", "gpu")
    }
    assert "lm_scatter" in {name for name, _ in fake.LAUNCHED}
    for ours, theirs in zip(history["gpu"], history["cpu"], strict=True):
        np.testing.assert_allclose(ours["objective"], theirs["objective"], rtol=1e-4)
