"""Capsule regression has the same bits for any container and number of threads, and uses row weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scalelatent as sl
from scalelatent import CapsuleRegression, Dataset

Arrays = tuple[np.ndarray, np.ndarray]


def make_model(**options: Any) -> CapsuleRegression:
    return CapsuleRegression(**{"capsule_dim": 2, "max_iter": 6, "random_state": 0, "n_jobs": 1, **options})


def write_memmap(x: np.ndarray, folder: Path) -> np.ndarray:
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r")


def write_zarr(x: np.ndarray, folder: Path) -> Any:
    import zarr

    array = zarr.create_array(
        store=str(folder / "x.zarr"), shape=x.shape, dtype=x.dtype, chunks=(77, x.shape[1])
    )
    array[...] = x
    return array


def make_dask(x: np.ndarray, folder: Path) -> Any:
    import dask.array as da

    return da.from_array(x, chunks=(130, 40))


CONTAINERS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "numpy": lambda x, folder: x,
    "fortran": lambda x, folder: np.asfortranarray(x),
    "strided": lambda x, folder: np.repeat(x, 2, axis=0)[::2],
    "read-only": lambda x, folder: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "big-endian": lambda x, folder: x.astype(x.dtype.newbyteorder(">")),
    "memmap": write_memmap,
    "zarr": write_zarr,
    "dask": make_dask,
}


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "i8"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_the_same_bits(
    digits: Arrays, tmp_path: Path, container: str, dtype: str
) -> None:
    x, y = digits[0].astype(dtype), digits[1]
    expected = make_model().fit(x, y)
    model = make_model().fit(CONTAINERS[container](x, tmp_path), y)
    np.testing.assert_array_equal(model.W_, expected.W_)
    assert model.n_features_in_ == 64
    few = CONTAINERS[container](x[:50], tmp_path / "..") if container in ("fortran", "strided") else x[:50]
    np.testing.assert_array_equal(model.predict(few), expected.predict(x[:50]))


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u2", "f2"])
def test_small_whole_numbers_of_any_type_give_the_same_bits(digits: Arrays, dtype: str) -> None:
    expected = make_model().fit(*digits)
    np.testing.assert_array_equal(make_model().fit(digits[0].astype(dtype), digits[1]).W_, expected.W_)
    np.testing.assert_array_equal(make_model().fit(digits[0].tolist(), digits[1].tolist()).W_, expected.W_)


@pytest.mark.parametrize("where", ["memory", "stored", "sliced", "chunks", "store in memory"])
def test_datasets_give_the_same_bits(digits: Arrays, tmp_path: Path, where: str) -> None:
    x, y = digits
    expected = make_model().fit(x, y)
    if where == "memory":
        ds = Dataset.from_arrays(x, y)
    elif where == "store in memory":
        ds = Dataset.from_arrays(x, y).save("memory://inputs", overwrite=True)
    elif where == "sliced":
        padded = np.concatenate([x[:7], x, x[:9]]), np.concatenate([y[:7], y, y[:9]])
        ds = Dataset.from_arrays(*padded).save(tmp_path / "ds", chunk_rows=50)[7:-9]
    else:
        ds = Dataset.from_arrays(x, y).save(tmp_path / "ds", chunk_rows=37 if where == "chunks" else None)
    model = make_model().fit(ds)
    np.testing.assert_array_equal(model.W_, expected.W_)
    assert model.score(ds) == expected.score(x, y)


def test_images_are_flattened_to_rows(digits: Arrays) -> None:
    images = Dataset.from_arrays(digits[0].reshape(-1, 8, 8), digits[1])
    model = make_model().fit(images)
    np.testing.assert_array_equal(model.W_, make_model().fit(*digits).W_)
    np.testing.assert_array_equal(model.predict(images), model.predict(digits[0]))


NAMES = {
    "strings": np.array([f"digit {i}" for i in range(10)]),
    "objects": np.array([f"digit {i}" for i in range(10)], dtype=object),
    "gaps": np.array([-5, 0, 3, 7, 100, 101, 4000, 10**6, 10**9, 10**12]),
    "small": np.arange(10, dtype="u1"),
    "floats": np.arange(10) * 2.0,
}


@pytest.mark.parametrize("kind", NAMES)
def test_labels_of_any_type_are_classes(digits: Arrays, tmp_path: Path, kind: str) -> None:
    x, y = digits
    names = NAMES[kind]
    expected = make_model().fit(x, y)
    rows = [(x, names[y]), (Dataset.from_arrays(x, names[y]).save(tmp_path / "ds"), None)]
    for row in rows:
        model = make_model().fit(*row)
        np.testing.assert_array_equal(model.W_, expected.W_)
        assert model.classes_.tolist() == sorted(names.tolist())
        np.testing.assert_array_equal(model.predict(x), names[expected.predict(x)])
        assert model.score(x, names[y]) == expected.score(x, y)


def test_boolean_labels_are_two_classes(digits: Arrays) -> None:
    x, y = digits[0], digits[1] > 4
    model = make_model().fit(x, y)
    assert model.classes_.tolist() == [False, True]
    assert model.predict(x).dtype == bool


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
@pytest.mark.parametrize("jobs", [2, 3, None])
def test_any_number_of_threads_gives_the_same_bits(
    digits: Arrays, architecture: str, jobs: int | None
) -> None:
    engine = {"block_rows": 32, "leaf_rows": 32}
    one, many = (
        make_model(architecture=architecture, n_jobs=n).fit(*digits, engine=engine) for n in (1, jobs)
    )
    np.testing.assert_array_equal(many.W_, one.W_)
    assert [r["objective"] for r in many.history_] == [r["objective"] for r in one.history_]


# -- weights -------------------------------------------------------------------------------------------------


def assert_close(a: CapsuleRegression, b: CapsuleRegression, x: np.ndarray) -> None:
    # The two fits divide the rows into different blocks (row ranges of one product). So float32 products
    # differ in their last bits (6e-8), and the differences add up over six passes.
    np.testing.assert_allclose(a.predict_proba(x), b.predict_proba(x), atol=2e-4)
    assert a.history_[-1]["objective"] == pytest.approx(b.history_[-1]["objective"], rel=1e-5)
    assert a.history_[-1]["train_error"] == pytest.approx(b.history_[-1]["train_error"], abs=1e-2)


@pytest.mark.parametrize(
    "options", [{}, {"projection": 20}, {"architecture": "all_vs_all"}, {"nu_schedule": None}]
)
def test_a_weight_equals_a_repetition_of_the_row(digits: Arrays, options: dict[str, Any]) -> None:
    x, y = digits
    times = np.random.Generator(np.random.Philox(1)).integers(0, 4, len(x))
    repeated = make_model(**options).fit(x.repeat(times, axis=0), y.repeat(times))
    weighted = make_model(**options).fit(x, y, sample_weight=times)
    if options.get("projection") is None:
        assert_close(weighted, repeated, x)
    else:  # With a projection, only the scores are compared.
        assert weighted.score(x, y) == pytest.approx(repeated.score(x, y), abs=0.03)


@pytest.mark.parametrize(("options", "weight"), [({"ridge": 0}, 2.0), ({"ridge": 0}, 0.5), ({}, 0.5)])
def test_equal_weights_do_not_change_the_fit(digits: Arrays, options: dict[str, Any], weight: float) -> None:
    """Without a ridge (a penalty), equal weights change nothing.

    The default ridge counts like one row: weights of 2 would halve its share, but weights of 0.5 keep it.
    """
    x, y = digits
    weighted = make_model(**options).fit(x, y, sample_weight=np.full(len(x), weight))
    assert_close(weighted, make_model(**options).fit(x, y), x)


def test_weights_of_a_dataset_are_used(digits: Arrays, tmp_path: Path) -> None:
    x, y = digits
    weight = np.random.Generator(np.random.Philox(1)).uniform(0.2, 3, len(x))
    expected = make_model().fit(x, y, sample_weight=weight)
    given = Dataset.from_arrays(x, y, sample_weight=weight)
    for ds in (
        given,
        given.save(tmp_path / "ds"),
        Dataset.from_arrays(x, y).save(tmp_path / "two").with_weight(weight),
    ):
        np.testing.assert_array_equal(make_model().fit(ds).W_, expected.W_)
    np.testing.assert_array_equal(
        make_model().fit(Dataset.from_arrays(x, y), sample_weight=weight).W_, expected.W_
    )
    assert not np.array_equal(make_model().fit(x, y).W_, expected.W_)
    assert expected.score(given) == pytest.approx(expected.score(x, y, sample_weight=weight))
    hit = expected.predict(x) == y
    assert expected.score(given) == pytest.approx((hit * weight).sum() / weight.sum())


def test_class_weight_equals_row_weights(digits: Arrays) -> None:
    x, y = digits
    factors = dict(enumerate(np.linspace(0.5, 4, 10)))
    by_row = make_model().fit(x, y, sample_weight=np.array([factors[c] for c in y]))
    assert_close(make_model(class_weight=factors).fit(x, y), by_row, x)
    counts = np.bincount(y)
    balanced = {c: len(y) / (10 * counts[c]) for c in range(10)}
    assert_close(
        make_model(class_weight="balanced").fit(x, y), make_model(class_weight=balanced).fit(x, y), x
    )
    assert not np.array_equal(make_model(class_weight={3: 9.0}).fit(x, y).W_, make_model().fit(x, y).W_)


def test_a_class_of_larger_weight_has_fewer_errors(digits: Arrays, held_out: Arrays) -> None:
    def recall(model: CapsuleRegression) -> float:
        return float((model.predict(held_out[0]) == held_out[1])[held_out[1] == 8].mean())

    light = CapsuleRegression(capsule_dim=1, max_iter=30, class_weight={8: 0.01}).fit(*digits)
    heavy = CapsuleRegression(capsule_dim=1, max_iter=30, class_weight={8: 100.0}).fit(*digits)
    assert recall(heavy) > recall(light)


# -- validation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["pair", "dataset", "stored", "lists", "memmap"])
def test_validation_rows_in_any_container_give_the_same_bits(
    digits: Arrays, held_out: Arrays, tmp_path: Path, container: str
) -> None:
    vx, vy = held_out
    given: Any = {
        "pair": lambda: (vx, vy),
        "dataset": lambda: Dataset.from_arrays(vx, vy),
        "stored": lambda: Dataset.from_arrays(vx, vy).save(tmp_path / "v", chunk_rows=41),
        "lists": lambda: [vx.tolist(), vy.tolist()],
        "memmap": lambda: (write_memmap(vx, tmp_path), vy),
    }[container]()
    expected = make_model(max_iter=30).fit(*digits, validation=(vx, vy))
    model = make_model(max_iter=30).fit(*digits, validation=given)
    np.testing.assert_array_equal(model.W_, expected.W_)
    assert model.best_validation_error_ == expected.best_validation_error_
    assert model.history_[-1]["validation_error"] is not None
    assert model.history_[-1]["rows"] == 900


def test_the_best_model_on_validation_is_kept(digits: Arrays, held_out: Arrays) -> None:
    model = make_model(max_iter=40, nu_schedule=[(0.5, 5), (0.0, 5)]).fit(*digits, validation=held_out)
    best = min(r["validation_error"] for r in model.history_)
    assert model.best_validation_error_ == best
    assert 1 - model.score(*held_out) == pytest.approx(best, abs=1e-12)


def test_without_validation_the_training_error_is_watched(digits: Arrays) -> None:
    schedule = [(0.5, 5), (0.0, 5)]
    model = make_model(architecture="multiclass", max_iter=40, nu_schedule=schedule).fit(*digits)
    assert model.best_validation_error_ is None
    assert 1 - model.score(*digits) == pytest.approx(min(r["train_error"] for r in model.history_), abs=1e-12)


@pytest.mark.parametrize("architecture", ["one_vs_all", "all_vs_all"])
@pytest.mark.parametrize("projection", [None, 16])
def test_an_ensemble_reports_the_error_of_its_joint_decision(
    digits: Arrays, held_out: Arrays, architecture: str, projection: int | None
) -> None:
    weight = np.random.Generator(np.random.Philox(2)).uniform(0.1, 5, len(held_out[0]))
    held = Dataset.from_arrays(*held_out, sample_weight=weight)
    options = {"architecture": architecture, "projection": projection, "capsule_dim": 2}
    model = make_model(max_iter=18, nu_schedule=[(0.0, 30)], **options).fit(*digits, validation=held)
    own = 1 - model.score(*held_out, sample_weight=weight)
    assert model.best_validation_error_ == pytest.approx(own, abs=1e-12)
    # A member (a model of two classes or groups of classes) has an easier task, so its error is smaller.
    assert 0 < model.mean_member_validation_error_ < own / 2
    assert all(r["train_error"] is None and r["mean_member_train_error"] >= 0 for r in model.history_)
    members = [r["mean_member_validation_error"] for r in model.history_]
    errors = [r["validation_error"] for r in model.history_]
    assert min(members) >= model.mean_member_validation_error_
    # The error is measured in passes 1 to 8 and in every eighth pass; other passes repeat the last error.
    measured = [n for n in range(1, 18) if errors[n] != errors[n - 1]]
    assert len(measured) > 3
    assert all(n < 8 or (n + 1) % 8 == 0 for n in measured)


def test_the_joint_decision_of_an_ensemble_is_measured_during_the_fit(
    digits: Arrays, held_out: Arrays
) -> None:
    model = make_model(max_iter=3, architecture="one_vs_all", nu_schedule=None).fit(
        *digits, validation=held_out
    )
    errors = [r["validation_error"] for r in model.history_]
    # Pass n measures the error before it updates the weights, so ``errors[n]`` (pass n + 1) is the error
    # after n passes.
    for passes in (1, 2):
        plain = make_model(max_iter=passes, architecture="one_vs_all", nu_schedule=None).fit(*digits)
        assert errors[passes] == pytest.approx(1 - plain.score(*held_out), abs=1e-12)


@pytest.mark.parametrize("algorithm", ["em", "stepwise"])
@pytest.mark.parametrize("architecture", ["one_vs_all", "all_vs_all"])
def test_an_ensemble_keeps_the_weights_of_its_best_pass(
    digits: Arrays, held_out: Arrays, architecture: str, algorithm: str
) -> None:
    """Each member (a model of two classes or groups) has its own best pass.

    Weights from different passes may together decide worse than the weights of a single pass.
    """
    options = {"capsule_dim": 1, "algorithm": algorithm, "n_epochs": 20, "batch_rows": 64}
    model = make_model(max_iter=30, architecture=architecture, nu_schedule=[(0.5, 20)], **options)
    model.fit(digits[0][:150], digits[1][:150], validation=held_out)
    best = min(record["validation_error"] for record in model.history_)
    assert model.best_validation_error_ <= best
    assert 1 - model.score(*held_out) == pytest.approx(model.best_validation_error_, abs=1e-12)


def test_validation_may_lack_classes(digits: Arrays, held_out: Arrays) -> None:
    few = held_out[1] < 4
    model = make_model().fit(*digits, validation=(held_out[0][few], held_out[1][few]))
    assert 0 <= model.best_validation_error_ < 0.5


def test_weights_of_validation_rows_are_used(digits: Arrays, held_out: Arrays) -> None:
    weight = np.random.Generator(np.random.Philox(1)).uniform(0.1, 5, len(held_out[0]))
    model = make_model(max_iter=10).fit(
        *digits, validation=Dataset.from_arrays(*held_out, sample_weight=weight)
    )
    assert 1 - model.score(*held_out, sample_weight=weight) == pytest.approx(
        model.best_validation_error_, abs=1e-12
    )


def test_public_names_are_listed() -> None:
    assert sl.CapsuleRegression is CapsuleRegression
    assert {"Callback", "CapsuleRegression", "Dataset", "cluster", "load_model", "open_dataset"} <= set(
        dir(sl)
    )
