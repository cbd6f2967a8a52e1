"""All learners of conditional RBMs learn the same with CUDA kernels as on a processor, within 2e-5.

The stand-in for CuPy refuses operations that mix host and device arrays.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from numpy.testing import assert_allclose

import scalelatent as sl
from scalelatent.contract.block_requirements import Targets
from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import CupyBackend
from scalelatent.engine.chains import apply_step, run_chains
from scalelatent.errors import DivergenceError
from scalelatent.kernels.sparse_rows import CsrRows
from scalelatent.models.crbm.model.columns import ColumnUnits
from scalelatent.models.crbm.model.energy import CrbmShape
from scalelatent.models.crbm.model.negative_phases import LEARNERS
from scalelatent.models.crbm.model.online import CrbmLearner

N_VISIBLE, ROWS = 9, 16


@pytest.fixture(scope="session")
def emulated(emulate):
    return emulate("crbm")


@pytest.fixture
def clustered(fake, monkeypatch):
    """Use clusters of thread blocks for these small graphs, too, although a fit uses them for large ones."""
    monkeypatch.setattr(importlib.import_module("scalelatent.models.crbm.kernels.gpu"), "CLUSTER_EDGES", 0)


def rows(sparse: bool = False):
    rng = np.random.default_rng(5)
    v = (rng.random((ROWS, N_VISIBLE)) < 0.4).astype(np.uint8)
    x = (v ^ (rng.random(v.shape) < 0.1)).astype(np.float32)
    return (scipy.sparse.csr_matrix(x) if sparse else x), v


def fit_on_devices(x, v, **settings):
    """Fit a model on each device, and return the models by device."""
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
    check_same(fit_on_devices(x, v, learner=learner, momentum=0.5, weight_decay=0.01), x)
    if learner in ("mle-bp", "lssvm", "mssvm", "mle-mf"):
        assert any(name.endswith(("_kept", "_cluster")) for name, _ in fake.LAUNCHED)


@pytest.mark.parametrize("learner", ["mle-bp", "cd", "pcd"])
def test_local_steps_stay_on_the_gpu(fake, learner):
    """Each chain (part of a batch) takes its own steps; parameters, updates and messages stay on the GPU."""
    x, v = rows()
    check_same(fit_on_devices(x, v, learner=learner, n_chains=1, local_steps=2, momentum=0.5), x)


def test_sparse_rows_and_a_tolerance_give_the_same_fit(fake):
    x, v = rows(sparse=True)
    check_same(fit_on_devices(x, v, learner="mle-bp", tol=1e-3, n_sweeps=6), x)


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
    models = fit_on_devices(x, v, learner="mle-bp")
    for how in ("sum-product", "mixed-product", "max-product", "mean-field"):
        found = {device: model.infer(x, inference=how) for device, model in models.items()}
        assert_allclose(found["gpu"].visible, found["cpu"].visible, rtol=0, atol=1e-4, err_msg=how)


class Steps:
    """Learner, rows and state for steps on a GPU; each chain (part of a batch) has 8 rows, the last has 5."""

    def __init__(self, fake, learner: str, n_chains: int, x: int, sparse: bool = False, v: int = 9) -> None:
        shape, rng, rows = CrbmShape(v, 5, x), np.random.default_rng(0), 8 * n_chains
        options = {
            "rates": np.array([0.1]), "momentum": 0.0, "weight_decay": 0.0, "n_sweeps": 2, "tol": None,
            "gibbs_steps": 2, "n_chains": n_chains, "chain_rows": 8,
            "local_steps": 0, "seed": 3, "patience": 0, "has_validation": False, "targets": Targets(),
            "validation_targets": Targets(), "validation_inference": "sum-product",
        }  # fmt: skip
        if x and not sparse:
            options["units"] = ColumnUnits(np.full(x, 0.1, np.float32), np.full(x, 0.7, np.float32))
        self.fake, self.learner, self.backend = fake, CrbmLearner(shape, learner, **options), CupyBackend()
        inputs = rng.normal(size=(rows, x)).astype(np.float32) * (rng.random((rows, x)) < 0.1)
        y, numbers = rng.integers(0, 2, (rows, v)).astype(np.uint8), np.arange(rows)
        parts = [slice(a, a + 8) for a in range(0, rows, 8)]
        given = CsrRows.from_scipy(scipy.sparse.csr_matrix(inputs)) if sparse else inputs
        self.blocks = [
            Block(given[p], y[p], None, p.start, numbers[p], 0, chain) for chain, p in enumerate(parts)
        ]
        theta = (0.3 * rng.normal(size=shape.n_parameters)).astype(np.float32)
        self.state = self.learner.start(theta)
        self.blocks[-1] = replace(self.blocks[-1], x=given[rows - 8 : rows - 3], y=y[rows - 8 : rows - 3],
                                  rows=numbers[rows - 8 : rows - 3])  # fmt: skip

    def run(self, chains: slice = slice(None), together: bool = True) -> list[np.ndarray]:
        """Return statistics of some chains, computed twice; count the work of the second computation."""
        blocks = self.blocks[chains]
        for _ in range(2):
            for counter in (self.fake.LAUNCHED, self.fake.EXPRESSIONS, self.fake.WAITS):
                counter.clear()
            prepared = self.learner.prepare(self.state, self.backend)
            stats = [Stats.zeros(self.learner.layout(), len(block.x)) for block in blocks]
            if together:
                self.learner.run_chains(prepared, blocks, stats)
            else:
                for block, own in zip(blocks, stats, strict=True):
                    self.learner.run_chain(prepared, block, own)
        gets = [name for name, _ in self.fake.LAUNCHED].count("get")
        self.launches = len(self.fake.LAUNCHED) - gets + len(self.fake.EXPRESSIONS)
        self.kernels = sorted(name for name, _ in self.fake.LAUNCHED if name.startswith("crbm_"))
        self.waits = len(self.fake.WAITS)
        return [own.vector for own in stats]


@pytest.mark.parametrize("learner", ["mle-bp", "mle-mf"])
@pytest.mark.parametrize(
    ("x", "sparse", "v"), [(12, False, 9), (300, True, 9), (0, False, 9), (300, False, 90)]
)
def test_chains_side_by_side_have_the_bits_of_chains_alone(fake, clustered, learner, x, sparse, v):
    """The bits of a chain (a part of the batch) do not depend on the chains that share its launches.

    Workers divide the chains among them, so the number of workers changes no bit.
    """
    steps = Steps(fake, learner, 4, x, sparse, v)
    assert steps.learner.factored == (v == 90)
    found = steps.run()
    for chain, vector in enumerate(found):
        np.testing.assert_array_equal(steps.run(slice(chain, chain + 1))[0], vector)
    for before, now in zip(steps.run(together=False), found, strict=True):
        assert_allclose(now, before, rtol=1e-6, atol=2e-5)


def test_a_step_has_few_launches_that_chains_share(fake):
    """Chains (parts of a batch) share all launches except those of their products with the rows x."""
    for n_chains, factored in ((2, True), (8, True), (2, False), (8, False)):
        steps = Steps(fake, "mle-bp", n_chains, 300 if factored else 4, v=90)
        assert steps.learner.factored == factored
        steps.run()
        assert (steps.launches, steps.waits) == ((13, 14)[not factored] + (4, 6)[not factored] * n_chains, 3)
        biases = [] if factored else ["crbm_chain_biases"]
        inference = ["crbm_chain_weights", "crbm_negative", "crbm_positive", "crbm_sum_product"]
        assert steps.kernels == biases + inference
        steps.run(together=False)
        assert steps.launches > 42 * n_chains
        assert steps.waits > (4 if factored else 2) * n_chains


def take_steps(steps: Steps, n_steps: int, on_gpu: bool):
    """Take ``n_steps`` steps over the same rows, count the work of the last one, and return the state."""
    learner, backend, state = steps.learner, steps.backend, steps.state
    n_rows = sum(len(block.x) for block in steps.blocks)
    for _ in range(n_steps):
        for counter in (steps.fake.LAUNCHED, steps.fake.EXPRESSIONS, steps.fake.WAITS):
            counter.clear()
        steps.fake.COPIED.update(set=0, get=0)
        if on_gpu:
            state = learner.step_on_gpu(state, steps.blocks, n_rows, backend)
        else:
            sums = run_chains(learner, state, steps.blocks, backend)
            state = apply_step(learner, state, sums, n_rows)
    gets = [name for name, _ in steps.fake.LAUNCHED].count("get")
    steps.launches = len(steps.fake.LAUNCHED) - gets + len(steps.fake.EXPRESSIONS)
    steps.waits, steps.copied = len(steps.fake.WAITS), dict(steps.fake.COPIED)
    return learner.to_host(state)


@pytest.mark.parametrize("learner", ["mle-bp", "mle-mf"])
@pytest.mark.parametrize(
    ("x", "sparse", "v"), [(12, False, 9), (300, True, 9), (0, False, 9), (300, False, 90)]
)
@pytest.mark.parametrize("n_chains", [2, 3, 7])
def test_steps_on_the_gpu_have_the_bits_of_steps_of_the_host(fake, learner, x, sparse, v, n_chains):
    """A fit may take some steps on a GPU and others on the host, with the same bits."""
    steps = Steps(fake, learner, n_chains, x, sparse, v)
    assert steps.learner.factored == (v == 90)
    expected, found = (take_steps(steps, 3, on_gpu) for on_gpu in (False, True))
    assert (found.theta != steps.state.theta).any()
    np.testing.assert_array_equal(found.theta, expected.theta)
    np.testing.assert_array_equal(found.sums, expected.sums)
    assert (found.steps, found.velocity.size) == (3, 0)


@pytest.mark.parametrize(("factored", "n_chains"), [(True, 2), (True, 8), (False, 2), (False, 8)])
def test_a_step_on_the_gpu_waits_once_and_copies_no_parameters(fake, factored, n_chains):
    steps = Steps(fake, "mle-bp", n_chains, 300 if factored else 4, v=90)
    assert steps.learner.factored == factored
    take_steps(steps, 2, on_gpu=False)
    assert steps.waits == 3
    parameters = 4 * len(steps.state.theta)
    assert steps.copied["set"] > parameters
    take_steps(steps, 2, on_gpu=True)
    assert steps.waits == 1
    assert steps.launches == ((16, 14)[not factored] + (4, 6)[not factored] * n_chains)
    rows = sum(len(block.x) for block in steps.blocks)
    x = 300 if factored else 4
    # A step copies to the GPU x in float32, v as bytes, and the n_chains + 1 bounds of the chains' rows.
    assert steps.copied["set"] == rows * (4 * x + 90) + 4 * (n_chains + 1)
    assert steps.copied["get"] < 4 * (3 * rows + 1) + parameters / 100


def test_settings_and_rows_without_a_step_on_the_gpu_are_refused(fake):
    """For these settings and rows, `step_on_gpu` returns None, and its caller takes the step on the host."""
    steps = Steps(fake, "mle-bp", 2, 300, v=90)
    n_rows = sum(len(block.x) for block in steps.blocks)

    def step(blocks=steps.blocks, **settings):
        learner = replace(steps.learner, **settings)
        return learner.step_on_gpu(learner.start(steps.state.theta), blocks, n_rows, steps.backend)

    assert step() is not None
    assert step(momentum=0.5) is None
    assert step(weight_decay=0.1) is None
    assert step(learner="cd") is None
    assert step(local_steps=2) is None
    bad = steps.blocks[0].x.copy()
    bad[3, 5] = 3e38
    assert step([replace(steps.blocks[0], x=bad), *steps.blocks[1:]], units=None) is None
    many = [block for _ in range(13) for block in steps.blocks]  # The host uses BLAS for more than 160 rows.
    assert step(many, n_chains=2) is None


def test_a_diverged_step_on_the_gpu_names_the_weights(fake):
    steps = Steps(fake, "mle-bp", 2, 300, v=90)
    learner = replace(steps.learner, rates=np.array([1e6]))
    message = r"weights are too large .* in epoch 1, step 1"
    with pytest.raises(DivergenceError, match=message):
        learner.step_on_gpu(steps.state, steps.blocks, 13, steps.backend)


@pytest.mark.parametrize("n_chains", [1, 2])
def test_a_fit_with_steps_on_the_gpu_has_the_bits_of_one_without(fake, monkeypatch, tmp_path, n_chains):
    x, v = rows()
    settings = {
        "n_hidden": 5, "n_sweeps": 3, "batch_size": 6, "n_epochs": 3, "learning_rate": 0.3, "device": "gpu",
        "n_jobs": 1, "random_state": 0, "n_chains": n_chains,
    }  # fmt: skip
    step, taken = CrbmLearner.step_on_gpu, []

    def counted(*arguments):
        taken.append(step(*arguments))
        return taken[-1]

    monkeypatch.setattr(CrbmLearner, "step_on_gpu", counted)
    engine = {"checkpoint_steps": 1}  # A checkpoint after each step copies the parameters to the host.
    found = sl.ConditionalRBM(**settings).fit(
        x, v, validation=(x, v), run_dir=tmp_path / "run", engine=engine
    )
    assert sum(state is not None for state in taken) >= 6
    monkeypatch.setattr(CrbmLearner, "step_on_gpu", lambda *_: None)
    expected = sl.ConditionalRBM(**settings).fit(x, v, validation=(x, v))
    for name in ("W_", "Wvx_", "Whx_", "bv_", "bh_"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for ours, theirs in zip(found.history_, expected.history_, strict=True):
        for key in ("objective", "train_error", "validation_error", "converged"):
            assert ours[key] == theirs[key], key
