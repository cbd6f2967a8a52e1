"""Random streams are independent, kernels are found, thread pools are limited, and callbacks are called."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from dask.system import cpu_count
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.contract.kinds import find_kernels, list_kernels
from scalelatent.engine import backend as backends
from scalelatent.engine.backend import HostBackend, find_kernel, make_backend, resolve_device
from scalelatent.engine.callbacks import Callback, Callbacks
from scalelatent.engine.threads import call_with_timeout, resolve_jobs, single_threaded
from scalelatent.errors import RunError
from scalelatent.kernels.streams import draw_seed, resolve_seed, stream

# -- streams of random numbers -------------------------------------------------------------------------------

WORD = st.integers(0, 2**64 - 1)
STREAM_ARGUMENTS = st.tuples(
    WORD, st.sampled_from(["start", "data", "noise"]), WORD, WORD
)  # fmt: skip


@given(STREAM_ARGUMENTS, STREAM_ARGUMENTS)
def test_streams_repeat_and_differ(a: tuple, b: tuple) -> None:
    first = stream(*a).integers(2**63, size=8)
    np.testing.assert_array_equal(first, stream(*a).integers(2**63, size=8))
    assert (a == b) == np.array_equal(first, stream(*b).integers(2**63, size=8))


def test_neighbouring_streams_do_not_overlap() -> None:
    """The index of a stream is in a high word of the counter.

    A long draw of one stream therefore never reaches the next stream.
    """
    draws = [stream(1, "start", 0, index).integers(2**63, size=5000) for index in range(4)]
    assert len(np.unique(np.concatenate(draws))) == 20_000


def test_streams_are_uncorrelated() -> None:
    a, b = (stream(1, "start", 0, i).normal(size=50_000) for i in (0, 1))
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(50_000)


def test_streams_are_the_same_on_every_machine() -> None:
    assert stream(7, "start", 2, 3).integers(2**32, size=3).tolist() == GOLDEN


GOLDEN = [2846696873, 89771030, 3942453723]  # Numbers that numpy's generator Philox4x64-10 gave once


def test_negative_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="seed=-1"):
        stream(-1, "start")


def test_seeds_are_resolved_from_every_kind_of_random_state() -> None:
    assert resolve_seed(7) == resolve_seed(np.int64(7)) == 7
    assert resolve_seed(np.random.RandomState(1)) == resolve_seed(np.random.RandomState(1))
    assert resolve_seed(np.random.default_rng(1)) == resolve_seed(np.random.default_rng(1))
    assert len({draw_seed() for _ in range(20)} | {resolve_seed(None) for _ in range(20)}) > 30


@pytest.mark.parametrize("bad", [-1, 1.5, "7", True, [1]])
def test_invalid_seeds_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="random_state="):
        resolve_seed(bad)


# -- backends and their kernels ------------------------------------------------------------------------------


# Kernels that exist only for GPUs: one launch computes several chains (parts of a batch), or the next
# parameters. The host computes the same results with other code; tests/gpu/test_crbm.py and
# tests/gpu/test_crbm_learning.py compare the results.
ONLY_ON_GPU = {"crbm_add_chain_gradients", "crbm_ascend_chains"}


def test_every_kernel_has_all_three_bodies_and_host_bodies_load() -> None:
    assert set(list_kernels()) > ONLY_ON_GPU
    for name in set(list_kernels()) - ONLY_ON_GPU:
        bodies = find_kernels(name)
        assert set(bodies) == {"reference", "numba", "cupy"}
        assert callable(find_kernel(name, "reference"))
        assert callable(find_kernel(name, "numba"))


@pytest.mark.parametrize(
    ("name", "backend", "message"),
    [
        (
            "capsule_residual",
            "numba",
            "'capsule_residual' has no body for backend 'numba'; there are: .*capsule_residuals",
        ),
        ("capsule_residuals", "opencl", "no body for backend 'opencl'; there are: cupy, numba, reference"),
    ],
)
def test_the_error_of_an_unknown_kernel_lists_the_known_ones(name: str, backend: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        find_kernel(name, backend)


def test_a_missing_backend_is_never_replaced_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "gpu_count", lambda: 0)
    with pytest.raises(RunError, match=r"device='gpu'.*scalelatent\[cuda12\].*device='cpu'"):
        resolve_device("gpu")
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    monkeypatch.setattr(backends, "gpu_count", lambda: 1)
    assert (resolve_device("auto"), resolve_device("gpu"), resolve_device("cpu")) == ("gpu", "gpu", "cpu")
    with pytest.raises(ValueError, match="device='cuda' is not one of auto, cpu, gpu"):
        resolve_device("cuda")


@pytest.mark.parametrize("name", ["numba", "reference"])
def test_arrays_of_the_host_backend_are_reused_buffers(name: str) -> None:
    host = HostBackend(name)
    wanted = np.float64 if name == "reference" else np.float32
    x = np.arange(12, dtype="u1").reshape(4, 3)
    got = host.asarray(x, np.float32, "x")
    assert got.dtype == wanted
    np.testing.assert_array_equal(got, x)
    assert host.asarray(got, np.float32) is got  # The array needs no conversion.
    # The buffer named x is used again.
    assert np.shares_memory(host.asarray(x + 1, np.float32, "x"), got)
    fortran = np.asfortranarray(np.arange(12, dtype=wanted).reshape(4, 3))
    assert host.asarray(fortran, np.float32).flags.c_contiguous
    rows = np.array([2, 0])
    np.testing.assert_array_equal(host.take(fortran, rows, "t"), fortran[rows])
    a, b = np.ones((2, 3), wanted), np.arange(6, dtype=wanted).reshape(3, 2)
    np.testing.assert_array_equal(host.matmul(a, b, "m"), a @ b)
    assert host.to_host(a) is a


def test_buffers_grow_and_shrink() -> None:
    host = make_backend("cpu")
    small = host.buffer("b", (2, 3), np.float32)
    assert np.shares_memory(small, host.buffer("b", (6,), np.float32))
    assert not np.shares_memory(small, host.buffer("b", (7,), np.float32))
    assert host.buffer("b", (2, 2), np.float64).dtype == np.float64
    assert not np.shares_memory(host.buffer("a", (2,), np.float32), host.buffer("b", (2,), np.float32))


# -- limits of thread pools ----------------------------------------------------------------------------------


def test_thread_pools_have_one_thread_inside_and_are_restored() -> None:
    import zarr
    from threadpoolctl import threadpool_info

    def pools() -> list[int]:
        return [p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"]

    before, of_zarr = pools(), zarr.config.get("threading.max_workers")
    with pytest.raises(RuntimeError, match="inside"), single_threaded():
        assert set(pools()) <= {1}
        assert zarr.config.get("threading.max_workers") == 1
        raise RuntimeError("inside")
    assert (pools(), zarr.config.get("threading.max_workers")) == (before, of_zarr)


def run_single_threaded(work: Any) -> tuple[threading.Thread, threading.Event, threading.Event]:
    """Run a thread inside the context ``work()``; return the thread and two events.

    The first event is set when the thread has entered; setting the second event lets the thread leave.
    """
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with work():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(30)
    return thread, inside, leave


@pytest.mark.parametrize("first_out", ["first", "second"])
def test_thread_pools_are_limited_until_the_last_user_leaves(first_out: str) -> None:
    """Two users overlap, such as tasks of one worker; the limit stays when the first of them leaves."""
    import zarr
    from threadpoolctl import ThreadpoolController

    blas = ThreadpoolController().select(user_api="blas")

    def pools() -> list[int]:
        blas_now = {p["num_threads"] for p in ThreadpoolController().info() if p["user_api"] == "blas"}
        return [*sorted(blas_now), zarr.config.get("threading.max_workers") or 0]

    with blas.limit(limits=3), zarr.config.set({"threading.max_workers": 7}):
        before = pools()
        assert before != [1, 1]
        entered = [run_single_threaded(single_threaded), run_single_threaded(single_threaded)]
        assert pools() == [1, 1]
        for thread, _, leave in entered if first_out == "first" else entered[::-1]:
            assert pools() == [1, 1]
            leave.set()
            thread.join(30)
        assert pools() == before


def test_a_call_has_a_timeout() -> None:
    assert call_with_timeout(30, lambda: "answer") == "answer"
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(30, lambda: 1 // 0)
    never = threading.Event()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.05 s"):
        call_with_timeout(0.05, never.wait)
    assert time.monotonic() - begin < 10
    never.set()


def test_n_jobs_is_resolved_to_a_number_of_threads() -> None:
    cores = cpu_count()
    assert 1 <= cores <= (os.cpu_count() or 1)
    assert resolve_jobs(None) == resolve_jobs(-1) == cores
    assert resolve_jobs(3) == 3
    assert resolve_jobs(-2) == max(1, cores - 1)
    assert resolve_jobs(-1000) == 1


def test_n_jobs_respects_a_cpu_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask.system.cpu_count", lambda: 3)  # Dask reads the affinity and the control group.
    assert [resolve_jobs(n) for n in (None, -1, -2, 5)] == [3, 3, 2, 5]


def resolve_in_process(n_jobs: int | None) -> int:
    return resolve_jobs(n_jobs)


@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_n_jobs_follows_joblibs_nesting(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a parallel search, whose processes already use the cores, a fit has one thread by default."""
    from joblib import Parallel, delayed, parallel_config

    with parallel_config(backend=backend, n_jobs=2):
        assert resolve_jobs(None) == min(2, cpu_count())
        assert Parallel()(delayed(resolve_in_process)(n) for n in (None, 3, None)) == [1, 3, 1]
    with parallel_config(n_jobs=1):
        assert resolve_jobs(None) == 1
    with parallel_config(backend=backend):
        assert resolve_jobs(None) == cpu_count()
    monkeypatch.setattr("dask.system.cpu_count", lambda: 8)
    with parallel_config(backend=backend, n_jobs=3):
        assert (resolve_jobs(None), resolve_jobs(-1)) == (3, 8)
    assert resolve_jobs(None) == 8


@pytest.mark.parametrize("bad", [0, 1.5, True, "many"])
def test_invalid_n_jobs_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"n_jobs={bad!r}"):
        resolve_jobs(bad)


# -- callbacks -----------------------------------------------------------------------------------------------

HOOKS = ("on_run_start", "on_fit_start", "on_stage", "on_progress", "on_pass_end", "on_checkpoint")
HOOKS += ("on_event", "on_fit_end", "on_run_end")


class Log(Callback):
    def __init__(self, name: str, log: list, stop: bool = False) -> None:
        self.name, self.log, self.stop = name, log, stop

    def on_pass_end(self, record: dict[str, Any]) -> bool:
        self.log.append((self.name, "on_pass_end"))
        return self.stop


for _hook in HOOKS:
    if _hook != "on_pass_end":
        setattr(Log, _hook, lambda self, info, hook=_hook: self.log.append((self.name, hook)))


@pytest.mark.parametrize("hook", HOOKS)
def test_callbacks_are_called_in_order(hook: str) -> None:
    log: list = []
    getattr(Callbacks([Log("a", log), Log("b", log)]), hook)({})
    assert log == [("a", hook), ("b", hook)]


def test_any_callback_may_stop_and_all_are_called() -> None:
    log: list = []
    assert Callbacks([Log("a", log, stop=True), Log("b", log)]).on_pass_end({}) is True
    assert len(log) == 2
    assert Callbacks(Log("a", log)).on_pass_end({}) is False
    assert Callbacks().on_pass_end({}) is False


@pytest.mark.parametrize("bad", [[print], [Callback], ["x"], [None]])
def test_an_object_that_is_not_a_callback_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"callbacks: .* is not a scalelatent Callback"):
        Callbacks(bad)
