"""A model that is saved at any kind of URL is complete or absent."""

from __future__ import annotations

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.errors import DataError
from scalelatent.storage.disk import locate

from .conftest import S3


@pytest.fixture(scope="module")
def model() -> sl.CapsuleRegression:
    x = np.random.default_rng(0).normal(size=(90, 5))
    return sl.CapsuleRegression(capsule_dim=2, max_iter=3, random_state=0).fit(x, np.arange(90) % 3)


def test_a_model_saved_at_any_url_predicts_the_same(any_url: str, model: sl.CapsuleRegression) -> None:
    model.save(any_url)
    np.testing.assert_array_equal(sl.load_model(any_url).W_, model.W_)
    with pytest.raises(DataError, match="exists: choose another path"):
        model.save(any_url)
    model.save(any_url, overwrite=True)
    np.testing.assert_array_equal(sl.load_model(any_url).W_, model.W_)
    store = locate(any_url)
    store.write("W/zarr.json", store.read("W/zarr.json").replace(b'"float', b'"floot'))  # type: ignore[union-attr]
    with pytest.raises(Exception, match=r"damaged|float|dtype|data type"):
        sl.load_model(any_url)


def test_the_digests_are_written_last(s3: S3, model: sl.CapsuleRegression) -> None:
    model.save(s3.at("m.zarr"))
    puts = [path for method, path, _ in s3.proxy.requests if method == "PUT"]
    assert puts[-1].endswith("/m.zarr/zarr.json")
    first = next(i for i, path in enumerate(puts) if path.endswith("/m.zarr/zarr.json"))
    # The first request writes a group without digests of the arrays, which does not count as a model.
    assert first == 0
    locate(s3.at("m.zarr")).write("zarr.json", b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(DataError, match="it was not finished: save it again"):
        sl.load_model(s3.at("m.zarr"))


def test_an_interrupted_save_leaves_no_model(s3: S3, model: sl.CapsuleRegression) -> None:
    puts = 0

    def third_put(method: str, path: str) -> bool:
        nonlocal puts
        puts += method == "PUT"
        return method == "PUT" and puts == 3

    with s3.proxy.denying(third_put), pytest.raises(DataError, match=r"cannot write the model s3://.*denied"):
        model.save(s3.at("m.zarr"))
    assert locate(s3.at("m.zarr")).is_empty()
    with pytest.raises(DataError, match="does not exist; give a folder that `save` wrote"):
        sl.load_model(s3.at("m.zarr"))


def test_a_lost_chunk_is_reported(s3: S3, model: sl.CapsuleRegression) -> None:
    model.save(s3.at("m.zarr"))
    store = locate(s3.at("m.zarr"))
    chunk = next(k for k in store.all_keys() if k.startswith("W/c/"))  # type: ignore[attr-defined]
    store.delete(chunk)
    with pytest.raises(DataError, match="its array 'W' is not the one that was saved"):
        sl.load_model(s3.at("m.zarr"))
