"""Joint passes of a search copy rows to the GPU once, and sums from it once per leaf (fixed row range)."""

from __future__ import annotations

import numpy as np
import pytest

import scalelatent as sl
from scalelatent.contract.stats import Stats
from scalelatent.engine.backend import CupyBackend
from scalelatent.engine.cache import PieceCache
from scalelatent.engine.passes import PassContext, Span, make_stage
from scalelatent.engine.reading import StopEvent
from scalelatent.models.linear_mixture.model.e_step import MAIN, MixtureSettings, initial_state
from scalelatent.models.linear_mixture.model.em import MixtureEM
from scalelatent.models.linear_mixture.model.start import start_components
from scalelatent.search import joint
from scalelatent.search.joint import JointState, MemberRows, make_joint_stage

N, P, BLOCK, LEAF = 2400, 20, 200, 800


@pytest.fixture(scope="session")
def emulated(emulate):
    return emulate("linear_mixture")


class Search:
    """Mixtures of different sizes that learn from the same rows, as candidates of a search."""

    def __init__(self, stored: str) -> None:
        x = (np.random.default_rng(0).random((N, P)) * 255).astype(stored)
        self.data, self.members, self.states = sl.Dataset.from_arrays(x), {}, {}
        for k in (3, 5, 8):
            settings = MixtureSettings(P, np.zeros(k, dtype=np.int64), 0)
            start = start_components(x[:k].astype(float), 4, 0).with_n_dims(2)
            self.members[str(k)] = MixtureEM(settings, 2, 4)
            self.states[str(k)] = initial_state(settings, start, MAIN)
        self.grid = {"block_rows": BLOCK, "leaf_rows": LEAF}

    def joint(self):
        members = {name: (em, {"train": MemberRows(self.data)}) for name, em in self.members.items()}
        return make_joint_stage("joint", members, "gpu", None, **self.grid)

    def alone(self, name: str) -> np.ndarray:
        stage = make_stage("alone", self.members[name], {"train": self.data}, "gpu", None, **self.grid)
        return run(stage, self.states[name], CupyBackend())


def run(stage, state, backend) -> np.ndarray:
    """Return the sums of a pass over all rows."""
    context = PassContext(stage, state, backend, PieceCache(0))
    return context.run_span(Span("train", stage.grids["train"].depth, 0), StopEvent())[:-2]


@pytest.mark.parametrize("stored", ["u1", "f4"])
def test_members_share_rows_on_the_gpu_and_have_the_sums_that_they_have_alone(fake, stored):
    search, backend, copies = Search(stored), CupyBackend(), []
    stage, state = search.joint(), JointState(search.states)
    assert stage.reductions["train"].requirements.reads_on_gpu
    for _ in range(3):
        fake.COPIED.update(set=0, get=0)
        sums = run(stage, state, backend)
        copies.append(dict(fake.COPIED))
    assert backend.kept_rows.used == search.data.nbytes
    assert copies[0]["set"] - copies[1]["set"] == search.data.nbytes
    assert copies[1] == copies[2]
    joint_reduction = stage.reductions["train"]
    found = joint_reduction.split(Stats(joint_reduction.layout(), sums))
    for name, one in zip(search.members, found, strict=True):
        np.testing.assert_array_equal(one.vector, search.alone(name))


def test_sums_are_copied_once_per_leaf(fake, monkeypatch):
    search = Search("f4")
    stage, state = search.joint(), JointState(search.states)
    copied, found = [], []
    for room in (2**31, 0):
        monkeypatch.setattr(joint, "LEAF_BYTES", room)
        backend = CupyBackend()
        run(stage, state, backend)
        fake.COPIED.update(set=0, get=0)
        found.append(run(stage, state, backend))
        copied.append(fake.COPIED["get"])
    # Bytes of the sums, squares and scatter matrices of all members (mixtures) that one copy has.
    large = sum(8 * k * (P + P + 4 * P) for k in (3, 5, 8))
    assert copied[1] - copied[0] == large * (N // BLOCK - N // LEAF)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
