"""The CuPy backend, on the stand-in for CuPy, gives the results of the host, also for full or lost GPUs."""

from __future__ import annotations

import sys
import threading
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.errors import RunError
from scalelatent.models.capsule.kernels.squash import squash_table


@pytest.fixture
def backend(fake):
    from scalelatent.engine.backend import CupyBackend

    made = CupyBackend()
    made.stream.use()  # Arrays of a test must be on the stream of the backend.
    return made


def test_the_gpu_backend_has_every_method_of_the_host_backend(backend):
    from scalelatent.engine.backend import HostBackend

    public = {name for name in dir(HostBackend) if not name.startswith("_")} | {"name"}
    assert public <= set(dir(backend))
    assert backend.name == "cupy"


@pytest.mark.parametrize("stored", ["u1", "i2", "f2", "f4", "f8", ">f4", ">i2", "?"])
@pytest.mark.parametrize("wanted", ["f4", "f8"])
def test_asarray_converts_every_stored_type(backend, stored, wanted):
    rng = np.random.default_rng(0)
    for rows, cols in ((0, 3), (1, 1), (7, 5), (400, 60)):
        a = (rng.random((rows, cols)) * 200).astype(stored)
        moved = backend.asarray(a, wanted, "x")
        assert moved.dtype == np.dtype(wanted)
        assert moved.flags.c_contiguous
        np.testing.assert_array_equal(moved.get(), a.astype(wanted))
        np.testing.assert_array_equal(backend.asarray(a[::2], wanted).get(), a[::2].astype(wanted))


def test_images_are_copied_to_the_gpu_as_bytes(backend, fake, monkeypatch):
    moved = []
    real = fake.MemoryPointer.copy_from_host_async
    monkeypatch.setattr(
        fake.MemoryPointer,
        "copy_from_host_async",
        lambda self, mem, size, stream=None: (moved.append(size), real(self, mem, size, stream)),
    )
    x = np.arange(300 * 784, dtype=np.uint32).astype(np.uint8).reshape(300, 784)
    np.testing.assert_array_equal(backend.to_host(backend.asarray(x, np.float32, "x")), x)
    np.testing.assert_array_equal(backend.to_host(backend.asarray(x.astype(np.float64), np.float32, "x")), x)
    assert moved == [x.size, 4 * x.size]


def test_buffers_are_reused(backend):
    first = backend.buffer("h", (4, 100), np.float32)
    again = backend.buffer("h", (3, 50), np.float32)
    assert again.data.ptr == first.data.ptr
    assert again.flags.c_contiguous
    assert backend.buffer("h", (4, 100), np.float64).dtype == np.float64
    assert backend.buffer("other", (0, 5), np.float32).shape == (0, 5)


def test_a_device_array_is_not_copied(backend, fake):
    a = fake.zeros((3, 4), np.float32)
    assert backend.asarray(a, np.float32, "x") is a
    assert backend.asarray(a.T, np.float32).flags.c_contiguous
    assert backend.asarray(fake.zeros((3, 4), np.uint8), np.float32, "x").dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_every_layout_equal_numpys(backend, fake, dtype):
    rng = np.random.default_rng(1)
    for m, n, k in ((1, 1, 1), (5, 7, 3), (1, 4, 6), (6, 1, 4), (8, 9, 1), (20, 33, 17)):
        a, b = rng.normal(size=(m, k)).astype(dtype), rng.normal(size=(k, n)).astype(dtype)
        wide = np.concatenate([a, a, a], axis=1)
        left = [
            fake.asarray(a),
            fake.asarray(a.T.copy()).T,
            fake.asarray(wide)[:, :k],
            fake.asarray(wide)[:, ::-1][:, ::-1][:, :k],
        ]
        right = [fake.asarray(b), fake.asarray(b.T.copy()).T, fake.asarray(np.repeat(b, 2, axis=0))[::2]]
        for one, two in product(left, right):
            out = backend.matmul(one, two, "out")
            assert out.flags.c_contiguous
            np.testing.assert_allclose(
                out.get(), a @ b, rtol=1e-5 if dtype == np.float32 else 1e-13, atol=1e-5
            )


def test_products_of_empty_arrays_are_zero(backend, fake):
    assert backend.matmul(fake.zeros((3, 2)), fake.zeros((2, 0)), "out").shape == (3, 0)
    np.testing.assert_array_equal(
        backend.matmul(fake.zeros((3, 0)), fake.zeros((0, 4)), "out").get(), np.zeros((3, 4))
    )


def test_arguments_of_gemm_follow_blas():
    """The arguments of cuBLAS give the product if they are passed to the BLAS of scipy."""
    import ctypes

    from scipy.linalg import cython_blas

    from scalelatent.kernels.cuda import gemm_call

    ctypes.pythonapi.PyCapsule_GetName.restype = ctypes.c_char_p
    ctypes.pythonapi.PyCapsule_GetName.argtypes = [ctypes.py_object]
    ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
    ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    capsule = cython_blas.__pyx_capi__["sgemm"]
    address = ctypes.pythonapi.PyCapsule_GetPointer(capsule, ctypes.pythonapi.PyCapsule_GetName(capsule))
    sgemm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(address)
    rng = np.random.default_rng(2)
    wide = rng.normal(size=(5, 40)).astype(np.float32)
    x = rng.normal(size=(30, 7)).astype(np.float32)
    for a, b in (
        (wide[:, :30], x),
        (x.T, wide[:, :30].T),
        (wide[:, :7], x.T),
        (x[:5].copy(), np.asfortranarray(wide[:, :7].T)),
    ):
        out = np.empty((a.shape[0], b.shape[1]), np.float32)
        trans_b, trans_a, m, n, k, ldb, lda, ldc = gemm_call(a, b, out)
        letters = [ctypes.c_char(b"T" if t else b"N") for t in (trans_b, trans_a)]
        integers = {
            key: ctypes.c_int(v)
            for key, v in {"m": m, "n": n, "k": k, "ldb": ldb, "lda": lda, "ldc": ldc}.items()
        }
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        arguments = [
            *letters,
            integers["m"],
            integers["n"],
            integers["k"],
            one,
            b.ctypes,
            integers["ldb"],
            a.ctypes,
        ]
        arguments += [integers["lda"], zero, out.ctypes, integers["ldc"]]
        sgemm(*(v.data if hasattr(v, "data_as") else ctypes.addressof(v) for v in arguments))
        np.testing.assert_allclose(out, a @ b, rtol=1e-5, atol=1e-5)


def test_take_gathers_rows_of_host_and_device_arrays(backend, fake):
    x = np.random.default_rng(3).normal(size=(9, 4)).astype(np.float32)
    for rows in (np.array([3, 1, 8]), np.array([0], np.int32), np.empty(0, np.int64)):
        for index in (rows, fake.asarray(rows)):
            np.testing.assert_array_equal(backend.take(fake.asarray(x), index, "t").get(), x[rows])


def test_tables_are_copied_once(backend, fake):
    table = squash_table(6)
    moved = backend.copy_table(table)
    assert isinstance(moved.coefficients, fake.ndarray)
    assert moved.scale == table.scale
    assert backend.copy_table(table) is moved


def test_all_work_of_a_backend_runs_on_its_own_stream(backend, fake):
    from scalelatent.reductions.moments import SecondMoments

    fake.Stream(null=True).use()
    fake.LAUNCHED.clear()
    block = _block(50, 6, weighted=True)
    _accumulate(SecondMoments(6, 2), block, backend)
    assert {stream for _, stream in fake.LAUNCHED} == {backend.stream.ptr}
    assert backend.stream.ptr != 0


def test_the_out_of_memory_error_names_a_smaller_block_size(backend, fake):
    x = np.zeros((2048, 64), np.float32)
    fake.POOL.limit = x.nbytes
    backend.asarray(x, np.float32, "x")
    with pytest.raises(
        RunError,
        match=r"GPU 0 \(emulated\): no memory for the buffer 'h' .*limit.* = 1024 \(blocks have 2048 rows\)",
    ):
        backend.buffer("h", (320, 2048), np.float32)
    with pytest.raises(RunError, match=r"then resume the run; or start again .*block_rows = 1024"):
        backend.kernel("capsule_probabilities")(fake.zeros((40, 2048), np.float32), np.full(40, 1))


def _raises(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


def test_a_lost_gpu_and_a_failed_call_give_different_errors(backend, fake, monkeypatch):
    from scalelatent.engine.backend import DeviceLostError

    monkeypatch.setattr(fake.ndarray, "get", _raises(fake.CUDARuntimeError(1)))
    with pytest.raises(RunError, match=r"GPU 0 \(emulated\).*cudaErrorInvalidValue.*report it") as caught:
        backend.to_host(fake.zeros(3))
    assert not isinstance(caught.value, DeviceLostError)
    monkeypatch.setattr(fake.runtime, "deviceSynchronize", _raises(fake.CUDARuntimeError(700)))
    with pytest.raises(DeviceLostError, match=r"GPU 0 \(emulated\).*restart the process.*Xid"):
        backend.to_host(fake.zeros(3))


def test_the_error_names_the_gpu_of_a_failed_expression(fake, monkeypatch):
    from scalelatent.engine.backend import DeviceLostError
    from scalelatent.engine.inprocess import InProcessExecutor
    from scalelatent.engine.passes import make_stage
    from scalelatent.reductions.moments import SecondMoments

    monkeypatch.setattr(SecondMoments, "accumulate", _raises(fake.CUDARuntimeError(700)))
    monkeypatch.setattr(fake.runtime, "deviceSynchronize", _raises(fake.CUDARuntimeError(700)))
    data = sl.Dataset.from_arrays(np.ones((9, 3)))
    stage = make_stage("moments", {"train": SecondMoments(3, 0)}, {"train": data}, "gpu")
    with pytest.raises(DeviceLostError, match=r"GPU 0 \(emulated\).*cudaErrorIllegalAddress"):
        InProcessExecutor(1).collect(stage, lambda done, rows: None)


@pytest.mark.parametrize("status", [1, 3])
def test_an_allocation_error_of_cublas_is_an_out_of_memory_error(backend, fake, monkeypatch, status):
    from scalelatent.engine.backend import DeviceMemoryError

    monkeypatch.setattr(fake.cublas, "create", _raises(fake.CUBLASError(status)))
    with pytest.raises(DeviceMemoryError, match="no memory for a matrix product"):
        backend.matmul(fake.zeros((2, 2)), fake.zeros((2, 2)), "out")
    monkeypatch.setattr(fake.cublas, "create", _raises(fake.CUBLASError(13)))
    with pytest.raises(RunError, match=r"a matrix product failed: status 13.*device='cpu'") as caught:
        backend.matmul(fake.zeros((2, 2)), fake.zeros((2, 2)), "out")
    assert not isinstance(caught.value, DeviceMemoryError)


def test_an_allocation_error_of_another_allocator_is_an_out_of_memory_error(backend, fake, monkeypatch):
    """RMM and numpy raise a plain MemoryError; only that of RMM means the memory of the GPU."""
    from scalelatent.engine.backend import DeviceMemoryError

    monkeypatch.setattr(fake, "_allocate", _raises(MemoryError("std::bad_alloc: out_of_memory: CUDA error")))
    with pytest.raises(DeviceMemoryError, match="no memory for the buffer 'h'"):
        backend.buffer("h", (4, 4), np.float32)
    assert isinstance(backend.name_error(MemoryError("std::bad_alloc")), DeviceMemoryError)
    with pytest.raises(MemoryError) as caught:
        np.empty(2**58)
    assert backend.name_error(caught.value) is caught.value


@pytest.mark.parametrize("error", ["runtime", "python"])
def test_rows_use_pageable_memory_if_none_can_be_locked(backend, fake, monkeypatch, caplog, error):
    from scalelatent.engine.backend import _warn_pageable

    _warn_pageable.cache_clear()
    raised = fake.CUDARuntimeError(2) if error == "runtime" else MemoryError()
    monkeypatch.setattr(fake.cuda, "alloc_pinned_memory", _raises(raised))
    x = np.arange(200_000, dtype=np.float32).reshape(1000, 200)
    for _ in range(2):
        np.testing.assert_array_equal(backend.to_host(backend.asarray(x, np.float32, "x")), x)
    assert [record.message[:45] for record in caplog.records] == [
        "GPU 0 (emulated): no page-locked host memory "
    ]


def test_the_error_names_a_missing_library_and_its_package(backend, fake, monkeypatch):
    from scalelatent.engine.backend import CupyBackend

    missing = ImportError("libcublasLt.so.13: cannot open shared object file")
    monkeypatch.setattr(fake.RawModule, "get_function", _raises(missing))
    with pytest.raises(RunError, match=r"libcublasLt.*scalelatent\[cuda12\] or \[cuda13\].*device='cpu'"):
        backend.kernel("capsule_probabilities")(fake.zeros((2, 3), np.float32), np.array([1, 1]))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    monkeypatch.delitem(sys.modules, "cupy_backends.cuda.libs.cublas")
    with pytest.raises(RunError, match=r"CUDA libraries.*scalelatent\[cuda12\] or \[cuda13\].*device='cpu'"):
        CupyBackend()


def test_operators_of_two_backends_run_on_their_own_streams(fake):
    """The attribute ``xp`` of a backend makes the backend's stream current, in any thread."""
    from scalelatent.engine.backend import CupyBackend

    one, two = CupyBackend(), CupyBackend()
    a = one.asarray(np.ones((300, 300)), np.float64, "a")
    b = two.asarray(np.ones((300, 300)), np.float64, "b")
    with pytest.raises(AssertionError, match="race"):
        _ = a + a  # The stream of ``two`` is current, but ``one`` wrote a.
    found = []

    def work() -> None:
        xp = one.xp
        found.append(one.to_host(xp.maximum(a, 2) + xp.asarray(np.full((300, 300), 3.0))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    np.testing.assert_array_equal(found[0], np.full((300, 300), 5.0))
    np.testing.assert_array_equal(two.to_host(b), np.ones((300, 300)))


def test_threads_use_all_devices_in_turn(fake, monkeypatch):
    """Eight threads that use four GPUs give the sums of one GPU, and each GPU has had work."""
    from scalelatent.engine.inprocess import InProcessExecutor
    from scalelatent.engine.passes import make_stage
    from scalelatent.reductions.moments import SecondMoments

    rng = np.random.default_rng(4)
    data = sl.Dataset.from_arrays(rng.normal(size=(4000, 6)).astype("f4"))
    sums, used = {}, {}
    for count in (1, 4):
        monkeypatch.setattr(fake.Device, "count", count)
        fake.LAUNCHED.clear()
        stage = make_stage("moments", {"train": SecondMoments(6, 0)}, {"train": data}, "gpu", block_rows=64,
                           leaf_rows=64)  # fmt: skip
        executor = InProcessExecutor(8)
        sums[count] = executor.collect(stage, lambda done, rows: None)["train"].vector
        used[count] = {backend._device.id for backend in executor._backends.values()}
    assert used == {1: {0}, 4: {0, 1, 2, 3}}
    np.testing.assert_array_equal(sums[4], sums[1])


def test_the_callers_device_and_stream_are_restored(fake, monkeypatch):
    monkeypatch.setattr(fake.Device, "count", 2)
    fake.Device(1).use()
    mine = fake.Stream(non_blocking=True).use()
    x = np.random.default_rng(0).normal(size=(300, 5))
    model = sl.CapsuleRegression(device="gpu", capsule_dim=2, max_iter=2, n_jobs=2, random_state=0)
    model.fit(x, np.arange(300) % 2).predict(x)
    assert fake.runtime.getDevice() == 1
    assert fake.get_current_stream() is mine


def test_the_error_names_a_compiler_that_refuses_the_file(backend, fake, monkeypatch):
    def fail(*_args):
        raise fake.CompileException("invalid value for --gpu-architecture")

    monkeypatch.setattr(fake.RawModule, "get_function", fail)
    with pytest.raises(
        RunError, match="CUDA text of the kernel capsule_probabilities.*--gpu-architecture.*cuda13"
    ):
        backend.kernel("capsule_probabilities")(fake.zeros((2, 3), np.float32), np.array([1, 1]))


def test_the_pool_has_a_limit_unless_one_is_set(fake):
    from scalelatent.engine.backend import CupyBackend

    CupyBackend()
    assert 6 * 2**30 < fake.POOL.limit < 7 * 2**30
    fake.POOL.limit = 2**30
    CupyBackend()
    assert fake.POOL.limit == 2**30


def test_the_error_without_cupy_or_device_names_the_next_step(fake, monkeypatch):
    from scalelatent.engine.backend import CupyBackend

    monkeypatch.setattr(fake.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(RunError, match="nvidia-smi"):
        CupyBackend()

    def no_driver():
        raise fake.CUDARuntimeError(35)

    monkeypatch.setattr(fake.runtime, "getDeviceCount", no_driver)
    with pytest.raises(RunError, match="cudaErrorInsufficientDriver.*device='cpu'"):
        CupyBackend()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RunError, match=r"scalelatent\[cuda12\]"):
        CupyBackend()


def test_work_on_the_gpu_has_named_ranges(fake, backend):
    fake.RANGES.clear()
    a = backend.asarray(np.eye(2), np.float32)
    backend.matmul(a, a, "product")
    assert "scalelatent: a matrix product" in fake.RANGES
    assert fake.RANGES.count("") == sum(map(bool, fake.RANGES))


def test_rows_on_a_gpu_are_accepted(fake):
    from scalelatent import CapsuleRegression
    from scalelatent.data import Dataset
    from scalelatent.errors import DataError

    x = np.random.default_rng(0).normal(size=(40, 3)).astype("f4")
    y, weight = np.arange(40) % 2, np.ones(40)
    options = {"device": "cpu", "n_jobs": 1, "random_state": 0, "max_iter": 2}
    expected = CapsuleRegression(**options).fit(x, y, sample_weight=weight)
    moved = [fake.asarray(a) for a in (x, y, weight)]
    found = CapsuleRegression(**options).fit(*moved[:2], sample_weight=moved[2])
    np.testing.assert_array_equal(found.W_, expected.W_)
    np.testing.assert_array_equal(found.predict(x), expected.predict(x))
    given = Dataset.from_arrays(fake.asarray(x), fake.asarray(y), sample_weight=fake.asarray(weight))
    np.testing.assert_array_equal(given.read_x(0, 40), x)

    class DeviceNDArray:
        __cuda_array_interface__ = None

    with pytest.raises(DataError, match=r"X is a .*DeviceNDArray on a GPU, .*cupy.asarray\(X\)"):
        expected.predict(DeviceNDArray())


# -- models on the GPU give the results of the host ----------------------------------------------------------


def _block(rows, features, weighted=False, classes=2, seed=0):
    from scalelatent.contract.learners import Block

    rng = np.random.default_rng(seed)
    y = np.arange(rows, dtype=np.int32) % classes
    x = rng.normal(size=(rows, features)) + y[:, None]
    return Block(x, y, rng.gamma(1.0, size=rows) if weighted else None, 0)


def _accumulate(reduction, block, backend, state=None):
    from scalelatent.contract.stats import Stats

    stats = Stats.zeros(reduction.layout())
    reduction.accumulate(reduction.prepare(state, backend), block, stats)
    return stats


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [0, 3])
def test_second_moments_on_the_gpu_equal_the_hosts(backend, weighted, classes):
    from scalelatent.engine.backend import HostBackend
    from scalelatent.reductions.moments import SecondMoments

    block = _block(70, 5, weighted, classes or 2)
    reduction = SecondMoments(5, classes, np.array([1.0, 2.0, 0.5]) if classes and weighted else None)
    got, want = (_accumulate(reduction, block, b) for b in (backend, HostBackend()))
    np.testing.assert_allclose(got.vector, want.vector, rtol=1e-12)


@pytest.mark.parametrize("architecture", ["multiclass", "one_vs_all", "all_vs_all"])
@pytest.mark.parametrize("nu", [0.0, 0.8])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_pass_and_its_predictions_equal_the_hosts(backend, architecture, nu, weighted):
    from scalelatent.engine.backend import HostBackend
    from scalelatent.models.capsule.model.em import CapsulePass, initial_state
    from scalelatent.models.capsule.model.members import build_members
    from scalelatent.models.capsule.model.predict import CapsuleRows, RowFrame

    members = build_members(architecture, 4, 3)
    rng = np.random.default_rng(5)
    w = rng.normal(size=(members.total_dim, 6)) / 2
    block = _block(301, 6, weighted, classes=4)
    class_weight = np.array([1.0, 2.0, 0.5, 1.0]) if weighted else None
    reduction = CapsulePass(members, 6, np.array([nu]), class_weight, train=True)
    state = initial_state(w, members.n_members)
    got, want = (_accumulate(reduction, block, b, state) for b in (backend, HostBackend("reference")))
    for field, tolerance in (("sums", 1e-5), ("rows", 0), ("delta", 1e-5)):
        scale = np.abs(want[field]).max()
        np.testing.assert_allclose(got[field], want[field], rtol=0, atol=tolerance * scale, err_msg=field)
    for what in ("probabilities", "latents"):
        rows = CapsuleRows(members, w, RowFrame(), what)
        got_rows, want_rows = (rows.apply(rows.prepare(b), block) for b in (backend, HostBackend()))
        np.testing.assert_allclose(got_rows, want_rows, rtol=0, atol=2e-5)


@pytest.mark.parametrize("stored", [np.float32, np.uint8])
def test_a_whole_fit_equals_the_hosts(fake, stored):
    rng = np.random.default_rng(7)
    y = np.arange(600) % 3
    x = np.clip(rng.normal(size=(600, 8)) * 20 + 60 * (y[:, None] == np.arange(8) % 3) + 60, 0, 255).astype(
        stored
    )
    fits = {}
    settings = {"capsule_dim": 2, "max_iter": 8, "projection": 5, "random_state": 0, "n_jobs": 1}
    for device in ("cpu", "gpu"):
        model = sl.CapsuleRegression(device=device, nu_schedule=[(0.8, 3), (0.0, 3)], **settings)
        fits[device] = model.fit(x, y, validation=(x[:100], y[:100]))
    assert {"capsule_factors_f32", "capsule_dense_f32", "gemm", "take"} <= {name for name, _ in fake.LAUNCHED}
    cpu, gpu = fits["cpu"], fits["gpu"]
    assert gpu.n_iter_ == cpu.n_iter_
    np.testing.assert_allclose(gpu.W_, cpu.W_, rtol=0, atol=1e-4 * np.abs(cpu.W_).max())
    for a, b in zip(gpu.history_, cpu.history_, strict=True):
        np.testing.assert_allclose(a["objective"], b["objective"], rtol=1e-5)
    np.testing.assert_allclose(gpu.predict_proba(x), cpu.predict_proba(x), atol=1e-4)
    np.testing.assert_array_equal(gpu.predict(x), cpu.predict(x))


@pytest.mark.parametrize("room", [1, 3])
def test_a_full_gpu_computes_a_pass_in_halves(fake, room):
    """A block that does not fit is split in halves: no row counts twice, and sums agree within TOLERANCE."""
    from scalelatent.engine.backend import CupyBackend
    from scalelatent.engine.dask.pools import TOLERANCE
    from scalelatent.engine.passes import PassContext, Span, make_stage
    from scalelatent.engine.reading import StopEvent
    from scalelatent.models.capsule.model.em import CapsulePass, initial_state
    from scalelatent.models.capsule.model.members import build_members

    members = build_members("multiclass", 4, 3)
    block = _block(20_000, 6, classes=4)
    work = CapsulePass(members, 6, np.array([0.8]), None, train=True)
    data = sl.Dataset.from_arrays(block.x.astype("f4"), block.y)
    stage = make_stage("capsule_estep", {"train": work}, {"train": data}, "cpu", data.classes,
                       block_rows=8192, leaf_rows=16384)  # fmt: skip
    state = initial_state(np.random.default_rng(5).normal(size=(members.total_dim, 6)) / 2, members.n_members)

    def sums(backend):
        return PassContext(stage, state, backend, None).run_span(Span("train", 1, 0), StopEvent())

    want = sums(CupyBackend())
    small = CupyBackend()
    fake.POOL.limit = room * 2048 * members.total_dim * 4  # Latents, the largest array, of room * 2048 rows.
    got = sums(small)
    assert small.row_limits == {"capsule_estep/train": 2048 if room == 1 else 4096}
    np.testing.assert_allclose(got[:-1], want[:-1], rtol=0, atol=TOLERANCE * np.abs(want[:-1]).max())
    assert got[-2] == want[-2] == 20_000
    np.testing.assert_array_equal(sums(small)[:-1], got[:-1])


# -- sizes of blocks on a GPU --------------------------------------------------------------------------------


def _choose_blocks(device: str, run_dir=None, resume=False) -> tuple[int, dict]:
    """Return the block size and the grid that a session chooses for a pass over 200,000 rows of 784 bytes."""
    from scalelatent.estimators.session import FitSession
    from scalelatent.reductions.moments import SecondMoments

    rows = sl.Dataset.from_arrays(np.broadcast_to(np.uint8(0), (200_000, 784)))
    with FitSession("toy", device=device, n_jobs=1, run_dir=run_dir, resume=resume) as session:
        session.begin(0, {}, {})
        grid = session.stage("pass", {"train": SecondMoments(784, 0)}, {"train": rows}).grids["train"]
        return grid.block_rows, session.grid


def test_blocks_of_passes_suit_gpus_by_default(fake):
    assert _choose_blocks("gpu")[0] == _choose_blocks("auto")[0] == 32_768
    assert _choose_blocks("cpu")[0] == 2048
    fake.Device.count = 0
    assert _choose_blocks("auto")[0] == 2048


def test_a_resumed_run_keeps_its_blocks_on_another_device(fake, tmp_path):
    """A run folder may have sums of the first half of a pass, one per leaf (fixed range of rows).

    The sums depend on the block size, so the resumed half must use the same one.
    """
    for first, resumed in (("gpu", "cpu"), ("auto", "cpu"), ("cpu", "gpu")):
        folder = tmp_path / f"{first}-{resumed}"
        assert _choose_blocks(first, folder) == _choose_blocks(resumed, folder, resume=True)


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("device", ["auto", "gpu", "cpu"])
def test_blocks_of_maps_suit_the_device(fake, monkeypatch, tmp_path, out, device):
    from scalelatent.models.capsule.model.predict import CapsuleRows

    rng = np.random.default_rng(0)
    x = rng.normal(size=(9000, 600)).astype(np.float32)
    model = sl.CapsuleRegression(device="cpu", capsule_dim=2, max_iter=1, projection=None, random_state=0)
    model.fit(x[:500], np.arange(500) % 2).set_params(device=device, n_jobs=1)
    seen, apply = [], CapsuleRows.apply
    monkeypatch.setattr(
        CapsuleRows, "apply", lambda self, p, block: (seen.append(len(block.x)), apply(self, p, block))[1]
    )
    model.predict_proba(x, **({"out": tmp_path / "p.zarr"} if out else {}))
    assert max(seen) == (1747 if device == "cpu" else 9000)


# -- the commands doctor and warm ----------------------------------------------------------------------------


def test_the_doctor_multiplies_and_compiles_on_every_gpu(fake, monkeypatch):
    from scalelatent.deploy import checks, probes

    def find():
        (check,) = [check for check in checks.CHECKS if (check.where, check.name) == ("here", "gpu")]
        finding, *memory = check.findings(".")
        assert [one.check for one in memory] == ["gpu memory"] * (2 if finding.status == "ok" else 0)
        return finding

    wheel = SimpleNamespace(metadata={"Name": "cupy-cuda13x"}, version="14.2")
    monkeypatch.setattr(probes.metadata, "distributions", lambda: [wheel])
    fake.Device.count = 2
    fake.LAUNCHED.clear()
    assert find().status == "ok"
    assert "each GPU compiles and computes" in find().found
    assert [name for name, _ in fake.LAUNCHED].count("gemm") == 4
    monkeypatch.setattr(fake.cublas, "create", _raises(ImportError("libcublasLt.so.13 is missing")))
    assert find().status == "fail"
    assert "libcublasLt.so.13 is missing" in find().found
    assert "scalelatent[cuda12]" in find().fix


def test_warm_compiles_the_cuda_files(fake, monkeypatch):
    from scalelatent.deploy import warm

    monkeypatch.setattr(warm, "_find_uncompiled", lambda kinds: (3, []))
    fake.COMPILED.clear()
    assert sorted(warm.warm()["cuda"]) == ["capsule", "crbm", "hcn", "linear_mixture", "mbn"]
    assert len(set(fake.COMPILED)) == 5
    assert warm.warm(["mbn"])["cuda"] == ["mbn"]
    fake.Device.count = 0
    assert warm.warm(["mbn"])["cuda"] == []
