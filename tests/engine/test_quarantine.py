"""Rows that kill workers are excluded; passes read the other rows, and a record names the excluded ones."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.data import Dataset, append_rows, open_dataset
from scalelatent.engine.batch_loop import fit_batches
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.inprocess import InProcessExecutor
from scalelatent.engine.quarantine import BadShard, Quarantine
from scalelatent.engine.reading import Meter, Reader
from scalelatent.errors import RunError, ShardError


def make_bad_shard(start: int, stop: int, url: str = "rows.zarr") -> BadShard:
    return BadShard(url, f"{url}/x/c/{start}", start, stop, 3, "workers died of it")


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=6),
    st.integers(0, 40),
    st.integers(1, 40),
)
def test_excluded_rows_of_a_slice_count_from_its_start(
    runs: list[tuple[int, int]], first: int, n: int
) -> None:
    quarantine = Quarantine("skip")
    quarantine.shards = [make_bad_shard(a, a + size) for a, size in runs]
    found = quarantine.excluded_rows(SimpleNamespace(place=None, url="rows.zarr", extent=(first, first + n)))
    lost = {row for a, size in runs for row in range(a, a + size)} & set(range(first, first + n))
    assert {row + first for a, b in found for row in range(a, b)} == lost
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(found))
    assert quarantine.excluded_rows(SimpleNamespace(place=None, url="others.zarr", extent=(0, 100))) == ()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_pass_reads_the_rows_around_excluded_ones(tmp_path: Path, sparse: bool, weighted: bool) -> None:
    rng = np.random.Generator(np.random.Philox(0))
    x, y, weight = rng.integers(0, 3, (100, 5)).astype("u1"), rng.integers(0, 3, 100), rng.uniform(1, 2, 100)
    given = Dataset.from_arrays(csr_array(x) if sparse else x, y, sample_weight=weight if weighted else None)
    stored = given.save(tmp_path / "rows", shard_rows=20, **({} if sparse else {"chunk_rows": 20}))
    for file in (tmp_path / "rows" / "x").glob("c/1/*" if not sparse else "000001/*/c/0"):
        file.unlink()  # Remove the shard of the rows 20:40.
    reader = Reader(
        stored,
        None,
        Meter(),
        np.arange(3),
        requirements=BlockRequirements(csr=True),
        skipped=((20, 40), (95, 100)),
    )
    got, codes, weights = reader.read(10, 100)
    left = np.r_[10:20, 40:95] - 10
    dense = got.to_dense() if sparse else got
    expected = np.zeros((90, 5), "u1")
    expected[left] = x[left + 10]
    np.testing.assert_array_equal(dense, expected)
    np.testing.assert_array_equal(codes[left], y[left + 10])
    assert dense.dtype == np.uint8
    scale = np.zeros(90)
    scale[left] = weight[left + 10] if weighted else 1.0
    np.testing.assert_array_equal(weights, scale)
    with pytest.raises(ShardError) as raised:
        Reader(stored, None, Meter()).read(10, 50)
    assert (raised.value.start, raised.value.stop) == (20, 40)


def test_an_error_names_the_rows_in_an_appended_dataset(tmp_path: Path) -> None:
    rows = Dataset.from_arrays(np.zeros((50, 2), "u1"), np.zeros(50, int))
    rows.save(tmp_path / "rows", chunk_rows=20, shard_rows=20)
    append_rows(tmp_path / "rows", rows, chunk_rows=20, shard_rows=20)
    grown = open_dataset(tmp_path / "rows")
    names = [(Path(file).parts[-3:], a, b) for file, a, b in grown[30:].shards(0, 40)]
    assert [(a, b) for _, a, b in names] == [(20, 40), (40, 50), (50, 70)]
    assert names[-1][0] == ("c", "0", "0")
    Path(grown.shards(75, 76)[0][0]).unlink()
    with pytest.raises(ShardError) as raised:
        grown[10:].read_x(60, 80)
    error = pickle.loads(pickle.dumps(raised.value.moved(url=grown.url)))
    assert (error.start, error.stop, error.url) == (70, 90, grown.url)
    assert str(error) == str(raised.value)


class EventRecorder(Callback):
    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []

    def on_event(self, info: dict[str, Any]) -> None:
        self.reported.append(info)


def test_a_damaged_shard_is_excluded_permanently(tmp_path: Path, toy: Any) -> None:
    """The fit equals a fit in which the excluded rows have weight 0.

    A resumed fit excludes the rows even if their shard can be read again.
    """
    arrays = toy.rows(320)
    train = arrays.save(tmp_path / "rows", chunk_rows=40, shard_rows=80)
    weight = np.ones(320)
    weight[80:160] = 0
    without = fit_batches(
        InProcessExecutor(1), toy.stage(train.with_weight(weight)), toy.start(), callbacks=Callback()
    )
    file = Path(train.shards(80, 81)[0][0])
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    events, store = EventRecorder(), EngineStore(tmp_path / "run")

    def fit(choice: str, passes: int, where: EngineStore) -> Any:
        executor = InProcessExecutor(2, where, 0.0, callbacks=events, quarantine=Quarantine(choice, where))
        stage = toy.stage(train, passes=passes)
        return fit_batches(executor, stage, toy.start(), callbacks=events, store=where).state

    with pytest.raises(ShardError, match="rows 80:160"):
        fit("stop", 3, store)
    assert not events.reported
    fit("skip", 1, store)
    (reported,) = [info for info in events.reported if info["event"] == "shard_quarantined"]
    assert (reported["shard"], reported["first_row"], reported["rows"], reported["deaths"]) == (
        str(file),
        80,
        80,
        0,
    )
    assert (reported["stage"], reported["pass"]) == ("toy_estep", 1)
    file.write_bytes(content)
    state = fit("stop", 3, EngineStore(tmp_path / "run"))
    np.testing.assert_array_equal(state["trail"], without.state["trail"])


def test_a_missing_dataset_is_not_excluded_as_bad_shards(tmp_path: Path, toy: Any) -> None:
    train = toy.rows(320).save(tmp_path / "rows", chunk_rows=40, shard_rows=40)
    for start in range(0, 320, 40):
        Path(train.shards(start, start + 1)[0][0]).unlink()
    quarantine = Quarantine("skip")
    with pytest.raises(
        RunError, match=r"120 of the 320 rows of .* would be excluded, more than the limit of 25%"
    ):
        fit_batches(
            InProcessExecutor(1, quarantine=quarantine), toy.stage(train), toy.start(), callbacks=Callback()
        )
    assert len(quarantine.shards) == 2


def test_a_derived_dataset_excludes_the_rows_of_its_source() -> None:
    quarantine = Quarantine("skip")
    quarantine.shards = [make_bad_shard(100, 200), make_bad_shard(300, 400)]
    source = SimpleNamespace(place=None, url="rows.zarr", extent=(150, 350))
    mapped = SimpleNamespace(place=None, url="mapped.zarr", extent=(0, 200))
    for _ in range(2):
        quarantine.exclude_mapped(source, mapped)
    assert quarantine.excluded_rows(mapped) == quarantine.excluded_rows(source) == ((0, 50), (150, 200))
    assert len(quarantine.shards) == 4
