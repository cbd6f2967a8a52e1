"""Launches of kernels: large grids, several devices, tables on devices."""

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
    """Return a function that makes a device current."""
    return lambda device: monkeypatch.setattr(fake.runtime, "getDevice", lambda: device)


def test_kernels_go_on_where_the_grid_ends(fake, gpu, cases, monkeypatch):
    monkeypatch.setattr(cuda, "MAX_GRID_Y", 3)
    cases.check_residuals(gpu, fake.asarray, cases.make_case("d2", 300, 0.8, "float64"))


def test_each_device_is_told_that_a_kernel_needs_much_shared_memory(fake, use_device, monkeypatch):
    told, device = [], cuda.current_device
    monkeypatch.setattr(cuda, "_give_room", lambda function: told.append((function.name, device())))
    monkeypatch.setattr(fake.RawKernel, "__call__", lambda *args, **options: None)
    kernels = cuda.Kernels("scalelatent.models.crbm.kernels")
    for number in (0, 1, 0, 1):
        use_device(number)
        kernels.launch("crbm_sum_product_kept", (1,), shared_bytes=60_000)
        kernels.launch("crbm_sum_product", (1,))
    assert told == [("crbm_sum_product_kept", 0), ("crbm_sum_product_kept", 1)]


def test_a_full_cache_of_tables_evicts_the_oldest_of_the_device_after_its_work(
    fake, gpu, use_device, monkeypatch
):
    monkeypatch.setattr(gpu, "TABLES", 2)
    tables = [squash_table(d) for d in (2, 3, 4)]

    def kept(device: int) -> list[int]:
        return [round(2 * table.scale) - 2 for (_, at), (table, _) in gpu._tables.items() if at == device]

    waited = []
    monkeypatch.setattr(fake.runtime, "deviceSynchronize", lambda: waited.append(kept(0)))
    use_device(1)
    gpu._on_device(tables[0], 2)
    use_device(0)
    for d, table in zip((2, 3, 4), tables, strict=True):
        moved = gpu._on_device(table, d)
        np.testing.assert_array_equal(moved.coefficients.get(), table.coefficients)
    # Each table is stored, and the oldest evicted, only after the device has finished its work.
    assert waited == [[], [], [2], [2, 3]]
    assert (kept(0), kept(1)) == ([3, 4], [2])
    assert gpu._on_device(tables[2], 4) is moved
