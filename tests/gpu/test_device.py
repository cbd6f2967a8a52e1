"""The CuPy backend over its stand-in: layouts, staging, streams, messages; whole fits against the host."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.errors import RunError
from scalelatent.models.capsule.kernels.squash import squash_table


@pytest.fixture
def backend(fake):
    from scalelatent.engine.backend import CupyBackend

    return CupyBackend()


def test_it_has_every_method_of_the_host_backend(backend):
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


def test_images_move_as_bytes(backend, fake, monkeypatch):
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


def test_buffers_are_used_again(backend):
    first = backend.buffer("h", (4, 100), np.float32)
    again = backend.buffer("h", (3, 50), np.float32)
    assert again.data.ptr == first.data.ptr
    assert again.flags.c_contiguous
    assert backend.buffer("h", (4, 100), np.float64).dtype == np.float64
    assert backend.buffer("other", (0, 5), np.float32).shape == (0, 5)


def test_a_device_array_stays_where_it_is(backend, fake):
    a = fake.zeros((3, 4), np.float32)
    assert backend.asarray(a, np.float32, "x") is a
    assert backend.asarray(a.T, np.float32).flags.c_contiguous
    assert backend.asarray(fake.zeros((3, 4), np.uint8), np.float32, "x").dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_every_layout(backend, fake, dtype):
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


def test_empty_products(backend, fake):
    assert backend.matmul(fake.zeros((3, 2)), fake.zeros((2, 0)), "out").shape == (3, 0)
    np.testing.assert_array_equal(
        backend.matmul(fake.zeros((3, 0)), fake.zeros((0, 4)), "out").get(), np.zeros((3, 4))
    )


def test_gemm_call_is_what_blas_understands():
    """The numbers handed to cuBLAS, handed to the BLAS of scipy instead."""
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


def test_take_gathers_rows_of_either_side(backend, fake):
    x = np.random.default_rng(3).normal(size=(9, 4)).astype(np.float32)
    for rows in (np.array([3, 1, 8]), np.array([0], np.int32), np.empty(0, np.int64)):
        for index in (rows, fake.asarray(rows)):
            np.testing.assert_array_equal(backend.take(fake.asarray(x), index, "t").get(), x[rows])


def test_tables_move_once(backend, fake):
    table = squash_table(6)
    moved = backend.table(table)
    assert isinstance(moved.coefficients, fake.ndarray)
    assert moved.scale == table.scale
    assert backend.table(table) is moved


def test_all_work_runs_on_the_instances_own_stream(backend, fake):
    from scalelatent.reductions.moments import SecondMoments

    fake.Stream(null=True).use()
    fake.LAUNCHED.clear()
    block = _block(50, 6, weighted=True)
    _accumulate(SecondMoments(6, 2), block, backend)
    assert {stream for _, stream in fake.LAUNCHED} == {backend.stream.ptr}
    assert backend.stream.ptr != 0


def test_memory_at_its_end_says_which_block_size_to_set(backend, fake):
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


def test_an_error_of_the_card_is_named(backend, fake, monkeypatch):
    def fail(*_args, **_kwargs):
        raise fake.CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    monkeypatch.setattr(fake.ndarray, "get", fail)
    with pytest.raises(
        RunError, match=r"GPU 0 \(emulated\).*cudaErrorIllegalAddress.*start the worker again and resume"
    ):
        backend.to_host(fake.zeros(3))


def test_a_compiler_that_does_not_know_the_text_is_named(backend, fake, monkeypatch):
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


def test_without_cupy_or_device_it_says_what_to_do(fake, monkeypatch):
    from scalelatent.engine.backend import CupyBackend

    monkeypatch.setattr(fake.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(RunError, match="nvidia-smi"):
        CupyBackend()

    def no_driver():
        raise fake.CUDARuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(fake.runtime, "getDeviceCount", no_driver)
    with pytest.raises(RunError, match="cudaErrorInsufficientDriver.*device='cpu'"):
        CupyBackend()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RunError, match=r"scalelatent\[cuda12\]"):
        CupyBackend()


# -- the models over it
# ---------------------------------------------------------------------------------------------------


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
def test_second_moments(backend, weighted, classes):
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
    from scalelatent.models.capsule.model.predict import CapsuleRows

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
        rows = CapsuleRows(members, w, None, what)
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
def test_a_full_card_computes_a_pass_in_halves(fake, room):
    """The whole E-step: nothing is counted twice, and sums stay within the stated tolerance."""
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
    fake.POOL.limit = room * 2048 * members.total_dim * 4  # of the rows a block's H takes the most
    got = sums(small)
    assert small.row_limits == {"capsule_estep/train": 2048 if room == 1 else 4096}
    np.testing.assert_allclose(got[:-1], want[:-1], rtol=0, atol=TOLERANCE * np.abs(want[:-1]).max())
    assert got[-2] == want[-2] == 20_000
    np.testing.assert_array_equal(sums(small)[:-1], got[:-1])
