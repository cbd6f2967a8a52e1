"""Kernels are launched for work beyond the largest grid, on several devices, and with tables on a device."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from scalelatent.kernels import cuda
from scalelatent.models.capsule.kernels.squash import squash_table


@pytest.fixture
def gpu(fake):
    return importlib.import_module("scalelatent.models.capsule.kernels.gpu")


@pytest.fixture
def use_device(fake, monkeypatch):
    """Return a function that makes the device with a given number the current one."""
    return lambda device: monkeypatch.setattr(fake.runtime, "getDevice", lambda: device)


def test_kernels_loop_over_work_beyond_the_grid(fake, gpu, cases, monkeypatch):
    monkeypatch.setattr(cuda, "MAX_GRID_Y", 3)
    cases.check_residuals(gpu, fake.asarray, cases.make_case("d2", 300, 0.8, "float64"))


def test_shared_memory_of_a_kernel_is_enlarged_once_per_device(fake, use_device, monkeypatch):
    reported, device = [], cuda.current_device
    monkeypatch.setattr(
        cuda, "_allow_more_shared_memory", lambda function: reported.append((function.name, device()))
    )
    monkeypatch.setattr(fake.RawKernel, "__call__", lambda *args, **options: None)
    kernels = cuda.Kernels("scalelatent.models.crbm.kernels")
    for number in (0, 1, 0, 1):
        use_device(number)
        kernels.launch("crbm_sum_product_kept", (1,), shared_bytes=60_000)
        kernels.launch("crbm_sum_product", (1,))
    assert reported == [("crbm_sum_product_kept", 0), ("crbm_sum_product_kept", 1)]


def test_a_host_table_is_copied_and_a_device_table_is_not(fake, gpu):
    table = squash_table(3)
    moved = gpu._on_device(table, 3)
    np.testing.assert_array_equal(moved.coefficients.get(), table.coefficients)
    assert gpu._on_device(moved, 3) is moved
