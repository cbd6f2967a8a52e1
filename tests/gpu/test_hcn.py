"""The CUDA kernels of compositional networks give the reference's bits, on a processor and on a device."""

from __future__ import annotations

import importlib
import threading

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.contract.learners import Block
from scalelatent.engine.backend import make_backend
from scalelatent.engine.chains import apply_step, run_chains
from scalelatent.models.hcn.kernels import reference
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.model.decode import Decoder
from scalelatent.models.hcn.model.evidence_learner import OnlineFeatureLearner
from scalelatent.models.hcn.model.layer import FeatureLayer
from scalelatent.models.hcn.model.stored_messages import BatchFeatureLearner, start_leaf, visit_leaves
from tests.models.hcn.cases import draw_sweep, make_zero_messages

# Each case has the numbers of chains and images, (channels, height, width), (window height, width), features.
SHAPES = [
    (1, 1, (1, 3, 4), (2, 3), 1),
    (2, 1, (1, 4, 3), (3, 2), 5),
    (1, 2, (2, 3, 4), (3, 4), 33),
    (1, 1, (16, 1, 3), (1, 2), 17),
    (1, 1, (1, 18, 4), (9, 2), 12),  # a tree has 9 rows, and a thread block has 8 warps
]


@pytest.fixture(scope="session")
def emulated(emulate):
    return emulate("hcn")


@pytest.fixture
def emulated_gpu(fake):
    return importlib.import_module("scalelatent.models.hcn.kernels.gpu")


@pytest.fixture
def real_gpu(real):
    return importlib.import_module("scalelatent.models.hcn.kernels.gpu")


def check_sweep(gpu, shape) -> None:
    evidence, order, s, w = draw_sweep(1, *shape)
    want = s.copy(), w.copy()
    found = gpu.cupy.asarray(s), gpu.cupy.asarray(w)
    for _ in range(2):
        reference.sweep(evidence, order, *want)
        gpu.sweep(gpu.cupy.asarray(evidence), gpu.cupy.asarray(order), *found)
    for a, b in zip(found, want, strict=True):
        assert_array_equal(a.get(), b)


def check_messages(gpu, shape, damping: float, kept: str = "i2") -> None:
    evidence, order, s, w = draw_sweep(2, *shape)
    to_s, to_w, held = make_zero_messages(evidence, w)
    want = [s.copy(), w.copy(), to_s.astype(kept), to_w.astype(kept), held]
    found = [gpu.cupy.asarray(a.copy()) for a in want]
    for _ in range(2):
        # New evidence in each pass ends the messages of some window positions, which kernels must remove.
        evidence = np.roll(evidence, 1, axis=4)
        wanted = reference.sweep_messages(evidence, order, *want, damping)
        moved = gpu.sweep_messages(gpu.cupy.asarray(evidence), gpu.cupy.asarray(order), *found, damping)
        assert_array_equal(moved, wanted)
    for a, b in zip(found, want, strict=True):
        assert_array_equal(a.get(), b)


def check_decode(gpu, shape) -> None:
    evidence, _, s, w = draw_sweep(3, *shape)
    order = shuffled(0, "test", 0, np.arange(len(s[0])), evidence[0, 0].size)
    found = gpu.cupy.asarray(s[0].copy())
    moved = gpu.decode_images(gpu.cupy.asarray(evidence[0]), gpu.cupy.asarray(order), found, w[0] > 0, 3)
    assert_array_equal(moved, reference.decode_images(evidence[0], order, s[0], w[0] > 0, 3))
    assert_array_equal(found.get(), s[0])


def check_orders(gpu) -> None:
    for n in (1, 2, 3, 10, 300):
        given = 7, "hcn sweep", 2**33 + 1, np.array([5, 11, 2**40]), n
        assert_array_equal(gpu.shuffled(*given).get(), shuffled(*given))


def check_chains(name: str) -> None:
    """Compare a step on a GPU, which launches its chains (parts) together, with the step of a processor."""
    layer = FeatureLayer((1, 5, 4), 2, (3, 2), 1e-2, 1e-2, 0.3, 1e-2)
    x = (np.random.default_rng(0).random((13, layer.n_pixels)) < 0.3).astype(np.uint8)
    learner = OnlineFeatureLearner(layer, 0.9, 2, 5)
    # The step has chains (its parallel parts) of 5, 4 and 4 rows, and one without rows.
    parts = [np.arange(0, 5), np.arange(5, 9), np.arange(9, 13)]
    blocks = [Block(x[rows], None, None, 0, rows, 1, k) for k, rows in enumerate(parts)]
    found = {}
    for backend in (make_backend("cpu"), make_backend(name)):
        sums = run_chains(learner, learner.start(), [*blocks, None], backend, n_chains=4)
        found[backend.name] = apply_step(learner, learner.start(), sums, 13).beliefs
    assert_array_equal(*found.values())
    assert len(found) == 2


@pytest.fixture(params=["shared", "only W is shared", "not shared"])
def _limit_shared_memory(request, emulated_gpu, monkeypatch) -> None:
    """Give thread blocks shared memory for all beliefs, for those of the weights W, or for none."""
    most = {"shared": 2**17, "only W is shared": 2**17, "not shared": 0}[request.param]
    processors = 132 if request.param == "shared" else 0
    monkeypatch.setattr(emulated_gpu, "_read_device_limits", lambda device: (most, processors))


@pytest.mark.usefixtures("_limit_shared_memory")
@pytest.mark.parametrize("shape", SHAPES)
def test_an_emulated_sweep_gives_the_bits_of_the_reference(emulated_gpu, shape) -> None:
    check_sweep(emulated_gpu, shape)


@pytest.mark.usefixtures("_limit_shared_memory")
@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_messages_give_the_bits_of_the_reference(emulated_gpu, shape) -> None:
    check_messages(emulated_gpu, shape, 0.8)
    check_messages(emulated_gpu, shape, 1.0, "i4")


@pytest.mark.usefixtures("_limit_shared_memory")
@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_decoding_gives_the_bits_of_the_reference(emulated_gpu, shape) -> None:
    check_decode(emulated_gpu, shape)


def test_emulated_orders_give_the_bits_of_the_reference(emulated_gpu) -> None:
    check_orders(emulated_gpu)


def test_chains_are_launched_together(emulated_gpu) -> None:
    launched = emulated_gpu.cupy.LAUNCHED
    before = len(launched)
    check_chains("gpu")
    names = [name for name, _ in launched[before:]]
    # The two chains of four rows share launches for their two minibatches; the chain of five rows has three.
    assert names.count("hcn_sweep") == 5
    # The chains of four share one launch; the chain of five has one for two full minibatches and one more.
    assert names.count("hcn_shuffle") == 3


def test_chains_that_exceed_the_memory_are_split_in_halves(emulated_gpu, monkeypatch) -> None:
    sizes, run = [], OnlineFeatureLearner.run_chains

    def small(self, prepared, blocks, stats) -> None:
        sizes.append(len(blocks))
        if len(blocks) > 1 and prepared[1].name == "cupy":
            raise emulated_gpu.cupy.OutOfMemoryError
        run(self, prepared, blocks, stats)

    monkeypatch.setattr(OnlineFeatureLearner, "run_chains", small)
    check_chains("gpu")
    assert sizes[-5:] == [3, 1, 2, 1, 1]


def test_beliefs_are_in_shared_memory_if_all_blocks_run_at_once(emulated_gpu, monkeypatch) -> None:
    monkeypatch.setattr(emulated_gpu, "_read_device_limits", lambda device: (232_448 - 1024, 132))
    five_images = 5 * 19 * 17 * 32, 48 * 32
    assert emulated_gpu._choose_shared(128, *five_images) == (3, 4 * sum(five_images))
    assert emulated_gpu._choose_shared(133, *five_images) == (1, 4 * five_images[1])
    assert emulated_gpu._choose_shared(1, 10**6, 10**6) == (0, 0)


def test_leaves_side_by_side_give_the_bits_of_single_leaves(emulated_gpu) -> None:
    rng, layer = np.random.default_rng(5), FeatureLayer((1, 9, 8), 3, (3, 3), 0.1, 0.1, 0.3, 0.2)
    learner = BatchFeatureLearner(layer, 0.9, 3, 5, damping=0.8, n_rows=100, max_sweeps=2)
    x = (rng.random((13, layer.n_pixels)) < 0.3).astype(np.uint8)
    parts = [np.arange(a, b) for a, b in ((0, 4), (4, 8), (8, 12), (12, 13))]
    state, found = learner.start(), {}
    for device in ("cpu", "gpu"):
        prepared = learner.prepare(state, make_backend(device))
        kept = [None] * len(parts)
        # Each leaf (fixed range of images) makes at most two sweeps, so in the third epoch no leaf has work.
        for epoch in range(3):
            blocks = [Block(x[rows], None, None, int(rows[0]), rows, epoch, 0) for rows in parts]
            if device == "cpu":
                kept = [learner.visit(prepared, *leaf) for leaf in zip(blocks, kept, strict=True)]
            else:
                before = len(emulated_gpu.cupy.LAUNCHED)
                kept = learner.visit_leaves(prepared, blocks, kept)
                names = [name for name, _ in emulated_gpu.cupy.LAUNCHED[before:]]
                # Three leaves (fixed ranges of images) of four rows are launched together, and the leaf of
                # one row alone.
                assert names.count("hcn_sweep_messages") == (2 if epoch < 2 else 0)
        found[device] = kept
    for ours, theirs in zip(*found.values(), strict=True):
        assert_array_equal(ours["change"], theirs["change"])
        for name, value in theirs["messages"].items():
            assert_array_equal(ours["messages"][name], value)


def check_new_threads(count: int) -> None:
    """Run a pass in threads whose current stream is not the backend's; compare the bits with the host's."""
    rng = np.random.default_rng(5)
    layer = FeatureLayer((1, 9, 8), 3, (3, 3), 0.1, 0.1, 0.3, 0.2)
    decoder = Decoder(layer, rng.random((1, 3, 3, 3)) < 0.4, 0, 4)
    rows, evidence = np.arange(3), rng.integers(-900, 900, (3, 1, 9, 8)).astype(np.int32)
    beliefs = rng.integers(-900, 900, (1, 3, 3, 3)).astype(np.int32)
    leaf, found, card = start_leaf(layer, 3), [], make_backend("gpu")

    def compute(backend) -> list[np.ndarray]:
        visited, change = visit_leaves([leaf], evidence[None], beliefs, [0], 7, 3, 0.8, backend)[0]
        return [*decoder.beliefs(evidence, rows, backend), visited.s, visited.to_w, change]

    for _ in range(count):
        thread = threading.Thread(target=lambda: found.append(compute(card)))
        thread.start()
        thread.join(60)
    want = compute(make_backend("cpu"))
    assert len(found) == count
    for arrays in found:
        for a, b in zip(arrays, want, strict=True):
            assert_array_equal(a, b)


def test_passes_in_new_threads_give_the_same_bits(emulated_gpu) -> None:
    check_new_threads(2)


@pytest.mark.gpu
def test_passes_in_new_threads_on_a_device_give_the_same_bits(real_gpu) -> None:
    check_new_threads(100)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_on_a_device_give_the_bits_of_the_reference(real_gpu, shape) -> None:
    check_sweep(real_gpu, shape)
    check_messages(real_gpu, shape, 1.0)
    check_messages(real_gpu, shape, 0.8)
    check_messages(real_gpu, shape, 1.0, "i4")
    check_decode(real_gpu, shape)


@pytest.mark.gpu
def test_chains_on_a_device_give_the_same_bits(real_gpu) -> None:
    check_orders(real_gpu)
    check_chains("gpu")
