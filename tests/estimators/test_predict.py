"""Predictions are arrays in memory, lazy arrays for dask arrays, or datasets that are written in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from scalelatent import Callback, CapsuleRegression, Dataset, open_dataset
from scalelatent.errors import DataError

Arrays = tuple[np.ndarray, np.ndarray]
METHODS = ["predict", "predict_proba", "transform"]


@pytest.fixture(scope="module", params=["multiclass", "one_vs_all", "all_vs_all", "projected"])
def model(request: pytest.FixtureRequest, digits: Arrays) -> CapsuleRegression:
    options = {"projection": 15} if request.param == "projected" else {"architecture": request.param}
    return CapsuleRegression(capsule_dim=2, max_iter=8, random_state=0, n_jobs=2, **options).fit(*digits)


@pytest.fixture(scope="module")
def plain_model(digits: Arrays) -> CapsuleRegression:
    return CapsuleRegression(capsule_dim=2, max_iter=8, random_state=0).fit(*digits)


@pytest.mark.parametrize("method", METHODS)
def test_predictions_have_the_documented_shapes_and_types(
    model: CapsuleRegression, digits: Arrays, method: str
) -> None:
    out = getattr(model, method)(digits[0])
    shape = {"predict": (600,), "predict_proba": (600, 10), "transform": (600, model.W_.shape[0])}[method]
    dtype = {"predict": np.int64, "predict_proba": np.float64, "transform": np.float32}[method]
    assert (out.shape, out.dtype) == (shape, dtype)


def test_probabilities_and_classes_agree(model: CapsuleRegression, digits: Arrays) -> None:
    p = model.predict_proba(digits[0])
    np.testing.assert_allclose(p.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_array_equal(model.classes_[p.argmax(axis=1)], model.predict(digits[0]))
    assert model.score(*digits) == (model.predict(digits[0]) == digits[1]).mean()


def test_transform_multiplies_rows_by_the_weights(model: CapsuleRegression, digits: Arrays) -> None:
    x = digits[0] - model.mean_.astype(float)
    h = (x if model.projection_ is None else x @ model.projection_) @ model.W_.T + model.intercept_
    np.testing.assert_allclose(model.transform(digits[0]), h, rtol=1e-4, atol=1e-4 * np.abs(h).max())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 2, 257, 600])
def test_fewer_rows_have_close_predictions(
    plain_model: CapsuleRegression, digits: Arrays, method: str, n: int
) -> None:
    whole = getattr(plain_model, method)(digits[0])[:n]
    part = getattr(plain_model, method)(digits[0][:n])
    # Matrix products of fewer rows may round differently.
    np.testing.assert_allclose(part, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [(600, 64), (100, 64), (77, 13), ((1, 599), (64,))])
@pytest.mark.parametrize("method", METHODS)
def test_predictions_of_dask_arrays_are_lazy(
    model: CapsuleRegression, digits: Arrays, method: str, chunks: Any
) -> None:
    computed = []

    def watch(block: np.ndarray) -> np.ndarray:
        computed.append(block.shape)
        return block

    x = da.from_array(digits[0], chunks=chunks).map_blocks(
        watch, dtype=digits[0].dtype, meta=np.zeros((0, 0), "u1")
    )
    out = getattr(model, method)(x)
    assert isinstance(out, da.Array)
    assert computed == []
    expected = getattr(model, method)(digits[0])
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert out.chunks[0] == x.chunks[0]
    got = out.compute(scheduler="synchronous")
    assert len(computed) == x.npartitions
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    part = out[:50].compute(scheduler="threads")
    np.testing.assert_allclose(part, expected[:50], rtol=1e-4, atol=1e-5)


def test_predictions_of_a_dask_array_have_string_labels(digits: Arrays) -> None:
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    model = CapsuleRegression(capsule_dim=2, max_iter=3).fit(digits[0], names[digits[1]])
    out = model.predict(da.from_array(digits[0], chunks=(100, 64)))
    assert out.dtype.kind == "U"
    np.testing.assert_array_equal(out.compute(scheduler="synchronous"), model.predict(digits[0]))


@pytest.mark.parametrize("method", METHODS)
def test_out_streams_to_a_dataset(
    plain_model: CapsuleRegression, digits: Arrays, tmp_path: Path, method: str
) -> None:
    stored = Dataset.from_arrays(*digits).save(tmp_path / "in", chunk_rows=64)
    reported: list[dict[str, Any]] = []

    class ProgressLog(Callback):
        def on_progress(self, info: dict[str, Any]) -> None:
            reported.append(info)

    out = getattr(plain_model, method)(stored, out=tmp_path / "out.zarr", callbacks=[ProgressLog()])
    assert reported[-1]["rows_done"] == reported[-1]["rows_total"] == 600
    again = open_dataset(tmp_path / "out.zarr")
    for ds in (out, again):
        expected = getattr(plain_model, "predict_proba" if method == "predict" else method)(stored)
        np.testing.assert_allclose(ds.read_x(0, 600), expected, rtol=1e-4, atol=1e-5)
        labels = plain_model.predict(stored) if method == "predict" else digits[1]
        np.testing.assert_array_equal(ds.read_y(0, 600), labels)
    with pytest.raises(DataError, match=r"out\.zarr"):
        getattr(plain_model, method)(stored, out=tmp_path / "out.zarr")
    getattr(plain_model, method)(stored[:100], out=tmp_path / "out.zarr", overwrite=True)
    assert len(open_dataset(tmp_path / "out.zarr")) == 100


def test_predictions_of_arrays_are_written_with_out(
    plain_model: CapsuleRegression, digits: Arrays, tmp_path: Path
) -> None:
    ds = plain_model.predict_proba(digits[0], out=str(tmp_path / "p"))
    np.testing.assert_allclose(ds.read_x(0, 600), plain_model.predict_proba(digits[0]), rtol=1e-4, atol=1e-5)
    assert not ds.has_y


def test_predicted_class_names_are_stored(digits: Arrays, tmp_path: Path) -> None:
    names = np.array(list("abcdefghij"))
    model = CapsuleRegression(capsule_dim=2, max_iter=3).fit(digits[0], names[digits[1]])
    out = model.predict(Dataset.from_arrays(digits[0]), out=tmp_path / "p")
    assert out.classes.tolist() == list("abcdefghij")
    np.testing.assert_array_equal(out.read_y(0, 600), model.predict(digits[0]))


@pytest.mark.parametrize("method", METHODS)
def test_datasets_and_lazy_arrays_are_predicted_in_memory(
    plain_model: CapsuleRegression, digits: Arrays, tmp_path: Path, method: str
) -> None:
    expected = getattr(plain_model, method)(digits[0])
    stored = Dataset.from_arrays(*digits).save(tmp_path / "in", chunk_rows=77)
    np.save(tmp_path / "x.npy", digits[0])
    for x in (
        stored,
        Dataset.from_arrays(digits[0]),
        np.load(tmp_path / "x.npy", mmap_mode="r"),
        digits[0].tolist(),
    ):
        np.testing.assert_array_equal(getattr(plain_model, method)(x), expected)


def test_score_streams_stored_rows(
    plain_model: CapsuleRegression, digits: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.estimators import classifier

    stored = Dataset.from_arrays(*digits).save(tmp_path / "in")
    expected = plain_model.score(*digits)
    monkeypatch.setattr(classifier, "SCORE_ROWS", 100)
    largest, original = [0], Dataset.read_x

    def read_x(self: Dataset, start: int, stop: int) -> np.ndarray:
        largest[0] = max(largest[0], stop - start)
        return original(self, start, stop)

    monkeypatch.setattr(Dataset, "read_x", read_x)
    assert plain_model.score(stored) == pytest.approx(expected, abs=1e-12)
    assert largest[0] <= 100
    assert plain_model.score(stored, digits[1]) == pytest.approx(expected, abs=1e-12)
    assert plain_model.score(da.from_array(digits[0], chunks=(99, 64)), digits[1]) == pytest.approx(
        expected, abs=1e-12
    )


def test_an_output_beyond_memory_is_refused(
    plain_model: CapsuleRegression, digits: Arrays, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("scalelatent.estimators.base.process_memory", lambda: 100_000)
    with pytest.raises(DataError, match=r"600 rows.*out='RESULT\.zarr'"):
        plain_model.predict_proba(digits[0])
    assert len(plain_model.predict_proba(digits[0], out=tmp_path / "p")) == 600


@pytest.mark.parametrize("method", [*METHODS, "score", "save"])
def test_predictions_of_an_unfitted_model_are_refused(method: str, digits: Arrays, tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        getattr(CapsuleRegression(), method)(tmp_path / "m" if method == "save" else digits[0])


@pytest.mark.parametrize("container", ["numpy", "dask", "dataset", "memmap"])
@pytest.mark.parametrize("method", [*METHODS, "score"])
def test_the_error_names_another_number_of_features(
    plain_model: CapsuleRegression, digits: Arrays, tmp_path: Path, method: str, container: str
) -> None:
    x = digits[0][:, :60]
    np.save(tmp_path / "x.npy", x)
    given: Any = {
        "numpy": x,
        "dask": da.from_array(x),
        "dataset": Dataset.from_arrays(x, digits[1]),
        "memmap": np.load(tmp_path / "x.npy", mmap_mode="r"),
    }[container]
    args = (given, digits[1]) if method == "score" and container != "dataset" else (given,)
    with pytest.raises(ValueError, match=r"60 features.*64"):
        getattr(plain_model, method)(*args)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("container", ["numpy", "dataset", "memmap", "dask", "out"])
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_are_not_finite_are_not_predicted(
    plain_model: CapsuleRegression, digits: Arrays, tmp_path: Path, method: str, container: str, bad: float
) -> None:
    """A row with NaN or infinity has no longest capsule, so any predicted class would be arbitrary."""
    x = digits[0].astype("f4")
    x[417, 5] = bad
    np.save(tmp_path / "x.npy", x)
    given: Any = {
        "numpy": x, "dataset": Dataset.from_arrays(x), "memmap": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "dask": da.from_array(x, chunks=(100, 64)), "out": Dataset.from_arrays(x),
    }[container]  # fmt: skip
    with pytest.raises(ValueError, match="NaN|nan|inf"):
        out = getattr(plain_model, method)(given, **({"out": tmp_path / "o"} if container == "out" else {}))
        if container == "dask":
            out.compute(scheduler="synchronous")


def test_labels_and_weights_of_a_score_may_be_a_column(
    plain_model: CapsuleRegression, digits: Arrays
) -> None:
    x, y = digits
    share, weight = plain_model.score(x, y), np.linspace(0, 1, len(y))
    assert plain_model.score(x, y[:, None]) == share
    assert plain_model.score(x, da.from_array(y, chunks=77)) == share
    assert plain_model.score(x, y, weight[:, None]) == plain_model.score(x, y, weight)
    with pytest.raises(ValueError, match="1d array"):
        plain_model.score(x, np.stack([y, y], axis=1))
    with pytest.raises(DataError, match="learns from one label a row"):
        plain_model.score(Dataset.from_arrays(x, np.stack([y, y], axis=1)))


def test_a_score_with_weights_of_zero_is_refused(plain_model: CapsuleRegression, digits: Arrays) -> None:
    with pytest.raises(DataError, match="weights of the rows sum to 0"):
        plain_model.score(*digits, sample_weight=np.zeros(600))
    with pytest.raises(DataError, match="weights of the rows sum to 0"):
        plain_model.score(Dataset.from_arrays(*digits, sample_weight=np.zeros(600)))
