"""The CUDA text of compositional networks gives the reference's bits, run on a processor and on a device."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from scalelatent.models.hcn.kernels import reference
from scalelatent.models.hcn.kernels.order import shuffled
from tests.models.hcn.cases import draw_sweep, no_messages

# chains, images, (channels, height, width), window, features
SHAPES = [
    (1, 1, (1, 3, 4), (2, 3), 1),
    (2, 1, (1, 4, 3), (3, 2), 5),
    (1, 2, (2, 3, 4), (3, 4), 33),
    (1, 1, (16, 1, 3), (1, 2), 17),
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


def check_messages(gpu, shape, damping: float) -> None:
    evidence, order, s, w = draw_sweep(2, *shape)
    want = [s.copy(), w.copy(), *no_messages(evidence, w)]
    found = [gpu.cupy.asarray(a.copy()) for a in want]
    for _ in range(2):
        wanted = reference.sweep_messages(evidence, order, *want, damping)
        moved = gpu.sweep_messages(gpu.cupy.asarray(evidence), gpu.cupy.asarray(order), *found, damping)
        assert_array_equal(moved, wanted)
    for a, b in zip(found, want, strict=True):
        assert_array_equal(a.get(), b)


def check_decode(gpu, shape) -> None:
    evidence, _, s, w = draw_sweep(3, *shape)
    order = shuffled(0, "test", 0, np.arange(len(s[0])), evidence[0, 0].size)
    found = gpu.cupy.asarray(s[0].copy())
    moved = gpu.decode(gpu.cupy.asarray(evidence[0]), gpu.cupy.asarray(order), found, w[0] > 0, 3)
    assert_array_equal(moved, reference.decode(evidence[0], order, s[0], w[0] > 0, 3))
    assert_array_equal(found.get(), s[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_sweep_emulated(emulated_gpu, shape) -> None:
    check_sweep(emulated_gpu, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_messages_emulated(emulated_gpu, shape) -> None:
    check_messages(emulated_gpu, shape, 0.8)


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_emulated(emulated_gpu, shape) -> None:
    check_decode(emulated_gpu, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_device(real_gpu, shape) -> None:
    check_sweep(real_gpu, shape)
    check_messages(real_gpu, shape, 1.0)
    check_messages(real_gpu, shape, 0.8)
    check_decode(real_gpu, shape)
