"""Bootstrap networks have the same bits for any container of rows and division into tasks; fits resume."""

from __future__ import annotations

import copy
import errno
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import scalelatent as sl
from scalelatent.engine import mapwrite
from scalelatent.errors import DataError, PlanError, RunError
from scalelatent.estimators import session
from scalelatent.models.mbn import estimator as mbn
from scalelatent.models.mbn import fit as mbn_fit
from scalelatent.models.mbn.model import layers
from scalelatent.models.mbn.model.layers import Layer
from tests.helpers import HookLog, InterruptAt, refuse_pickle

SMALL: dict[str, Any] = {
    "n_clusterings": 12, "n_pools": 3, "decay": 0.5, "n_components": 3, "n_classes": 10, "random_state": 5,
}  # fmt: skip
EXPECTED_TO_FAIL: dict[str, str] = {}


def make_network(**options: Any) -> sl.MultilayerBootstrapNetwork:
    return sl.MultilayerBootstrapNetwork(**{**SMALL, **options})


@pytest.fixture(autouse=True)
def use_em_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute components by EM over streamed rows; up to ``KERNEL_ROWS`` rows, inner products replace EM."""
    monkeypatch.setattr(mbn_fit, "KERNEL_ROWS", 0)


@pytest.mark.slow
@parametrize_with_checks(
    [sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=3, n_jobs=1, random_state=0)],
    expected_failed_checks=lambda _: EXPECTED_TO_FAIL,
)
def test_scikit_learns_checks_pass(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def fit_in_memory(digits: Any) -> Any:
    """Return a network that one thread fitted in memory and that keeps the codes (clusters) of all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mbn_fit, "KERNEL_ROWS", 0)
        return make_network(n_jobs=1, keep_codes=True, n_classes=20).fit(digits[0])


def assert_same_codes(model: Any, expected: Any) -> None:
    assert model.ks_ == expected.ks_ == [300, 150, 75, 37]
    np.testing.assert_array_equal(model.codes(), expected.codes())


@pytest.mark.parametrize("kind", ["memory", "stored", "memmap", "csr", "csc", "coo", "dask", "zarr"])
def test_rows_of_every_kind_give_the_same_bits(
    digits: Any, fit_in_memory: Any, tmp_path: Path, kind: str
) -> None:
    import dask.array as da
    import zarr

    x = digits[0]
    if kind == "memmap":
        np.save(tmp_path / "x.npy", x)
    given = {
        "memory": lambda: x,
        "stored": lambda: sl.Dataset.from_arrays(x, digits[1]).save(tmp_path / "x.zarr", chunk_rows=70),
        "memmap": lambda: np.load(tmp_path / "x.npy", mmap_mode="r"),
        "csr": lambda: sp.csr_array(x),
        "csc": lambda: sp.csc_matrix(x),
        "coo": lambda: sp.coo_array(x),
        "dask": lambda: da.from_array(x, chunks=(100, 64)),
        "zarr": lambda: zarr.array(x, chunks=(90, 64)),
    }[kind]()
    model = make_network(n_jobs=3, n_classes=20)
    z = model.fit_transform(given)
    assert_same_codes(model, fit_in_memory)
    np.testing.assert_array_equal(model.components_, fit_in_memory.components_)
    np.testing.assert_array_equal(z, fit_in_memory.transform(x))
    lazy = model.transform(given)
    np.testing.assert_array_equal(np.asarray(lazy), z)
    assert hasattr(lazy, "dask") == (kind == "dask")


def test_any_division_into_tasks_gives_the_same_bits(
    digits: Any, fit_in_memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.engine import mapwrite, rowsets

    monkeypatch.setattr(mapwrite, "COLUMN_BLOCK_ROWS", 130)
    monkeypatch.setattr(rowsets, "SHARDS", 5)
    monkeypatch.setattr(rowsets, "SMALL_BYTES", 0)
    monkeypatch.setattr(session, "MAX_TASK_FLOPS", 1.0)
    model = make_network(n_classes=20, n_jobs=2).fit(digits[0], run_dir=tmp_path / "run")
    assert_same_codes(model, fit_in_memory)
    np.testing.assert_array_equal(model.components_, fit_in_memory.components_)
    tiles = tmp_path / "run" / "engine" / "codes" / "code-l4.zarr" / "x" / "c"
    assert len(list(tiles.glob("*/*"))) == 5 * 12
    np.testing.assert_array_equal(model.transform(digits[0]), fit_in_memory.transform(digits[0]))


def test_new_rows_share_the_preparation_of_each_clustering(
    digits: Any, fit_in_memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, coded, original = digits[0], [], Layer.compute_codes
    # With two blocks (ranges of rows), a task computes the codes of all clusterings for one block.
    monkeypatch.setattr(mapwrite, "BLOCK_ROWS", len(rows) // 2)

    def record_codes(self: Layer, backend: Any, x: Any, centroids: Any, first: int, stop: int) -> np.ndarray:
        coded.extend((self.number, i, len(x)) for i in range(first, stop))
        return original(self, backend, x, centroids, first, stop)

    monkeypatch.setattr(Layer, "compute_codes", record_codes)
    once = sorted((i + 1, v, len(rows)) for i in range(len(fit_in_memory.ks_)) for v in range(12))
    found = fit_in_memory.transform(rows)
    assert sorted(coded) == once
    coded.clear()
    np.testing.assert_array_equal(
        fit_in_memory.transform(rows, out=tmp_path / "z.zarr").read_x(0, len(rows)), found
    )
    assert sorted(coded) == once


def test_reference_kernels_give_the_same_codes(digits: Any) -> None:
    x = digits[0][:120]
    models = [make_network(n_clusterings=5, device=device).fit(x) for device in ("cpu", "reference")]
    np.testing.assert_array_equal(models[0].codes(), models[1].codes())
    np.testing.assert_allclose(models[0].transform(x), models[1].transform(x), atol=1e-4)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_dense_and_csr_documents_give_the_same_bits(metric: str) -> None:
    """Some documents are so short that they have no words in one half of the columns."""
    rng = np.random.default_rng(0)
    x = rng.poisson(0.08, (200, 60)) * rng.integers(1, 5, (200, 60))
    x[np.arange(200), rng.integers(0, 60, 200)] += 1
    x = x.astype(np.float32)
    dense, sparse = (make_network(metric=metric, n_classes=5).fit(rows) for rows in (x, sp.csr_array(x)))
    assert dense.ks_ == sparse.ks_ == [100, 50, 25, 12]
    np.testing.assert_array_equal(dense.codes(), sparse.codes())
    np.testing.assert_array_equal(dense.transform(sp.csr_array(x[:50])), sparse.transform(x[:50]))


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_a_fit_interrupted_at_any_point_resumes(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """The centroids of layer 2 are copied, or read from the codes of layer 1."""
    monkeypatch.setattr(layers, "_MAX_CODE_BYTES", 0 if copied else 2**27)
    x = sl.Dataset.from_arrays(digits[0][:200]).save(tmp_path / "x.zarr", chunk_rows=64)
    options: dict[str, Any] = {"n_clusterings": 6, "n_classes": 20, "n_jobs": 1}
    whole = make_network(**options).fit(x, run_dir=tmp_path / "whole", engine={"checkpoint_seconds": 0})
    hooks = ("stage", "event", "pass_end")
    counted = InterruptAt(10**9, *hooks)
    make_network(**options).fit(x, run_dir=tmp_path / "count", callbacks=counted)
    stages = set()
    # Interrupt the fit at the start and the end of each stage of each layer, in the first passes that compute
    # the output, and in the last pass.
    for at in [*range(12 if copied else 10), counted.calls - 1]:
        run, log = tmp_path / f"run{at}", HookLog()
        with pytest.raises(KeyboardInterrupt):
            make_network(**options).fit(x, run_dir=run, callbacks=[log, InterruptAt(at, *hooks)])
        stages.update(log.stages[-1:])
        again = HookLog()
        model = make_network(**options).fit(x, run_dir=run, resume=True, callbacks=again)
        np.testing.assert_array_equal(model.codes(), whole.codes())
        np.testing.assert_array_equal(model.components_, whole.components_)
        np.testing.assert_array_equal(model.transform(digits[0]), whole.transform(digits[0]))
        # The resumed fit repeats only the stage that was interrupted.
        assert not set(log.stages[:-1]) & set(again.stages)
        shutil.rmtree(run)
    gathered = {"mbn_gather-l1", "mbn_gather-l2"} if copied else {"mbn_gather-l1"}
    assert stages == gathered | {"mbn_code-l1", "mbn_code-l2", "mbn_pca-counts", "mbn_pca"}


def test_only_missing_tiles_are_recomputed(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.models.mbn.model.network import LayerCoder

    done: list[int] = []
    fill = LayerCoder.fill

    def counting(self: Any, *arguments: Any) -> Any:
        if self.layer.number == 2:
            if len(done) == 5:
                done.append(-1)
                raise KeyboardInterrupt
            done.append(self.first)
        return fill(self, *arguments)

    monkeypatch.setattr(LayerCoder, "fill", counting)
    monkeypatch.setattr(session, "MAX_TASK_FLOPS", 1.0)
    options = {"n_jobs": 1, "n_classes": 20}
    with pytest.raises(KeyboardInterrupt):
        make_network(**options).fit(digits[0], run_dir=tmp_path / "run")
    make_network(**options).fit(digits[0], run_dir=tmp_path / "run", resume=True)
    assert done == [0, 1, 2, 3, 4, -1, 5, 6, 7, 8, 9, 10, 11]
    # The codes of layers 1, 2 and 4 (the last) stay: layers 2 and 3 have 12 x 150 and 12 x 75 centroids, more
    # than the 600 rows, and read them from the codes of the layer below. All other codes are deleted.
    left = sorted(p.name for p in (tmp_path / "run" / "engine").rglob("code-*.zarr"))
    assert left == ["code-l1.zarr", "code-l2.zarr", "code-l4.zarr"]
    assert not list((tmp_path / "run" / "engine").rglob("gather-l[23].zarr"))


def test_another_fit_does_not_resume_in_the_folder(digits: Any, tmp_path: Path) -> None:
    make_network().fit(digits[0][:100], run_dir=tmp_path)
    with pytest.raises(RunError, match=r"holds another fit \(n_clusterings: \d+ -> 13\)"):
        make_network(n_clusterings=13).fit(digits[0][:100], run_dir=tmp_path, resume=True)


@pytest.mark.parametrize("memory", [2**27, 0])
def test_a_network_is_saved_and_loaded_without_pickle(
    digits: Any, fit_in_memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr(mbn, "MAX_BYTES_IN_MEMORY", memory)
    model = make_network(n_classes=20).fit(digits[0])
    refuse_pickle(monkeypatch)
    model.save(tmp_path / "m.zarr")
    model.save(tmp_path / "m.zarr", overwrite=True)
    loaded = sl.load_model(tmp_path / "m.zarr")
    assert loaded.get_params() == {**model.get_params(), "n_jobs": None}
    np.testing.assert_array_equal(loaded.transform(digits[0]), fit_in_memory.transform(digits[0]))
    np.testing.assert_array_equal(loaded.codes(digits[0], layer=2), fit_in_memory.codes(layer=2))
    with pytest.raises(DataError, match=r"were not kept, but none \(a loaded model has none\)"):
        loaded.codes()
    loaded.save(tmp_path / "again.zarr")
    shutil.rmtree(tmp_path / "m.zarr")
    np.testing.assert_array_equal(
        sl.load_model(tmp_path / "again.zarr").transform(digits[0][:9]),
        fit_in_memory.transform(digits[0][:9]),
    )
    # The folder of the small network has the centroids of layer 2, and that of the large network the codes of
    # layer 1, of which these centroids are rows.
    name = "centroids-l2" if memory else "codes-l1"
    assert (tmp_path / "again.zarr" / "centroids-l2").exists() == bool(memory)
    lost = next((tmp_path / "again.zarr" / name / "x" / "c").glob("*/0"))
    lost.unlink()
    with pytest.raises(DataError, match=rf"{name}.* is missing"):
        sl.load_model(tmp_path / "again.zarr").transform(digits[0][:9])


def test_events_name_the_number_of_the_layer(digits: Any) -> None:
    log = HookLog()
    model = make_network(decay="auto", n_clusterings=4, k_last=3).fit(digits[0][:100], callbacks=log)
    assert log.infos("stage")[0] == {"stage": "mbn_decay", "rows": 100, "tries": 9}
    for hook in ("stage", "event", "progress"):
        reported = [info for info in log.infos(hook) if info.get("stage") == "mbn_code-l1"]
        assert {(info["layer"], info["layers"], info["k"]) for info in reported} == {(1, len(model.ks_), 50)}


def test_components_of_lower_layers_are_saved(digits: Any, tmp_path: Path) -> None:
    x = digits[0][:120]
    model = make_network(keep_codes=True).fit(x)
    # The codes (clusters of rows) are in memory, so an enclosing cluster of workers is not used.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalelatent.deploy.clusters.current_client", lambda: pytest.fail("a cluster"))
        z = model.transform(x[:7], layer=2)
    model.save(tmp_path / "m.zarr")
    loaded = sl.load_model(tmp_path / "m.zarr")
    np.testing.assert_array_equal(loaded.transform(x[:7], layer=2), z)
    np.testing.assert_array_equal(loaded.transform(x[:7]), model.transform(x[:7]))
    with pytest.raises(DataError, match=r"no components of layer 1: take codes\(X, layer=1\)"):
        loaded.transform(x[:7], layer=1)
    codes = make_network(output="codes").fit(x)
    codes.save(tmp_path / "codes.zarr")
    np.testing.assert_array_equal(sl.load_model(tmp_path / "codes.zarr").codes(x), codes.codes())


@pytest.mark.parametrize("other", [{"random_state": 6}, {"k1": 30}])
def test_a_network_does_not_read_files_that_another_fit_wrote_to_its_run_folder(
    digits: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    x, run = digits[0][:100], tmp_path / "run"
    fitted = make_network(keep_codes=True).fit(x, run_dir=run)
    loaded = sl.load_model(run)
    np.testing.assert_array_equal(loaded.codes(), fitted.codes())
    shutil.rmtree(run)
    make_network(keep_codes=True, **other).fit(x, run_dir=run)
    for network in (fitted, loaded):
        for read in (
            lambda model: model.transform(x),
            lambda model: model.transform(None),
            lambda model: model.transform(None, layer=1),
            lambda model: model.codes(),
        ):
            with pytest.raises(
                DataError, match=r"has changed since this job started or this model was fitted"
            ):
                read(network)


def test_a_network_does_not_use_codes_of_another_fit_in_its_run_folder(digits: Any, tmp_path: Path) -> None:
    x, run = digits[0][:100], tmp_path / "run"
    first = make_network().fit(x)
    make_network(random_state=6).fit(x, run_dir=run)
    first.save(run / "model.zarr", overwrite=True)
    loaded = sl.load_model(run)
    np.testing.assert_array_equal(loaded.codes(x), first.codes())
    with pytest.raises(DataError, match="were not kept"):
        loaded.codes()


def test_the_temporary_folder_of_a_large_network_is_deleted_with_it(
    digits: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mbn, "MAX_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = make_network().fit(digits[0][:100])
    assert len(list(tmp_path.iterdir())) == 1
    model.fit(digits[0][:90])
    assert len(list(tmp_path.iterdir())) == 1
    assert model.transform(digits[0][:5]).shape == (5, 3)
    for twin in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RunError, match=r"temporary folder .* original: use save\(PLACE\)"):
            twin(model)
    assert clone(model).get_params() == model.get_params()
    del model
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="row 3, feature 2"):
        make_network().fit(sl.Dataset.from_arrays(make_rows_with_nan(digits[0][:100])))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(mbn, "MAX_BYTES_IN_MEMORY", 2**27)
    small = make_network().fit(digits[0][:100])
    assert not list(tmp_path.iterdir())
    assert (pickle.loads(pickle.dumps(small)).transform(digits[0]) == small.transform(digits[0])).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_a_small_network_is_fitted_in_memory_with_the_bits_of_a_run_folder(
    digits: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sparse: bool
) -> None:
    x = sp.csr_array(digits[0][:200]) if sparse else digits[0][:200].copy()
    stored = make_network(keep_codes=True).fit(x, run_dir=tmp_path / "run")
    expected = stored.transform(x), stored.codes(layer=1)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "empty"))
    monkeypatch.setattr("tempfile.mkdtemp", lambda **options: pytest.fail("a temporary folder"))
    model = make_network(keep_codes=True).fit(x)
    again = x.copy()
    (x.data if sparse else x)[:] = 0  # Overwrite the rows: the network must have a copy.
    for one in (model, pickle.loads(pickle.dumps(model))):
        for got, want in zip((one.transform(again), one.codes(layer=1)), expected, strict=True):
            np.testing.assert_array_equal(got, want)
    model.save(tmp_path / "m.zarr")
    np.testing.assert_array_equal(sl.load_model(tmp_path / "m.zarr").transform(again), expected[0])


def make_rows_with_nan(x: np.ndarray) -> np.ndarray:
    out = x.astype(np.float32)
    out[3, 2] = np.nan
    return out


@pytest.mark.slow
def test_codes_of_lower_layers_are_available(digits: Any, fit_in_memory: Any, tmp_path: Path) -> None:
    x = digits[0]
    for layer, k in enumerate(fit_in_memory.ks_, 1):
        codes = fit_in_memory.codes(layer=layer)
        assert codes.shape == (600, 12)
        assert codes.dtype == np.uint16
        assert codes.max() < k
        np.testing.assert_array_equal(fit_in_memory.codes(x, layer=layer - 5), codes)
        z = fit_in_memory.transform(None, layer=layer)
        np.testing.assert_array_equal(fit_in_memory.transform(x, layer=layer), z)
    # The output of the last layer is the output of the network.
    np.testing.assert_array_equal(z, fit_in_memory.transform(x))
    model = make_network().fit(x)
    assert model.codes(x, layer=1).shape == (600, 12)
    with pytest.raises(DataError, match=r"no components of layer 1: take codes\(X, layer=1\) .*keep_codes"):
        model.transform(x, layer=1)
    with pytest.raises(
        DataError, match=r"in layer 1 were not kept, but those of \[5\]: fit with keep_codes=True"
    ):
        model.codes(layer=1)
    for bad in (0, 6, -6, True):
        with pytest.raises(DataError, match="this network has layers 1 to 5"):
            model.codes(x, layer=bad)
    out = fit_in_memory.codes(x, layer=2, out=tmp_path / "codes.zarr")
    np.testing.assert_array_equal(out.read_x(0, 600), fit_in_memory.codes(layer=2))
    plain = make_network(output="codes").fit(x)
    np.testing.assert_array_equal(plain.fit_transform(x), plain.codes())
    assert plain.transform(x[:3]).shape == (3, 12)
    assert hasattr(model, "components_")
    assert not hasattr(model.set_params(output="codes").fit(x), "components_")


@pytest.mark.slow
def test_the_number_of_components_may_be_chosen(digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, results = digits[0][:300], []
    # For rows up to KERNEL_ROWS, components come from the matrix of inner products, otherwise from EM.
    for rows in (0, 1000):
        monkeypatch.setattr(mbn_fit, "KERNEL_ROWS", rows)
        few = make_network(n_components=4).fit(x)
        np.testing.assert_allclose(few.components_ @ few.components_.T, np.eye(4), atol=1e-8)
        np.testing.assert_allclose(few.transform(x).mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(few.transform(x).var(axis=0), few.explained_variance_, rtol=1e-4)
        assert (few.components_[np.arange(4), np.abs(few.components_).argmax(axis=1)] > 0).all()
        results.append(few.transform(x))
    np.testing.assert_allclose(results[0], results[1], atol=2e-3)
    assert make_network(n_components=None).fit(x).transform(x).shape == (300, 10)
    assert make_network(n_components=None, n_classes=None).fit(x).transform(x).shape == (300, 2)


@pytest.mark.parametrize("rows", [0, 1000])
def test_components_beyond_the_rank_are_zero(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of only three kinds vary in two directions, so all other components are zero."""
    monkeypatch.setattr(mbn_fit, "KERNEL_ROWS", rows)
    x = np.repeat(np.eye(3), 4, axis=0)
    model = make_network(n_components=5, n_classes=None).fit(x)
    assert model.components_.any(axis=1).tolist() == [True, True, False, False, False]
    assert not model.explained_variance_[2:].any()
    assert not model.transform(x)[:, 2:].any()


def test_digits_are_clustered_better_than_by_their_pixels(digits: Any) -> None:
    x, y = digits
    z = make_network(n_clusterings=60, n_pools="auto", n_components=10).fit_transform(x)
    scores = [
        normalized_mutual_info_score(y, KMeans(10, n_init=5, random_state=0).fit_predict(rows))
        for rows in (z, x)
    ]
    assert scores[0] > scores[1] + 0.04, scores


def test_a_network_follows_scikit_learns_conventions(digits: Any) -> None:
    x = digits[0][:150]
    model = make_pipeline(MinMaxScaler(), make_network()).set_output(transform="pandas")
    frame = model.fit_transform(x)
    assert list(frame.columns) == [f"multilayerbootstrapnetwork{i}" for i in range(3)]
    np.testing.assert_array_equal(model.transform(x), frame)
    twin = clone(make_network(decay="auto", metric="cosine"))
    assert twin.get_params()["decay"] == "auto"
    assert make_network(random_state=None).fit(x).seed_ >= 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k1": 101}, ValueError, "k1=101 is more than the 100 rows"),
        ({"k1": 1}, ValueError, "k1=1: a clustering needs at least 2"),
        ({"k1": 0}, ValueError, "k1=0: give a whole number of at least 1"),
        ({"n_classes": 60}, ValueError, "is too small for one layer, because 1.5 times n_classes=60"),
        ({"feature_fraction": 0.01}, ValueError, r"of 64 feature\(s\) selects nothing"),
        ({"feature_fraction": 0.0}, ValueError, "feature_fraction=0.0: give a number above 0"),
        ({"decay": 1.0}, ValueError, "decay=1.0: give a number between 0 and 1"),
        ({"decay": "best"}, ValueError, "decay='best': give a number .* or 'auto'"),
        ({"metric": "manhattan"}, ValueError, "metric='manhattan' is not one of 'euclidean', 'cosine'"),
        ({"output": "tsne"}, ValueError, "output='tsne' is not one of"),
        ({"n_components": 0}, ValueError, "n_components=0: give a number of components, or None"),
        ({"n_components": 0.9}, ValueError, "n_components=0.9: give a number of components"),
        ({"n_clusterings": 0}, ValueError, "n_clusterings=0: give a whole number"),
        ({"device": "tpu"}, ValueError, "device='tpu' is not one of"),
        ({"random_state": -1}, ValueError, "random_state=-1"),
    ],
)
def test_invalid_parameters_are_refused(
    digits: Any, options: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        make_network(**options).fit(digits[0][:100])


def test_an_upper_layer_without_input_is_refused_before_work_starts(digits: Any, tmp_path: Path) -> None:
    network = make_network(n_clusterings=4, k1=12, k_last=3, feature_fraction=0.02)
    with pytest.raises(ValueError, match="layer 3: feature_fraction=0.02 of 24 one-hot units"):
        network.fit(digits[0], run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_invalid_rows_are_refused(digits: Any, fit_in_memory: Any, tmp_path: Path) -> None:
    x = digits[0][:100]
    empty = x.copy()
    empty[17] = 0
    with pytest.raises(DataError, match="row 17 is all zeros, so its cosine is undefined"):
        make_network(metric="cosine").fit(empty)
    with pytest.raises(DataError, match="X contains NaN: row 3, feature 2"):
        make_network().fit(make_rows_with_nan(x))
    np.save(tmp_path / "x.npy", make_rows_with_nan(x))
    with pytest.raises(DataError, match=r"row 3, feature 2 is nan"):
        make_network().fit(np.load(tmp_path / "x.npy", mmap_mode="r"))
    with pytest.raises(DataError, match=r"row 3, feature 2 is nan"):
        fit_in_memory.transform(sl.Dataset.from_arrays(make_rows_with_nan(x)))
    huge = x.astype(np.float32)
    huge[5, 40] = 1e20
    for rows in (huge, sp.csr_array(huge), sl.Dataset.from_arrays(huge).save(tmp_path / "huge.zarr")):
        for use in (make_network().fit, fit_in_memory.transform):
            with pytest.raises(DataError, match=r"row 5, feature 40 is 1e\+20, .*: scale the features"):
                use(rows)
    with pytest.raises(ValueError, match="X has 63 features, but MultilayerBootstrapNetwork is expecting 64"):
        fit_in_memory.transform(x[:, :63])
    with pytest.raises(DataError, match="has 63 features, but MultilayerBootstrapNetwork was fitted on 64"):
        fit_in_memory.transform(sl.Dataset.from_arrays(x[:, :63]))
    with pytest.raises(
        ValueError, match="on_bad_shard = 'skip' is for fits by passes: .* draws centroids from all rows"
    ):
        make_network().fit(x, engine={"on_bad_shard": "skip"})
    with pytest.raises(DataError, match="learns without labels and has nothing to validate"):
        make_network().fit(x, validation=(x, digits[1][:100]))


def test_a_plan_has_the_sizes_of_layers_or_names_a_parameter_to_lower(digits: Any) -> None:
    ds = sl.Dataset.from_arrays(digits[0])
    reported = make_network(n_classes=20).plan(ds)
    assert [layer["k"] for layer in reported["layers"].values()] == [300, 150, 75, 37]
    assert reported["tasks"] == sum(layer["tasks"] for layer in reported["layers"].values())
    assert reported["layers"]["l1"]["centroid_bytes"] == 3 * 600 * 32
    assert make_network(n_pools="paper").plan(ds)["layers"]["l1"]["centroid_bytes"] == 12 * 300 * 32
    codes = 600 * 12 * 2
    centroids = sum(layer["centroid_bytes"] for layer in reported["layers"].values())
    # Layers 2 and 3 read their centroids from the codes of layers 1 and 2, which stay, like those of layer 4.
    assert [layer["centroid_bytes"] for layer in reported["layers"].values()][1:] == [0, 0, 12 * 37 * 12 * 2]
    assert reported["disk_bytes"] == centroids + 4 * codes
    assert reported["run_bytes"] == centroids + 3 * codes
    assert make_network(n_classes=20, keep_codes=True).plan(ds)["disk_bytes"] == centroids + 4 * codes
    assert reported["expected_seconds"] > 0
    with pytest.raises(PlanError, match=r"layer 1 \(k = 300\) would need .* MiB a worker .*lower k1"):
        make_network().plan(ds, memory_limit="600MB")


def test_a_full_disk_is_reported_before_work_starts(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.storage.disk import LocalLocation

    monkeypatch.setattr(LocalLocation, "free_bytes", lambda self: 10_000)
    with pytest.raises(PlanError, match="GiB of disk, and .*run has 0.0 GiB left: choose another"):
        make_network().fit(digits[0], run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "csr"),
    [("gather-l1", False), ("gather-l1", True), ("code-l1", True), ("gather-l2", False), ("code-l2", False)],
)
def test_a_fit_resumes_after_the_disk_was_full(
    digits: Any, fit_in_memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, csr: bool
) -> None:
    """The disk is full at the third shard (file) of a layer's codes (cluster indices) or centroids."""
    from zarr.storage import LocalStore

    from scalelatent.engine import rowsets
    from scalelatent.storage.disk import LocalLocation

    put, write, shards = LocalStore.set, LocalLocation.write, [""]
    room = 3

    def count_shards(folder: str, key: str) -> None:
        parts = key.split("/")
        if folder.endswith(f"/{name}.zarr") and parts[0] == "x" and "c" in parts:
            # The keys of shard 2 are x/c/2/0 for an array, and x/000002/data/c/0 for CSR rows.
            shard = key if parts[1] == "c" else parts[1]
            shards.extend([shard] if shard != shards[-1] else [])
            if len(shards) > room:
                raise OSError(errno.ENOSPC, "No space left on device")

    async def full_store(self: Any, key: str, value: Any, *rest: Any) -> None:
        count_shards(str(self.root), key)
        await put(self, key, value, *rest)

    def full_location(self: Any, key: str, data: bytes, **how: Any) -> None:
        count_shards(self.url, key)
        write(self, key, data, **how)

    monkeypatch.setattr(LocalStore, "set", full_store)
    monkeypatch.setattr(LocalLocation, "write", full_location)
    monkeypatch.setattr(rowsets, "SMALL_BYTES", 0)
    monkeypatch.setattr(session, "MAX_TASK_FLOPS", 1.0)
    monkeypatch.setattr(layers, "_MAX_CODE_BYTES", 0)  # Layer 2 copies its centroids.
    x = sp.csr_array(digits[0]) if csr else digits[0]
    options = {"n_classes": 20, "n_jobs": 1}
    with pytest.raises(DataError, match=rf"{name}\.zarr: writing shard 2 .* the disk is full.*resume"):
        make_network(**options).fit(x, run_dir=tmp_path / "run")
    whole, room = shards[1:3], 1000
    shards[:] = [""]
    model = make_network(**options).fit(x, run_dir=tmp_path / "run", resume=True)
    assert_same_codes(model, fit_in_memory)
    assert len(shards) > 1
    assert not set(whole) & set(shards), "whole shards are written again"


def test_the_warning_of_few_clusterings_points_to_the_users_line(digits: Any) -> None:
    network = sl.MultilayerBootstrapNetwork(decay=0.5, n_clusterings=49, k1=20, n_classes=10, random_state=0)
    with pytest.warns(
        UserWarning, match="n_clusterings=49: with fewer than 50 clusterings rows hardly"
    ) as reported:
        network.fit_transform(digits[0][:100])
    assert reported[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clone(network).set_params(n_clusterings=50).fit(digits[0][:100])
