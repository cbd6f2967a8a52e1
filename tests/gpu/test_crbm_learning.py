"""Every learner of conditional RBMs with the CUDA kernels and the stand-in for CuPy.

No host array meets a device array, and the parameters agree with those of a processor.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import scipy.sparse
from numpy.testing import assert_allclose

import scalelatent as sl
from scalelatent.models.crbm.model.negative_phases import LEARNERS

N_VISIBLE, ROWS = 9, 16


@pytest.fixture(scope="session")
def emulated(emulate):
    return emulate("crbm")


@pytest.fixture
def clustered(fake, monkeypatch):
    """Use thread-block clusters for these small graphs, too."""
    monkeypatch.setattr(importlib.import_module("scalelatent.models.crbm.kernels.gpu"), "CLUSTER_EDGES", 0)


def rows(sparse: bool = False):
    rng = np.random.default_rng(5)
    v = (rng.random((ROWS, N_VISIBLE)) < 0.4).astype(np.uint8)
    x = (v ^ (rng.random(v.shape) < 0.1)).astype(np.float32)
    return (scipy.sparse.csr_matrix(x) if sparse else x), v


def fits(x, v, **settings):
    """Return the models of both devices."""
    settings = {"n_hidden": 5, "n_sweeps": 3, "batch_size": 8, "n_epochs": 2, "learning_rate": 0.3} | settings
    return {
        device: sl.ConditionalRBM(device=device, n_jobs=1, random_state=0, **settings).fit(
            x, v, validation=(x[:8], v[:8])
        )
        for device in ("cpu", "gpu")
    }


def check_same(models, x) -> None:
    cpu, gpu = models["cpu"], models["gpu"]
    for name in ("W_", "Wvx_", "Whx_", "bv_", "bh_"):
        assert_allclose(getattr(gpu, name), getattr(cpu, name), rtol=0, atol=2e-5, err_msg=name)
    for ours, theirs in zip(gpu.history_, cpu.history_, strict=True):
        for key in ("objective", "train_error", "validation_error", "converged"):
            assert (ours[key] is None) == (theirs[key] is None)
            assert ours[key] is None or abs(ours[key] - theirs[key]) < 1e-4, key
    assert_allclose(gpu.predict_marginals(x), cpu.predict_marginals(x), rtol=0, atol=2e-5)


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_fit_on_the_gpu_equals_that_of_a_processor(fake, clustered, learner):
    x, v = rows()
    check_same(fits(x, v, learner=learner, momentum=0.5, weight_decay=0.01), x)
    if learner in ("mle-bp", "lssvm", "mssvm", "mle-mf"):
        assert any(name.endswith(("_kept", "_cluster")) for name, _ in fake.LAUNCHED)


@pytest.mark.parametrize("learner", ["mle-bp", "cd", "pcd"])
def test_local_steps_stay_on_the_gpu(fake, learner):
    """Each chain takes its own steps; parameters, updates and messages stay on the GPU."""
    x, v = rows()
    check_same(fits(x, v, learner=learner, n_chains=1, local_steps=2, momentum=0.5), x)


def test_sparse_rows_and_a_tolerance_give_the_same_fit(fake):
    x, v = rows(sparse=True)
    check_same(fits(x, v, learner="mle-bp", tol=1e-3, n_sweeps=6), x)


def test_a_plain_rbm_on_the_gpu_equals_that_of_a_processor(fake):
    _, v = rows()
    models = {}
    for device in ("cpu", "gpu"):
        model = sl.ConditionalRBM(
            n_hidden=4, learner="pcd", batch_size=8, n_epochs=2, n_jobs=1, random_state=0, device=device
        )
        models[device] = model.fit(None, v)
    assert_allclose(models["gpu"].W_, models["cpu"].W_, rtol=0, atol=2e-5)
    assert_allclose(models["gpu"].transform(v), models["cpu"].transform(v), rtol=0, atol=2e-5)


def test_every_inference_on_the_gpu_equals_that_of_a_processor(fake):
    x, v = rows()
    models = fits(x, v, learner="mle-bp")
    for how in ("sum-product", "mixed-product", "max-product", "mean-field"):
        found = {device: model.infer(x, inference=how) for device, model in models.items()}
        assert_allclose(found["gpu"].visible, found["cpu"].visible, rtol=0, atol=1e-4, err_msg=how)
