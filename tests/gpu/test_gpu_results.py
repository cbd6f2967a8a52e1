"""Results for rows on a GPU are CuPy arrays (here, of the stand-in), if the model computes on the GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.errors import DataError, RunError

RNG = np.random.default_rng(0)
X = RNG.random((40, 9)).astype("f4")
Y = np.arange(40) % 3
BITS = (X > 0.5).astype("u1")
SMALL = {"random_state": 0, "n_jobs": 1, "device": "cpu"}


def make_capsule():
    return sl.CapsuleRegression(capsule_dim=2, max_iter=2, **SMALL).fit(X, Y)


def make_mixture():
    return sl.LinearMixture(n_components=2, n_dims=1, max_iter=2, **SMALL).fit(X)


def make_mixture_classifier():
    return sl.LinearMixtureClassifier(n_components=1, n_dims=1, max_iter=2, **SMALL).fit(X, Y)


def make_network():
    return sl.MultilayerBootstrapNetwork(n_clusterings=8, n_components=2, **SMALL).fit(X)


def make_rbm():
    return sl.ConditionalRBM(n_hidden=3, n_sweeps=2, n_epochs=1, **SMALL).fit(X, BITS)


def make_compositional():
    layers = [(2, 2)]
    return sl.HierarchicalCompositionalNetwork(layers, n_epochs=1, **SMALL).fit(BITS.reshape(40, 3, 3))


# For each model: the function that fits it, the folder of its gpu.cu, its rows, and the methods to compare.
CASES = {
    "capsule": (make_capsule, "capsule", X, ("predict", "predict_proba", "transform")),
    "mixture": (
        make_mixture,
        "linear_mixture",
        X,
        ("predict", "predict_proba", "score_samples", "encode", "reconstruct", "transform"),
    ),
    "mixture classifier": (
        make_mixture_classifier,
        "linear_mixture",
        X,
        ("predict", "predict_proba", "decision_function", "confidence", "reconstruct"),
    ),
    "bootstrap network": (make_network, "mbn", X, ("transform", "codes", "fit_transform")),
    "conditional RBM": (make_rbm, "crbm", X, ("predict", "predict_marginals", "transform")),
    "compositional network": (
        make_compositional,
        "hcn",
        BITS.reshape(40, 3, 3),
        ("transform", "reconstruct"),
    ),
}


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", CASES)
def test_results_follow_the_rows(fake, emulate, name):
    make, text, rows, methods = CASES[name]
    fake.RawModule.library = emulate(text)
    model = make().set_params(device="gpu")
    for method in methods:
        expected = as_tuple(getattr(model, method)(rows))
        found = as_tuple(getattr(model, method)(fake.asarray(rows)))
        for one, other in zip(expected, found, strict=True):
            assert type(one) is np.ndarray, method
            assert isinstance(other, fake.ndarray), method
            assert other.dtype == one.dtype
            np.testing.assert_array_equal(other.get(), one)
    by_name = getattr(model, methods[0])(X=fake.asarray(rows))
    assert isinstance(by_name, fake.ndarray)


def test_energies_follow_the_rows(fake, emulate):
    fake.RawModule.library = emulate("crbm")
    model = make_rbm().set_params(device="gpu")
    found = model.free_energy(fake.asarray(X), fake.asarray(BITS))
    np.testing.assert_array_equal(found.get(), model.free_energy(X, BITS))


def test_labels_that_are_strings_stay_on_the_host(fake):
    names = np.array(["a", "b", "c"])[Y]
    model = sl.CapsuleRegression(capsule_dim=2, max_iter=2, **SMALL).fit(X, names).set_params(device="gpu")
    found = model.predict(fake.asarray(X))
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, model.predict(X))
    assert isinstance(model.predict_proba(fake.asarray(X)), fake.ndarray)
    assert model.score(fake.asarray(X), names) == model.score(X, names)


def test_frames_and_datasets_keep_their_kind(fake, tmp_path):
    pandas = pytest.importorskip("pandas")  # The GPU machine may lack pandas.
    model = make_capsule().set_params(device="gpu")
    written = model.transform(fake.asarray(X), out=tmp_path / "latents.zarr")
    assert isinstance(written, sl.Dataset)
    framed = model.set_output(transform="pandas").transform(fake.asarray(X))
    assert isinstance(framed, pandas.DataFrame)
    np.testing.assert_array_equal(framed.to_numpy(), written.read_x(0, 40))


def test_results_are_on_the_gpu_of_the_rows(fake, monkeypatch):
    monkeypatch.setattr(fake.Device, "count", 2)
    model = make_capsule().set_params(device="gpu")
    with fake.Device(1):
        rows = fake.asarray(X)
    found = model.predict_proba(rows)
    assert (found.device.id, fake.Device().id) == (1, 0)


class Tensor:
    """Stand-in for a CUDA tensor of torch."""

    is_cuda, device, __module__ = True, SimpleNamespace(index=0), "torch"

    def __init__(self, a):
        self.numpy = lambda: a

    def detach(self):
        return self

    cpu = detach


class DataFrame:
    """Stand-in for a frame of cuDF."""

    __module__ = "cudf"

    def __init__(self, a):
        self.a = a

    def to_pandas(self):
        import pandas  # The GPU machine may lack pandas.

        return pandas.DataFrame(self.a, columns=[f"c{i}" for i in range(self.a.shape[1])])


def test_tensors_and_frames_on_a_gpu_give_cupy_arrays(fake, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    cudf = SimpleNamespace(DataFrame=DataFrame, Series=type("Series", (), {}))
    monkeypatch.setitem(sys.modules, "cudf", cudf)
    model = make_capsule().set_params(device="gpu")
    expected = model.predict_proba(X)
    for rows in (Tensor(X), DataFrame(X)):
        found = model.predict_proba(rows)
        assert isinstance(found, fake.ndarray)
        np.testing.assert_array_equal(found.get(), expected)
    monkeypatch.setattr(Tensor, "is_cuda", False)
    assert type(model.predict_proba(Tensor(X))) is np.ndarray


def test_a_model_without_a_gpu_refuses_rows_on_a_gpu(fake, monkeypatch):
    model = make_capsule()
    message = (
        r"X is a \S*ndarray on a GPU, but CapsuleRegression has device='cpu' .*set_params\(device='auto'\)"
    )
    with pytest.raises(DataError, match=message):
        model.predict(fake.asarray(X))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    monkeypatch.setattr(fake.Device, "count", 0)  # Now torch finds a GPU, but CuPy finds none.
    with pytest.raises(DataError, match=r"X is a torch.Tensor on a GPU, but CuPy finds no GPU .*extra"):
        model.set_params(device="auto").transform(Tensor(X))
    with pytest.raises(RunError, match="device='gpu', but CuPy finds no CUDA device"):
        model.set_params(device="gpu").transform(Tensor(X))
