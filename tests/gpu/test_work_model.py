"""The work that benchmarks/gpu_model.py predicts equals the counts of the stand-in for CuPy.

The tests compare launches, copies, waits, and the operations of products.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def model():
    path = BENCHMARKS / "gpu_model.py"
    if not path.exists():
        pytest.skip("benchmarks/ is not part of this copy")
    spec = importlib.util.spec_from_file_location("gpu_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_model"] = module
    spec.loader.exec_module(module)
    return module


class NoKernels:
    """Stand-in for the emulator that checks and runs no kernel, for tests that only count launches."""

    def check(self, *arguments) -> None:
        pass

    launch = check


@pytest.fixture
def emulated():
    return NoKernels()


class Counts:
    """Counts of launches, copies and waits of the stand-in for CuPy."""

    def __init__(self, fake, monkeypatch) -> None:
        self.uploads = self.gemm_flops = self.waits = self.copied_bytes = 0
        self._fake = fake
        asarray, matmul, gemm = fake.asarray, fake.matmul, fake.cublas.gemmEx
        upload, assign = fake.MemoryPointer.copy_from_host_async, fake.ndarray.set

        def counted_asarray(a, dtype=None):
            if not isinstance(a, fake.ndarray):
                self.uploads += 1
            return asarray(a, dtype)

        def counted_matmul(a, b, out=None):
            self.gemm_flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            return matmul(a, b, out)

        def counted_gemm(*arguments):
            m, n, k = arguments[3:6]
            self.gemm_flops += 2 * m * n * k
            return gemm(*arguments)

        def counted_upload(pointer, *arguments):
            self.uploads += 1
            return upload(pointer, *arguments)

        def counted_set(array, *arguments, **more):
            self.uploads += 1
            return assign(array, *arguments, **more)

        monkeypatch.setattr(fake, "asarray", counted_asarray)
        monkeypatch.setattr(fake, "matmul", counted_matmul)
        monkeypatch.setattr(fake.cublas, "gemmEx", counted_gemm)
        monkeypatch.setattr(fake.MemoryPointer, "copy_from_host_async", counted_upload)
        monkeypatch.setattr(fake.ndarray, "set", counted_set)

    def measure_second_call(self, call) -> tuple[int, int, int, int]:
        """Call twice; return launches, uploads, downloads and flops of products of the second call.

        The first call is not counted, because it also copies tables.
        """
        call()
        self.uploads = self.gemm_flops = 0
        self._fake.LAUNCHED.clear()
        self._fake.EXPRESSIONS.clear()
        self._fake.WAITS.clear()
        self._fake.COPIED.update(set=0, get=0)
        call()
        self.waits, self.copied_bytes = len(self._fake.WAITS), sum(self._fake.COPIED.values())
        names = [name for name, _ in self._fake.LAUNCHED]
        downloads = names.count("get")
        return len(names) - downloads, self.uploads, downloads, self.gemm_flops


@pytest.fixture
def counts(fake, monkeypatch):
    return Counts(fake, monkeypatch)


def expected(work) -> tuple[int, int, int, int]:
    return work.launches, work.uploads, work.downloads, work.gemm_flops


def import_gpu_kernels(name: str):
    return importlib.import_module(f"scalelatent.models.{name}.kernels.gpu")


def test_the_model_counts_the_work_of_capsule_residuals(fake, counts, model, cases, emulate):
    fake.RawModule.library = emulate("capsule")
    gpu = import_gpu_kernels("capsule")
    names = ("y", "weight", "dims", "labels", "nu", "table")
    for nu in (0.0, 0.8):
        case = cases.make_case("d2", 200, nu, "float32")
        # Copy the table to the GPU before counting, as the backend does once.
        case["table"] = replace(case["table"], coefficients=fake.asarray(case["table"].coefficients))
        found = []

        def call(case=case, found=found):
            h = fake.asarray(case["h"])
            before = counts.uploads
            active, _ = gpu.residuals(h, *(case[k] for k in names))
            found.append(None if active is None else len(active))
            counts.uploads -= before  # Do not count the upload of h.

        got = counts.measure_second_call(call)
        active = found[-1]
        assert active is None or 0 < active < 200
        assert got == expected(model.capsule_residuals(200, 20, 1, active))


@pytest.mark.parametrize("stored", ["u1", "f4"])
@pytest.mark.parametrize("nu", [0.0, 0.8])
def test_the_model_counts_the_work_of_a_capsule_block(fake, counts, model, emulate, nu, stored):
    from scalelatent.contract.learners import Block
    from scalelatent.contract.stats import Stats
    from scalelatent.engine.backend import CupyBackend
    from scalelatent.models.capsule.model.em import CapsulePass, initial_state
    from scalelatent.models.capsule.model.members import build_members

    fake.RawModule.library = emulate("capsule")
    members, rng = build_members("multiclass", 10, 2), np.random.default_rng(0)
    x = (rng.random((3000, 30)) * 255).astype(stored)  # Copies as large as x use page-locked memory.
    y, w = (np.arange(3000) % 10).astype("i4"), rng.normal(size=(20, 30)) / 100
    reduction, backend = CapsulePass(members, 30, np.array([nu]), None, True), CupyBackend()
    prepared = reduction.prepare(initial_state(w, 1), backend)
    stats = Stats.zeros(reduction.layout())
    got = counts.measure_second_call(lambda: reduction.accumulate(prepared, Block(x, y, None, 0), stats))
    # Both calls of measure_second_call added to the sums, so one call counted half of these rows.
    active = None if nu == 0 else int(stats["sums"][0, 2]) // 2
    assert active is None or 0 < active < 3000
    work = model.capsule_block(3000, 30, 20, 1, active, x.itemsize)
    assert got == expected(work)
    assert counts.copied_bytes == work.copied_bytes
    assert counts.waits == work.downloads == (1 if nu == 0 else 2)
    before = model.earlier_capsule_block(3000, 30, 20, 1, active, x.itemsize)
    assert (before.uploads, before.downloads) == (3, 2)


@pytest.mark.parametrize("stored", ["u1", "f4"])
def test_the_model_counts_the_work_of_a_map_of_capsules(fake, counts, model, stored):
    from scalelatent.contract.learners import Block
    from scalelatent.engine.backend import CupyBackend
    from scalelatent.models.capsule.model.members import build_members
    from scalelatent.models.capsule.model.predict import CapsuleRows, RowFrame

    rng = np.random.default_rng(0)
    x = (rng.random((3000, 30)) * 255).astype(stored)
    members = build_members("multiclass", 10, 2)
    row_map = CapsuleRows(members, rng.normal(size=(20, 30)), RowFrame(), "latents")
    prepared = row_map.prepare(CupyBackend())
    got = counts.measure_second_call(lambda: row_map.apply(prepared, Block(x, None, None, 0)))
    work = model.capsule_map_block(3000, 30, 20, x.itemsize)
    assert (got[0], got[1], got[3]) == (work.launches, work.uploads, work.gemm_flops)
    # The stand-in does not count the download of one number by the check for finite numbers.
    assert got[2] + 1 == work.downloads == 2
    assert counts.copied_bytes == work.copied_bytes


def test_rows_are_copied_ahead_with_the_same_launches_and_waits(fake, counts, model, emulate, monkeypatch):
    import scalelatent as sl
    from scalelatent.engine import backend
    from scalelatent.engine.passes import PassContext, Span, make_stage
    from scalelatent.engine.reading import StopEvent
    from scalelatent.models.capsule.model.em import CapsulePass, initial_state
    from scalelatent.models.capsule.model.members import build_members

    monkeypatch.setattr(backend, "ROWS_SHARE", 0.0)
    fake.RawModule.library = emulate("capsule")
    rng, members = np.random.default_rng(0), build_members("multiclass", 10, 2)
    data = sl.Dataset.from_arrays((rng.random((6144, 30)) * 255).astype("u1"), np.arange(6144) % 10)
    work = CapsulePass(members, 30, np.array([0.0]), None, True)
    stage = make_stage("toy", {"train": work}, {"train": data}, "gpu", data.classes, block_rows=2048)
    context = PassContext(
        stage, initial_state(rng.normal(size=(20, 30)) / 100, 1), backend.CupyBackend(), None
    )
    span = Span("train", stage.grids["train"].depth, 0)
    context.run_span(span, StopEvent())  # This uncounted call prepares the state.
    got = counts.measure_second_call(lambda: context.run_span(span, StopEvent()))
    block = model.copy_rows_ahead(model.capsule_block(2048, 30, 20, 1, None, 1), 2048 * 30)
    assert got == expected(block * 3)
    assert counts.copied_bytes == 3 * (block.copied_bytes + block.ahead_bytes)
    assert counts.waits == 3
    card = model.H100
    before = model.copy_rows_first(model.capsule_block(65_536, 784, 20, 1, None, 1), 65_536.0 * 784)
    now = model.copy_rows_ahead(model.capsule_block(65_536, 784, 20, 1, None, 1), 65_536.0 * 784)
    assert now.find_bottleneck(card) == before.find_bottleneck(card)
    assert now.predicted_seconds(card) < before.predicted_seconds(card) / 3
    assert model.COPY_THREADS == backend.COPY_THREADS


@pytest.mark.parametrize("on_card", [True, False])
def test_the_model_counts_the_work_of_bootstrap_networks(fake, counts, model, monkeypatch, on_card):
    from scalelatent.engine.backend import CupyBackend
    from scalelatent.kernels.sparse_rows import CsrRows
    from scalelatent.models.mbn.model.layers import CodesBelow, make_layers

    gpu = import_gpu_kernels("mbn")
    monkeypatch.setattr(gpu, "MAX_SCORES", 200)
    monkeypatch.setattr(model, "TILE", 200)
    rng = np.random.default_rng(0)
    move = fake.asarray if on_card else np.asarray
    for stored in ("u1", "f4"):
        x, w = ((rng.random(shape) * 99).astype(stored) for shape in ((50, 9), (20, 5)))
        packed, rows, columns = gpu.make_bank(w, "euclidean"), move(x), np.arange(5)
        work = model.mbn_nearest(50, 9, 5, 20, x.itemsize, on_card, stored == "u1")
        assert counts.measure_second_call(
            lambda b=packed, r=rows, c=columns: gpu.nearest(r, c, b)
        ) == expected(work)
    parts = np.ones(12, "f4"), np.zeros(12, "i4"), np.arange(0, 13, 2, dtype="i4")
    packed = gpu.make_sparse_bank(CsrRows(*parts, (6, 4)), np.arange(4), "euclidean")
    rows = CsrRows(*(move(part) for part in parts), (6, 4))
    work = model.mbn_nearest_sparse(6, 12, on_card)
    assert counts.measure_second_call(lambda: gpu.nearest_sparse(rows, packed)) == expected(work)
    below, key = fake.asarray(rng.integers(0, 8, (50, 6)).astype("u2")), np.arange(2, dtype=np.uint64)
    codes = fake.asarray(below.get()[:8].reshape(2, 4, 6))
    assert counts.measure_second_call(lambda: gpu.choose_masks(key, 2, 0, 2, 48, 24)) == expected(
        model.mbn_choose_masks(2, 6, 8)
    )
    for n, m in ((50, 4), (100, 4)):  # the second draw is of few numbers, 4 of 100
        by_mask = 16 * m >= n
        assert counts.measure_second_call(
            lambda size=(n, m, by_mask): gpu.choose_numbers(key, 2, 0, 2, *size)
        ) == expected(model.mbn_choose_numbers(2, n, m))
    units = gpu.choose_masks(key, 2, 0, 2, 48, 24).reshape(2, 6, 8)
    assert counts.measure_second_call(lambda: gpu.make_lists(codes, units)) == expected(
        model.mbn_make_lists(2, 6, 4, 8)
    )
    assert counts.copied_bytes == model.mbn_make_lists(2, 6, 4, 8).copied_bytes
    lists, x = gpu.make_lists(codes, units), fake.asarray(rng.integers(0, 8, (7, 6)).astype("i4"))
    assert counts.measure_second_call(lambda: gpu.nearest_codes(x, lists)) == expected(
        model.mbn_nearest_codes(7, 6, 2)
    )
    options = {"n_features": 9, "n_clusterings": 6, "fraction": 0.5, "metric": "euclidean", "seed": 3}
    layer = make_layers([8, 4], n_rows=50, csr=False, dtype="float32", **options)[1]
    backend = CupyBackend()
    sets = CodesBelow(layer, below, backend)
    group = model.mbn_upper_group(7, 6, 4, 8, 2)
    assert counts.measure_second_call(lambda: layer.compute_codes(backend, x, sets, 0, 2)) == expected(group)
    assert counts.copied_bytes == group.copied_bytes
    counts.measure_second_call(lambda: gpu.nearest_codes(x, lists))
    # A code has two bytes. The functions `earlier_*` describe an earlier version: a code had four bytes,
    # and each of the two clusterings had a launch and two uploads of its own.
    assert counts.copied_bytes == 2 * 7 * 2
    before, now = (f(7, 6, 4, 8, 2) for f in (model.earlier_mbn_upper_group, model.mbn_upper_group))
    assert (before.launches, before.uploads, now.launches, now.uploads) == (2, 4, 8, 0)


@pytest.mark.parametrize("shape", [(9, 7, 5), (128, 128, 3)])
@pytest.mark.parametrize("with_pairs", [False, True])
def test_the_model_counts_the_work_of_conditional_rbms(fake, counts, model, monkeypatch, shape, with_pairs):
    gpu = import_gpu_kernels("crbm")
    room = 4 * 9 * 7 * 2  # Bytes of the messages of two graphs with 9 x 7 edges.
    monkeypatch.setattr(gpu, "MESSAGE_BYTES", room)
    monkeypatch.setattr(model, "MESSAGE_BYTES", room)
    v, h, rows = shape
    coupling = gpu.DeviceCoupling(fake.zeros((v, h), "f4"), fake.zeros((v, h), "f4"), 8, 1.0)
    device = fake.zeros((rows, v), "f4"), fake.zeros((rows, h), "f4")
    pairs = fake.zeros((v, h), "f4")
    if with_pairs:
        got = counts.measure_second_call(lambda: gpu.sum_product_pairs(coupling, *device, 4, None, pairs))
    else:
        got = counts.measure_second_call(lambda: gpu.sum_product(coupling, *device, 4))
    assert got == expected(model.crbm_inference(v, h, rows, 4, with_pairs))
    assert model.CLUSTER_EDGES == gpu.CLUSTER_EDGES


@pytest.mark.parametrize("chains", [2, 4])
def test_the_model_counts_the_work_of_a_step_of_conditional_rbms(
    fake, counts, model, emulate, load_helper, chains
):
    fake.RawModule.library = emulate("crbm")
    steps = load_helper("test_crbm_learning").Steps(fake, "mle-bp", chains, 300, v=90)
    assert steps.learner.factored
    got = counts.measure_second_call(steps.run)
    work = model.crbm_host_step(90, 5, 300, chains, 8, 2)
    assert (steps.launches, steps.waits, got[1] / 2) == (work.launches, work.downloads, work.uploads)
    # The last chain (part of the batch) has three rows fewer than the others, so fewer bytes are copied.
    missing = 3 * (90 + 5 + 3 + 300) * 4 + 3 * 90
    assert 0 <= counts.copied_bytes / 2 - (work.copied_bytes - missing) < 1000
    before = model.earlier_crbm_step(90, 5, 300, chains, 8, 2)
    assert (before.launches, before.downloads) == (42 * chains, 4 * chains)


@pytest.mark.parametrize("chains", [2, 4])
@pytest.mark.parametrize("x", [300, 4])
def test_the_model_counts_the_work_of_a_step_on_the_gpu(fake, counts, model, emulate, load_helper, chains, x):
    fake.RawModule.library = emulate("crbm")
    learning = load_helper("test_crbm_learning")
    steps = learning.Steps(fake, "mle-bp", chains, x, v=90)
    state = [steps.state]

    def step() -> None:
        state[0] = steps.learner.step_on_gpu(state[0], steps.blocks, 8 * chains - 3, steps.backend)

    step()  # This uncounted step copies the parameters to the GPU.
    got = counts.measure_second_call(step)
    work = model.crbm_step(90, 5, x, chains, 8, 2)
    assert (got[0] + len(fake.EXPRESSIONS), got[1]) == (work.launches, work.uploads)
    assert counts.waits == work.downloads == 1
    missing = 3 * (4 * x + 90 + 12)  # The last chain (part of the batch) has three rows fewer.
    assert counts.copied_bytes == work.copied_bytes - missing
    before = model.crbm_host_step(784, 256, 784, 2, 10, 32)
    now = model.crbm_step(784, 256, 784, 2, 10, 32)
    assert now.predicted_seconds(model.H100) < before.predicted_seconds(model.H100) / 2
    assert now.card_seconds(model.H100) > 0.8 * now.predicted_seconds(model.H100)


def test_the_model_counts_the_work_of_compositional_networks(fake, counts, model):
    from scalelatent.models.hcn.kernels.windows import message_room

    gpu = import_gpu_kernels("hcn")
    chains, images, image, window, n = 2, 3, (1, 7, 6), (3, 2), 5
    places, weights, pixels = (5, 5, n), (*image[:1], *window, n), 42
    room = message_room(image[1:], window, n)
    evidence, order = fake.zeros((chains, images, *image), "i4"), fake.zeros((chains, images * pixels), "i4")
    s, w = fake.zeros((chains, images, *places), "i4"), fake.zeros((chains, *weights), "i4")
    sizes = images, pixels, 25 * n, 6 * n
    got = counts.measure_second_call(lambda: gpu.sweep(evidence, order, s, w))
    assert got == expected(model.hcn_sweep(chains, *sizes))
    kept = [fake.zeros((chains, images, 1, room), "i2") for _ in range(2)]
    held = fake.zeros((chains, images, 1, pixels, 3), "u1")
    got = counts.measure_second_call(lambda: gpu.sweep_messages(evidence, order, s, w, *kept, held, 0.8))
    assert got == expected(model.hcn_sweep_messages(chains, *sizes, room))
    rows = fake.zeros((images, *image), "i4"), fake.zeros((images, pixels), "i4")
    places_now = fake.zeros((images, *places), "i4")
    got = counts.measure_second_call(lambda: gpu.decode_images(*rows, places_now, np.zeros(weights, bool), 3))
    assert got == expected(model.hcn_decode_images(images, pixels, 25 * n, 6 * n, 3, room))


@pytest.mark.parametrize("leaves", [1, 5])
def test_leaves_of_compositional_networks_are_visited_in_one_launch(fake, counts, model, leaves):
    from scalelatent.engine.backend import CupyBackend
    from scalelatent.models.hcn.kernels.windows import message_room
    from scalelatent.models.hcn.model.layer import FeatureLayer
    from scalelatent.models.hcn.model.stored_messages import start_leaf, visit_leaves

    layer, images, rng = FeatureLayer((1, 9, 8), 3, (3, 3), 0.1, 0.1, 0.3, 0.2), 4, np.random.default_rng(0)
    evidence = rng.integers(-900, 900, (leaves, images, 1, 9, 8)).astype(np.int32)
    beliefs, backend = np.zeros((1, 3, 3, 3), np.int32), CupyBackend()
    given = [start_leaf(layer, images)] * leaves, evidence, beliefs, [images * k for k in range(leaves)]
    got = counts.measure_second_call(lambda: visit_leaves(*given, 0, 1, 0.8, backend))
    sizes = images, 72, 7 * 6 * 3, 27, message_room((9, 8), (3, 3), 3), 3
    work = model.hcn_visit(leaves, *sizes)
    assert got == expected(work)
    assert counts.copied_bytes == work.copied_bytes
    assert (counts.waits, work.downloads) == (1, 6)  # All six copies wait once, for the sweep.
    before = model.earlier_hcn_visit(leaves, *sizes)
    assert (before.launches, before.uploads, before.downloads) == (leaves, 8 * leaves, 6 * leaves)


@pytest.mark.parametrize("on_card", [True, False])
def test_the_model_counts_the_work_of_mixtures(fake, counts, model, monkeypatch, on_card):
    from scalelatent.models.linear_mixture.kernels import reference

    gpu = import_gpu_kernels("linear_mixture")
    n, p, k, dims, q = 30, 12, 6, 2, 4
    monkeypatch.setattr(gpu, "PRODUCTS", 200)
    monkeypatch.setattr(model, "TILE", 200)
    rng = np.random.default_rng(0)
    rows = rng.random((n, p), dtype=np.float32)
    x = fake.asarray(rows) if on_card else rows
    means, bases = rng.random((k, p)), np.linalg.qr(rng.normal(size=(k, p, q)))[0]
    scores = reference.error_scores(means, bases[:, :, :dims], means.mean(axis=0))
    scorer = gpu.make_scorer(scores, np.array([0, k]))
    got = counts.measure_second_call(lambda: gpu.nearest(scorer, x, 0, 1))
    assert got == expected(model.linear_mixture_nearest(n, p, k, dims, on_card))
    groups, packed = reference.group_rows(rng.integers(0, k, n), k), gpu.pack_bases(means, bases, False)
    for grams in (False, True):
        gram = np.zeros((k, q, q)) if grams else np.zeros((0, 0, 0))
        sums = np.zeros((k, p)), np.zeros(k), np.zeros((k, q, p)), gram, np.zeros((0, 0))
        sums = tuple(gpu.open_sums(*sums))[:4]
        got = counts.measure_second_call(lambda s=sums: gpu.add_scatter(packed, x, groups, *s))
        work = model.linear_mixture_scatter(n, p, q, k, grams, on_card)
        assert got[:3] == expected(work)[:3]


@pytest.mark.parametrize("classes", [1, 3])
def test_a_leaf_of_a_mixture_waits_once_per_block_and_copies_its_sums_once(
    fake, counts, model, emulate, classes
):
    from scalelatent.contract.learners import Block, LeafReduction
    from scalelatent.contract.stats import Stats
    from scalelatent.engine.backend import CupyBackend
    from scalelatent.models.linear_mixture.model.e_step import MAIN, MixtureSettings, initial_state
    from scalelatent.models.linear_mixture.model.em import MixtureEM
    from scalelatent.models.linear_mixture.model.start import start_components

    fake.RawModule.library = emulate("linear_mixture")
    n, p, k, dims, q = 900, 40, 12, 2, 4
    x = np.random.default_rng(0).random((3 * n, p), dtype=np.float32)
    y = (np.arange(3 * n) % classes).astype("i4") if classes > 1 else None
    settings = MixtureSettings(p, np.repeat(np.arange(classes), k // classes), classes if classes > 1 else 0)
    reduction = MixtureEM(settings, dims, q).reductions()["train"]
    assert isinstance(reduction, LeafReduction)
    start = start_components(x[:k].astype(float), q, 0).with_n_dims(dims)
    prepared = reduction.prepare(initial_state(settings, start, MAIN), CupyBackend())
    blocks = [Block(x[a : a + n], None if y is None else y[a : a + n], None, a) for a in range(0, 3 * n, n)]

    def leaf() -> None:
        stats = Stats.zeros(reduction.layout())
        sums = reduction.make_leaf_sums(prepared, stats)
        for block in blocks:
            reduction.add_block(prepared, block, stats, sums)
        reduction.add_leaf_sums(prepared, stats, sums)

    got = counts.measure_second_call(leaf)
    work = model.linear_mixture_leaf(3, n, p, k, dims, q, classes)
    assert got == expected(work)
    assert counts.copied_bytes == work.copied_bytes
    assert counts.waits == work.downloads == 4
    before = model.earlier_linear_mixture_leaf(3, n, p, k, dims, q, classes)
    assert before.downloads == 3 * (2 * classes + 2)
    sums = 8 * k * (q + 2) * p
    assert before.copied_bytes - work.copied_bytes > 2 * sums


def test_bounds_name_the_resource(model):
    seconds, resource = model.capsule_block(65_536, 784, 20, 1, None, 1).find_bottleneck(model.H100)
    assert resource == "copies to and from the host"
    assert seconds > 65_536 * 784 / 55e9
    assert model.mbn_nearest(60_000, 784, 392, 4000, 1).find_bottleneck(model.H100)[1] == "float32 operations"
    on_card = model.capsule_block(65_536, 784, 20, 1, None, 4, on_card=True)
    h100, h200 = (
        on_card.seconds_by_resource(card)["memory of the card"] for card in (model.H100, model.H200)
    )
    assert h200 < h100
    assert model.compare_with_bound(on_card, 1.0)["share_of_bound"] == on_card.find_bottleneck(model.H100)[0]
