"""Compressive networks are small networks that learn the outputs of a bootstrap network.

The tests cover the learned outputs, equal bits, resumed fits, streamed predictions and refused input.
"""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import scalelatent as sl
from scalelatent import Dataset
from scalelatent.errors import DataError, RunError
from scalelatent.models.mbn.compressive import CHECKED_BYTES, measure_scales

torch = pytest.importorskip("torch")


def make_small_network(**more: Any) -> sl.CompressiveMBN:
    given = {"hidden": (48, 32), "n_epochs": 25, "batch_size": 32, "random_state": 0, "n_jobs": 1}
    return sl.CompressiveMBN(**{**given, **more})


def make_pairs(n: int = 900, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return n rows of 6 bytes, and two nonlinear functions of each row: from 95 to 105, and from 0 to 5."""
    x = np.random.default_rng(seed).integers(0, 256, (n, 6)).astype(np.uint8)
    u = x / 128 - 1
    return x, np.column_stack([100 + 5 * u[:, 0] * u[:, 1], 5 * np.abs(u[:, 2])]).astype(np.float32)


def get_weights(model: sl.CompressiveMBN) -> bytes:
    return b"".join(a.tobytes() for a in (*model.coefs_, *model.intercepts_))


def test_a_network_learns_the_outputs_and_reports_progress(tmp_path: Path) -> None:
    x, z = make_pairs()
    held = make_pairs(300, 1)
    seen: list[dict[str, Any]] = []

    class RecordLog(sl.Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            seen.append(record)

    model = make_small_network(learning_rate=5e-3).fit(x, z, validation=held, callbacks=RecordLog())
    assert model.score(*held) > 0.85
    # The best linear function explains less than a fifth of the variance of the output.
    inputs = np.column_stack([held[0], np.ones(300)])
    residuals = held[1] - inputs @ np.linalg.lstsq(inputs, held[1])[0]
    assert 1 - (residuals**2).sum() / ((held[1] - held[1].mean(axis=0)) ** 2).sum() < 0.2
    assert seen == model.history_
    assert model.n_iter_ == 25
    assert 1 - seen[-1]["validation_error"] == pytest.approx(model.score(*held), abs=0.02)


def test_a_fit_does_not_use_an_enclosing_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalelatent.deploy import clusters

    monkeypatch.setattr(clusters, "current_client", lambda: pytest.fail("the fit used a cluster"))
    assert make_small_network(n_epochs=1).fit(*make_pairs(60)).n_iter_ == 1


def test_rows_from_disk_and_memory_give_the_same_bits(tmp_path: Path) -> None:
    x, z = make_pairs()
    first = make_small_network(n_epochs=3).fit(x, z)
    stored = Dataset.from_arrays(x).save(str(tmp_path / "x.zarr"), shard_rows=256, chunk_rows=64)
    outputs = Dataset.from_arrays(z).save(str(tmp_path / "z.zarr"))
    second = make_small_network(n_epochs=3).fit(stored, outputs)
    assert get_weights(first) == get_weights(second)
    assert get_weights(first) != get_weights(make_small_network(n_epochs=3, random_state=1).fit(x, z))


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_fit_resumes_to_the_same_bits(tmp_path: Path, after: int) -> None:
    x, z = make_pairs(300)
    whole = make_small_network(n_epochs=4).fit(x, z)

    class InterruptPass(sl.Callback):
        def on_progress(self, info: dict[str, Any]) -> None:
            if info["pass"] == after + 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_small_network(n_epochs=4).fit(x, z, run_dir=tmp_path / "run", callbacks=InterruptPass())
    resumed = make_small_network(n_epochs=4).fit(x, z, run_dir=tmp_path / "run", resume=True)
    assert get_weights(resumed) == get_weights(whole)
    assert [r["pass"] for r in resumed.history_] == [1, 2, 3, 4]
    with pytest.raises(RunError, match="holds another fit"):
        make_small_network(n_epochs=5).fit(x, z, run_dir=tmp_path / "run", resume=True)


def test_a_network_of_sparse_rows_transforms_dense_rows_alike() -> None:
    x = scipy.sparse.random_array((400, 30), density=0.1, rng=0, format="csr").astype(np.float32)
    z = x.toarray()[:, :2] * 3
    sparse = make_small_network(n_epochs=10, learning_rate=5e-3).fit(x, z)
    assert sparse.score(x, z) > 0.8
    np.testing.assert_allclose(sparse.transform(x), sparse.transform(x.toarray()), atol=1e-5)


def test_predictions_need_no_torch_and_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, z = make_pairs()
    model = make_small_network(n_epochs=2).fit(x, z)
    model.save(tmp_path / "m.zarr")
    monkeypatch.setitem(sys.modules, "torch", None)
    loaded = sl.load_model(tmp_path / "m.zarr")
    out = loaded.transform(x)
    assert out.tobytes() == model.transform(x).tobytes()
    assert loaded.get_params()["hidden"] in ((48, 32), [48, 32])
    stored = Dataset.from_arrays(x, np.arange(900) % 3).save(str(tmp_path / "x.zarr"))
    written = loaded.transform(stored, out=str(tmp_path / "z.zarr"))
    assert written.read_x(0, 900).tobytes() == out.tobytes()
    assert written.read_y(0, 3).tolist() == [0, 1, 2]
    with pytest.raises(RunError, match=r"pip install 'scalelatent\[torch\]'"):
        loaded.fit(x, z)


CASES: list[tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = [
    ({}, (np.zeros((4, 2)),), DataError, r"pass y=mbn.transform\(X\)"),
    ({}, (np.zeros((4, 2)), np.zeros((3, 1))), DataError, "the output has 3 rows for 4 rows"),
    ({}, (np.zeros((4, 2)), np.zeros(4)), DataError, r"the output has shape \(4,\)"),
    ({}, (np.zeros((4, 2)), np.full((4, 1), np.nan)), DataError, "the output contains NaN"),
    ({}, (np.full((4, 2), np.inf), np.zeros((4, 1))), DataError, "X contains an infinite value"),
    ({"hidden": (0,)}, (np.zeros((4, 2)), np.zeros((4, 1))), ValueError, r"hidden=\(0,\)"),
    ({"n_epochs": 1.5}, (np.zeros((4, 2)), np.zeros((4, 1))), ValueError, r"n_epochs=1\.5"),
    ({"learning_rate": 0}, (np.zeros((4, 2)), np.zeros((4, 1))), ValueError, "learning_rate=0"),
    ({"device": "tpu"}, (np.zeros((4, 2)), np.zeros((4, 1))), ValueError, "device='tpu'"),
]


@pytest.mark.parametrize(
    ("options", "given", "error", "message"), CASES, ids=[case[3][:20] for case in CASES]
)
def test_the_error_names_invalid_input(
    options: dict[str, Any], given: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_small_network(**options).fit(*given)


def test_invalid_rows_and_a_diverging_fit_are_refused(tmp_path: Path) -> None:
    x, z = make_pairs(100)
    rows = x.astype(np.float32)
    model = make_small_network(n_epochs=1).fit(rows, z)
    rows[7, 2] = np.nan
    with pytest.raises(DataError, match="row 7"):
        model.transform(Dataset.from_arrays(rows))
    with pytest.raises(DataError, match="has 5 features"):
        model.transform(Dataset.from_arrays(rows[:, :5]))
    with pytest.raises(DataError, match="^X contains NaN: row 7, feature 2 is nan"):
        model.fit(Dataset.from_arrays(rows), z)
    with pytest.raises(RunError, match="lower learning_rate"):
        make_small_network(n_epochs=3, learning_rate=1e30).fit(x, z)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_invalid_validation_rows_are_refused_before_work_starts(value: float) -> None:
    x, z = make_pairs(1400)
    rows, outputs = x.astype(np.float32), z.copy()
    rows[1207, 2] = outputs[1300, 1] = value
    bad = [
        (rows, z, "the validation X contains .*: row 1207, feature 2 is"),
        (x, outputs, "the validation output contains .*: row 1300, feature 1 is"),
        (scipy.sparse.csr_array(rows), z, "the validation X contains .*: row 1207, feature 2 is"),
    ]
    for held, given, message in bad:
        validation = (Dataset.from_arrays(held), Dataset.from_arrays(given))
        with pytest.raises(DataError, match=message):
            make_small_network(n_epochs=1).fit(x, z, validation=validation)


def test_scales_are_those_of_all_rows_at_once() -> None:
    rng = np.random.default_rng(0)
    x = scipy.sparse.random_array((2500, 40), density=0.1, rng=0, format="csr")
    z = 1e4 + rng.normal(size=(2500, 3)) * [1.0, 2.0, 3.0]
    dense = x.toarray() + 100
    for rows, shift in ((x, 0.0), (dense, dense.mean())):
        of_rows, (mean, size) = measure_scales(Dataset.from_arrays(rows), Dataset.from_arrays(z))
        plain = rows if isinstance(rows, np.ndarray) else rows.toarray()
        expected = shift, np.sqrt(((plain - shift) ** 2).mean())
        np.testing.assert_allclose(of_rows, expected, rtol=1e-13)
        np.testing.assert_allclose(mean, z.mean(axis=0), rtol=1e-13)
        np.testing.assert_allclose(size, np.sqrt(((z - z.mean(axis=0)) ** 2).mean()), rtol=1e-13)
    same = Dataset.from_arrays(np.full((5, 2), 7.0))
    assert [part[1] for part in measure_scales(same, same)] == [1.0, 1.0]


@pytest.mark.parametrize("sparse", [True, False])
def test_scaling_wide_rows_takes_little_memory(sparse: bool) -> None:
    """If all rows were converted to float64 at once, they would take 320 MB."""
    if sparse:
        x = Dataset.from_arrays(scipy.sparse.random_array((2000, 20_000), density=1e-3, rng=0, format="csr"))
    else:
        x = Dataset.from_arrays(np.ones((2000, 20_000), np.uint8))
    z = Dataset.from_arrays(np.arange(4000.0).reshape(2000, 2))
    tracemalloc.start()
    try:
        measure_scales(x, z)
        assert tracemalloc.get_traced_memory()[1] < 2.5 * CHECKED_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(RunError, match="PyTorch finds no CUDA device"):
        make_small_network(device="gpu").fit(*make_pairs(50))
