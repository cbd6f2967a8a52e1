"""Rows that cannot be used raise a clear error, if possible before work starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.neighbors import KNeighborsClassifier

from scalelatent import Callback, CapsuleRegression, Dataset, Search, open_dataset
from scalelatent.errors import DataError, RunError, ScalelatentError

Arrays = tuple[np.ndarray, np.ndarray]


def _fit(*args: Any, **options: Any) -> CapsuleRegression:
    fit = {k: options.pop(k) for k in ("validation", "sample_weight", "callbacks", "engine") if k in options}
    return CapsuleRegression(**{"capsule_dim": 2, "max_iter": 3, "random_state": 0, **options}).fit(
        *args, **fit
    )


class RefusePasses(Callback):
    """Callback that fails the test when the first pass of EM ends."""

    def on_pass_end(self, record: dict[str, Any]) -> None:
        raise AssertionError("a pass was completed")


def make_containers(x: np.ndarray, y: np.ndarray | None, folder: Path) -> dict[str, tuple[Any, ...]]:
    np.save(folder / "x.npy", x)
    return {
        "numpy": (x, y),
        "memmap": (np.load(folder / "x.npy", mmap_mode="r"), y),
        "dask": (da.from_array(x, chunks=(100, 64)), y),
        "dataset": (Dataset.from_arrays(x, y),),
    }


# -- NaN and infinity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"projection": 10}, {"init": "random"}, {"architecture": "all_vs_all"}]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("container", ["numpy", "memmap", "dask", "dataset"])
def test_the_error_names_row_and_feature_of_a_pixel_that_is_not_finite(
    digits: Arrays, tmp_path: Path, container: str, bad: float, options: dict[str, Any]
) -> None:
    x = digits[0].astype("f4")
    x[417, 23] = bad
    with pytest.raises(ValueError, match="row 417, (feature|column) 23"):
        _fit(*make_containers(x, digits[1], tmp_path)[container], callbacks=[RefusePasses()], **options)


@pytest.mark.parametrize("container", ["numpy", "memmap", "dask", "dataset"])
@pytest.mark.parametrize("options", [{}, {"projection": 10}])
def test_the_error_names_bad_pixels_of_validation_rows(
    digits: Arrays, held_out: Arrays, tmp_path: Path, container: str, options: dict[str, Any]
) -> None:
    vx = held_out[0].astype("f4")
    vx[33, 7] = np.nan
    given: Any = make_containers(vx, held_out[1], tmp_path)[container]
    with pytest.raises(ValueError, match="row 33, (feature|column) 7"):
        validation = given[0] if container == "dataset" else given
        _fit(*digits, validation=validation, callbacks=[RefusePasses()], **options)


def test_rows_with_nan_cannot_be_stored(digits: Arrays, tmp_path: Path) -> None:
    x = digits[0].astype("f4")
    x[5, 5] = np.nan
    with pytest.raises(DataError, match="row 5, column 5 is nan"):
        Dataset.from_arrays(x, digits[1]).save(tmp_path / "ds")


@pytest.mark.parametrize("container", ["numpy", "memmap", "dask", "dataset"])
@pytest.mark.parametrize("value", [1e39, -1e60])
def test_the_error_names_values_beyond_float32(
    digits: Arrays, tmp_path: Path, container: str, value: float
) -> None:
    x = digits[0].astype("f8")
    x[3, 20] = value
    rows = make_containers(x, digits[1], tmp_path)[container]
    named = "row 3, feature 20"
    for algorithm in ("em", "stepwise"):
        with pytest.raises(DataError, match=f"beyond float32.*{named}|{named}.*beyond float32"):
            _fit(*rows, algorithm=algorithm)


def test_a_stream_continues_after_a_row_beyond_float32(digits: Arrays) -> None:
    x, y = digits[0].astype("f8"), digits[1]
    new = CapsuleRegression(capsule_dim=2, random_state=0)
    a, b = (clone(new).partial_fit(x[:300], y[:300], range(10)) for _ in range(2))
    bad = x[300:302].copy()
    bad[1, 5] = 1e39
    with pytest.raises(DataError, match=r"row 1, feature 5 is 1e\+39"):
        a.partial_fit(bad, y[300:302])
    for model in (a, b):
        model.partial_fit(x[302:400], y[302:400])
    np.testing.assert_array_equal(a.W_, b.W_)


# -- labels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["numpy", "memmap", "dask", "dataset", "stored"])
def test_a_fit_without_labels_is_refused(digits: Arrays, tmp_path: Path, container: str) -> None:
    rows = make_containers(digits[0], None, tmp_path) | {
        "stored": (Dataset.from_arrays(digits[0]).save(tmp_path / "ds"),)
    }
    with pytest.raises(ValueError, match="no labels|requires y to be passed") as raised:
        _fit(*rows[container])
    if container == "stored":
        assert str(tmp_path / "ds") in str(raised.value)
        assert "import the rows with their labels" in str(raised.value)


@pytest.mark.parametrize("container", ["numpy", "memmap", "dask", "dataset", "zarr"])
def test_fractional_labels_are_refused(digits: Arrays, tmp_path: Path, container: str) -> None:
    import zarr

    x, y = digits[0], digits[1] + 0.25
    rows: Any = {**make_containers(x, y, tmp_path), "zarr": (zarr.array(x), zarr.array(y))}
    with pytest.raises(ValueError, match="[Uu]nknown label type: continuous"):
        _fit(*rows[container], callbacks=[RefusePasses()])


def test_labels_in_a_dataset_and_in_y_are_refused(digits: Arrays) -> None:
    with pytest.raises(DataError, match="brings its own labels: leave y out"):
        _fit(Dataset.from_arrays(*digits), digits[1])


@pytest.mark.parametrize("container", ["numpy", "memmap", "dask"])
def test_labels_of_another_length_are_refused(digits: Arrays, tmp_path: Path, container: str) -> None:
    np.save(tmp_path / "x.npy", digits[0])
    x: Any = {
        "numpy": digits[0],
        "memmap": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "dask": da.from_array(digits[0]),
    }[container]
    with pytest.raises(ValueError, match="600.*590"):
        _fit(x, digits[1][:590])


def test_labels_of_one_class_are_refused(digits: Arrays) -> None:
    with pytest.raises(ValueError, match="at least 2 classes.*1"):
        _fit(digits[0], np.zeros(600, int))


@pytest.mark.parametrize("stored", [True, False])
def test_a_class_without_rows_in_a_slice_is_refused(digits: Arrays, tmp_path: Path, stored: bool) -> None:
    order = np.argsort(digits[1], kind="stable")
    ds = Dataset.from_arrays(digits[0][order], digits[1][order])
    if stored:
        ds = ds.save(tmp_path / "ds")
    with pytest.raises(DataError, match=r"class\(es\) 5, 6, 7, 8, 9 have no rows.*slice") as raised:
        _fit(ds[: int((digits[1] < 5).sum())], callbacks=[RefusePasses()])
    assert not stored or str(tmp_path / "ds") in str(raised.value)


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
def test_a_class_with_fewer_rows_than_capsule_dimensions_is_refused(
    digits: Arrays, architecture: str
) -> None:
    keep = (digits[1] != 7) | (np.cumsum(digits[1] == 7) <= 3)
    rows = digits[0][keep], digits[1][keep]
    with pytest.raises(
        DataError,
        match=r"class 7 has 3 rows, fewer than its capsule dimension 4: lower capsule_dim to 3.*'random'",
    ):
        _fit(*rows, capsule_dim=4, architecture=architecture, callbacks=[RefusePasses()])
    _fit(*rows, capsule_dim=3, architecture=architecture)
    _fit(*rows, capsule_dim=4, architecture=architecture, init="random")


def test_validation_labels_missing_in_the_training_rows_are_refused(digits: Arrays, held_out: Arrays) -> None:
    vy = held_out[1].copy()
    vy[150] = 77
    with pytest.raises(DataError, match="label of row 150 is 77"):
        _fit(*digits, validation=(held_out[0], vy), callbacks=[RefusePasses()])
    with pytest.raises(DataError, match="label of row 150 is 77"):
        _fit(*digits, validation=Dataset.from_arrays(held_out[0], vy), callbacks=[RefusePasses()])


def test_unknown_validation_labels_are_found_before_any_work(digits: Arrays, held_out: Arrays) -> None:
    class RefuseStages(Callback):
        def on_stage(self, info: dict[str, Any]) -> None:
            raise AssertionError(f"work started: {info}")

    with pytest.raises(DataError, match="77"):
        _fit(
            *digits,
            validation=(held_out[0], np.where(held_out[1] == 3, 77, held_out[1])),
            callbacks=[RefuseStages()],
        )


def test_validation_labels_of_another_type_are_refused(digits: Arrays, held_out: Arrays) -> None:
    with pytest.raises(DataError, match="do not fit the classes"):
        _fit(*digits, validation=(held_out[0], held_out[1].astype(str)))


@pytest.mark.parametrize("bad", [5, "validation.zarr", np.zeros((3, 64)), (1, 2, 3), []])
def test_invalid_validation_arguments_are_refused(digits: Arrays, bad: Any) -> None:
    with pytest.raises((DataError, ValueError), match=r"validation=.*Dataset or a pair"):
        _fit(*digits, validation=bad)


def test_validation_rows_without_labels_are_refused(digits: Arrays, held_out: Arrays, tmp_path: Path) -> None:
    ds = Dataset.from_arrays(held_out[0]).save(tmp_path / "v")
    with pytest.raises(DataError, match=r"validation \(.*/v\) has no labels"):
        _fit(*digits, validation=ds)
    with pytest.raises(DataError, match="validation has no labels"):
        _fit(*digits, validation=(held_out[0], None))


@pytest.mark.parametrize("container", ["pair", "dataset"])
def test_validation_rows_of_another_width_are_refused(
    digits: Arrays, held_out: Arrays, container: str
) -> None:
    given: Any = held_out[0][:, :60], held_out[1]
    with pytest.raises(ValueError, match="60 features.*64"):
        _fit(*digits, validation=given if container == "pair" else Dataset.from_arrays(*given))


def test_a_score_without_labels_is_refused(digits: Arrays) -> None:
    model = _fit(*digits)
    with pytest.raises(DataError, match="no labels to score against: pass y"):
        model.score(digits[0])
    with pytest.raises(DataError, match="no labels to score against"):
        model.score(Dataset.from_arrays(digits[0]))


@pytest.mark.parametrize("n", [599, 601])
def test_a_score_with_labels_of_another_length_is_refused(digits: Arrays, n: int) -> None:
    model = _fit(*digits)
    with pytest.raises(ValueError, match=f"600.*{n}|{n}.*600"):
        model.score(digits[0], np.zeros(n, int))


# -- weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones(599), "599|shape"),
        (np.full(600, -1.0), "[Nn]egative|>= 0"),
        (np.full(600, np.nan), "NaN|nan"),
        (np.ones((600, 2)), "1D|shape"),
    ],
)
@pytest.mark.parametrize("container", ["numpy", "dataset"])
def test_invalid_weights_are_refused(
    digits: Arrays, weight: np.ndarray, message: str, container: str
) -> None:
    args = digits if container == "numpy" else (Dataset.from_arrays(*digits),)
    with pytest.raises(ValueError, match=message):
        _fit(*args, sample_weight=weight)


def test_the_error_names_a_class_of_weight_zero(digits: Arrays) -> None:
    weight = (digits[1] != 4).astype(float)
    with pytest.raises(DataError, match=r"class.*4.* have no weight.*above 0"):
        _fit(*digits, sample_weight=weight, callbacks=[RefusePasses()])
    with pytest.raises(ValueError, match=r"class_weight=\{4: 0.0\}.*above 0"):
        _fit(*digits, class_weight={4: 0.0}, callbacks=[RefusePasses()])


# -- datasets that are damaged during the fit ----------------------------------------------------------------


class DamageShard(Callback):
    """Callback that removes or damages the file of a shard after pass 2."""

    def __init__(self, path: Path, how: str) -> None:
        self.path, self.how = path, how
        self.content = path.read_bytes()

    def on_pass_end(self, record: dict[str, Any]) -> None:
        if record["pass"] == 2:
            self.path.unlink()
            if self.how == "corrupted":
                self.path.write_bytes(self.content[:-30] + bytes(30))
            elif self.how == "flipped":
                self.path.write_bytes(bytes([self.content[0] ^ 1]) + self.content[1:])


@pytest.mark.parametrize("how", ["removed", "corrupted", "flipped"])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_fit_resumes_after_a_shard_was_damaged_and_restored(
    digits: Arrays, tmp_path: Path, how: str, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scalelatent.engine import cache, inprocess

    monkeypatch.setattr(inprocess, "shared_cache", lambda *_: cache.PieceCache(0))
    ds = Dataset.from_arrays(*digits).save(tmp_path / "ds", chunk_rows=50, shard_rows=200)
    shard = tmp_path / "ds" / "x" / "c" / "1" / "0"
    options: dict[str, Any] = {"capsule_dim": 2, "max_iter": 5, "random_state": 0, "n_jobs": jobs}
    whole = CapsuleRegression(**options).fit(ds)
    damage = DamageShard(shard, how)
    with pytest.raises(
        DataError, match=r"shard file .*x/c/1/0 \(rows 200:400 of 'x'\).*Restore that file"
    ) as raised:
        CapsuleRegression(**options).fit(ds, run_dir=tmp_path / "run", callbacks=[damage])
    assert str(tmp_path / "ds") in str(raised.value)
    shard.write_bytes(damage.content)
    passes: list[int] = []

    class Count(Callback):
        def on_pass_end(self, record: dict[str, Any]) -> None:
            passes.append(record["pass"])

    model = CapsuleRegression(**options).fit(
        open_dataset(tmp_path / "ds"), run_dir=tmp_path / "run", resume=True, callbacks=[Count()]
    )
    np.testing.assert_array_equal(model.W_, whole.W_)
    assert passes == [3, 4, 5]  # Passes 1 and 2 are not repeated.
    assert [r["pass"] for r in model.history_] == [1, 2, 3, 4, 5]


# -- engine options and callbacks ----------------------------------------------------------------------------


def test_the_error_names_unknown_engine_options(digits: Arrays) -> None:
    with pytest.raises(ValueError, match="unknown option.*block_row.*block_rows"):
        _fit(*digits, engine={"block_row": 3})
    with pytest.raises(ValueError, match="leaf_rows=50 is not a multiple of block_rows=32"):
        _fit(*digits, engine={"block_rows": 32, "leaf_rows": 50})


@pytest.mark.parametrize("given", [print, [print]])
def test_an_object_that_is_no_callback_is_refused(digits: Arrays, given: Any) -> None:
    with pytest.raises(TypeError, match=r"not a scalelatent Callback; .* derived from scalelatent\.Callback"):
        _fit(*digits, callbacks=given)


@pytest.mark.parametrize("given", ["capsule", CapsuleRegression, KNeighborsClassifier()])
def test_a_search_refuses_other_objects_than_estimators_of_the_package(digits: Arrays, given: Any) -> None:
    with pytest.raises(TypeError, match=r"estimator=.*: Search needs an estimator object of scalelatent"):
        Search(given, {"capsule_dim": [1]}).fit(*digits)


def test_errors_derive_from_the_packages_base_error() -> None:
    assert issubclass(DataError, ScalelatentError)
    assert issubclass(DataError, ValueError)
    assert issubclass(RunError, ScalelatentError)
