"""Saved models are complete, contain no pickle, and are the same for equal fits."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import CapsuleRegression, CompressiveMBN, load_model
from scalelatent.contract.kinds import load_own_kinds
from scalelatent.errors import DataError
from tests.helpers import refuse_pickle

Arrays = tuple[np.ndarray, np.ndarray]
NAMES = np.array(list("abcdefghij"))

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"capsule_dim": 2},
    "projected": {"capsule_dim": np.int64(3), "projection": 12},
    "pairs": {"architecture": "all_vs_all", "capsule_dim": 1, "momentum": np.float32(0.5)},
    "rest": {"architecture": "one_vs_all", "capsule_dim": 1, "nu_schedule": [(0.5, 3), (0.0, 2)]},
    "unequal": {"capsule_dim": [1, 2, 3, 1, 2, 3, 1, 2, 3, 4]},
    "array of dimensions": {"capsule_dim": np.arange(1, 11)},
    "weighted": {
        "class_weight": {0: 2.0, 3: 0.5},
        "random_state": np.random.default_rng(3),
        "init": "random",
    },
    "balanced": {"class_weight": "balanced", "nu_schedule": None, "tol": 1e-3, "ridge": 2.0},
}


def _fit(digits: Arrays, variant: str, labels: Any = None) -> CapsuleRegression:
    y = digits[1] if labels is None else labels[digits[1]]
    return CapsuleRegression(**{"max_iter": 4, "random_state": 5, **VARIANTS[variant]}).fit(digits[0], y)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_model_predicts_the_same(digits: Arrays, tmp_path: Path, variant: str) -> None:
    model = _fit(digits, variant)
    assert model.save(tmp_path / "m.zarr") is None
    other = load_model(tmp_path / "m.zarr")
    assert type(other) is CapsuleRegression
    for name in ("W_", "classes_", "capsule_dims_", "projection_"):
        a, b = getattr(model, name), getattr(other, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(a, b)
    for name in (
        "n_iter_",
        "n_features_in_",
        "seed_",
        "best_validation_error_",
        "mean_member_validation_error_",
    ):
        assert getattr(model, name) == getattr(other, name)
    for method in ("predict", "predict_proba", "transform"):
        np.testing.assert_array_equal(getattr(model, method)(digits[0]), getattr(other, method)(digits[0]))
    assert other.score(*digits) == model.score(*digits)
    before, after = model.get_params(), other.get_params()
    assert set(before) == set(after)
    for name in set(before) - {"random_state", "capsule_dim", "nu_schedule"}:
        assert before[name] == after[name], name
    # A loaded model can be fitted again, with the same bits.
    again = other.set_params(random_state=model.seed_).fit(*digits)
    np.testing.assert_array_equal(again.W_, model.W_)


@pytest.mark.parametrize(
    "labels", [NAMES, NAMES.astype(object), np.arange(10) * 2.0, np.arange(10, dtype="u1")]
)
def test_labels_keep_their_values(digits: Arrays, tmp_path: Path, labels: np.ndarray) -> None:
    model = _fit(digits, "plain", labels)
    model.save(tmp_path / "m.zarr")
    other = load_model(tmp_path / "m.zarr")
    assert other.classes_.tolist() == model.classes_.tolist()
    np.testing.assert_array_equal(other.predict(digits[0]), model.predict(digits[0]))


def test_boolean_labels_are_saved(digits: Arrays, tmp_path: Path) -> None:
    CapsuleRegression(max_iter=2, capsule_dim=1).fit(digits[0], digits[1] > 4).save(tmp_path / "m")
    assert load_model(tmp_path / "m").classes_.tolist() == [False, True]


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_saves_give_the_same_files(
    digits: Arrays, tmp_path: Path, read_files_of: Callable[[Path], dict[str, bytes]], variant: str
) -> None:
    model = _fit(digits, variant)
    model.save(tmp_path / "a")
    model.save(tmp_path / "b")
    load_model(tmp_path / "a").save(tmp_path / "c")
    assert read_files_of(tmp_path / "a") == read_files_of(tmp_path / "b")
    assert read_files_of(tmp_path / "a") == read_files_of(tmp_path / "c")


def test_two_equal_fits_give_the_same_files(
    digits: Arrays, tmp_path: Path, read_files_of: Callable[[Path], dict[str, bytes]]
) -> None:
    """A saved model contains no time, host name or number of threads."""
    for name, jobs in (("a", 1), ("b", 3)):
        model = CapsuleRegression(capsule_dim=2, max_iter=4, random_state=5, n_jobs=jobs).fit(*digits)
        model.set_params(n_jobs=None).save(tmp_path / name)
    assert read_files_of(tmp_path / "a") == read_files_of(tmp_path / "b")


def test_models_are_saved_and_loaded_without_pickle(
    digits: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _fit(digits, "plain", NAMES)
    small = CompressiveMBN(hidden=(2,))
    # A fit needs PyTorch, so the test sets the attributes of a fitted network.
    small.coefs_ = [np.ones((64, 2), np.float32), np.eye(2, dtype=np.float32)]
    small.intercepts_ = [np.zeros(2, np.float32), np.arange(2, dtype=np.float32)]
    small.n_iter_, small.n_features_in_, small.seed_ = 3, 64, 5
    refuse_pickle(monkeypatch)
    model.save(tmp_path / "m")
    assert load_model(tmp_path / "m").score(digits[0], NAMES[digits[1]]) > 0.5
    small.save(tmp_path / "small")
    np.testing.assert_array_equal(
        load_model(tmp_path / "small").transform(digits[0]), small.transform(digits[0])
    )


def test_an_existing_output_is_not_overwritten(
    digits: Arrays, tmp_path: Path, read_files_of: Callable[[Path], dict[str, bytes]]
) -> None:
    _fit(digits, "plain").save(tmp_path / "m")
    before = read_files_of(tmp_path / "m")
    other = _fit(digits, "pairs")
    with pytest.raises(DataError, match="m exists: choose another path, or pass overwrite=True"):
        other.save(tmp_path / "m")
    assert read_files_of(tmp_path / "m") == before
    other.save(tmp_path / "m", overwrite=True)
    assert load_model(tmp_path / "m").architecture == "all_vs_all"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_keeps_the_earlier_model(
    digits: Arrays,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read_files_of: Callable[[Path], dict[str, bytes]],
) -> None:
    _fit(digits, "plain").save(tmp_path / "m")
    before = read_files_of(tmp_path / "m")

    def raise_disk_full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    import zarr

    monkeypatch.setattr(zarr.Group, "create_array", raise_disk_full)
    with pytest.raises(DataError, match=r"cannot write the model .*m: .*No space left.*free some space"):
        _fit(digits, "pairs").save(tmp_path / "m", overwrite=True)
    assert read_files_of(tmp_path / "m") == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("content", ["text", "dataset", "group", "nothing"])
def test_files_that_are_not_a_model_are_not_replaced(digits: Arrays, tmp_path: Path, content: str) -> None:
    import zarr

    from scalelatent.data import Dataset

    folder = tmp_path / "results"
    folder.mkdir()
    if content == "dataset":
        Dataset.from_arrays(*digits).save(folder)
    elif content == "group":
        zarr.save(str(folder), a=np.ones(3))
    elif content == "text":
        (folder / "thesis.txt").write_text("years of work")
    before = sorted(p for p in folder.rglob("*") if p.is_file())
    if content == "nothing":
        _fit(digits, "plain").save(folder, overwrite=True)
        return
    with pytest.raises(DataError, match="results exists and is not a saved model, so it is not replaced"):
        _fit(digits, "plain").save(folder, overwrite=True)
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == before


def test_an_incomplete_model_is_replaced(
    digits: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object stores cannot rename files, so a killed `save` leaves an incomplete model in the store."""
    import zarr

    from scalelatent.storage.disk import locate

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(zarr.Group, "update_attributes", killed)
        # A killed process cannot delete its files, so ``clear`` must not delete them here.
        patch.setattr(type(locate("memory://m")), "clear", lambda self, **_: None)
        with pytest.raises(Killed):
            _fit(digits, "plain").save("memory://killed")
    assert not locate("memory://killed").is_empty()
    with pytest.raises(DataError, match="it was not finished: save it again"):
        load_model("memory://killed")
    _fit(digits, "plain").save("memory://killed", overwrite=True)
    assert load_model("memory://killed").n_iter_ == 4


def test_parent_folders_are_created(digits: Arrays, tmp_path: Path) -> None:
    _fit(digits, "plain").save(str(tmp_path / "a" / "b" / "m.zarr"))
    assert load_model(str(tmp_path / "a" / "b" / "m.zarr")).n_iter_ == 4


def test_a_run_folder_can_be_loaded_as_its_model(digits: Arrays, tmp_path: Path) -> None:
    _fit(digits, "plain").save(tmp_path / "run" / "model.zarr")
    assert load_model(tmp_path / "run").n_iter_ == 4


@pytest.mark.parametrize("content", ["missing", "empty", "a file"])
def test_the_error_names_a_path_that_is_not_a_model(digits: Arrays, tmp_path: Path, content: str) -> None:
    path = tmp_path / "m"
    if content == "empty":
        path.mkdir()
    elif content == "a file":
        path.write_text("model")
    with pytest.raises(DataError, match=str(path)):
        load_model(path)


def test_every_kind_of_model_is_registered() -> None:
    for name, kind in load_own_kinds().items():
        assert kind.estimator_class()._kind == name


def test_models_of_earlier_versions_load_the_mean_of_the_members(
    digits: Arrays, held_out: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CapsuleRegression(architecture="one_vs_all", capsule_dim=1, max_iter=3).fit(
        *digits, validation=held_out
    )
    values, arrays = model._to_saved()
    mean = values.pop("mean_member_validation_error")
    old = CapsuleRegression._from_saved(model.get_params(), values | {"best_validation_error": mean}, arrays)
    assert (old.best_validation_error_, old.mean_member_validation_error_) == (None, mean)
