"""A dataset to which rows were appended can be reopened with the rows that it had before each append."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from scalelatent.data import Dataset, append_rows, open_dataset
from scalelatent.data.read.earlier import find_earlier_rows, rows_at_same_time
from scalelatent.errors import DataError

SIZES = (40, 10, 15, 80, 5)  # Numbers of rows of the parts: the first part is saved, the others are appended.


def make_rows(part: int, kind: str) -> Dataset:
    random = np.random.default_rng(part)
    n = SIZES[part]
    x: Any = random.integers(0, 5, (n, 6)).astype("u1")
    y: Any = np.array(["b", "d", "f"])[np.arange(n) % 3]
    if part in (1, 3):
        # These parts add "a" or "c", which sorts before known classes, and so changes their codes.
        y[:1] = "ace"[part // 2]
    if kind == "numbers":
        y = np.array([ord(c) for c in y])
    if kind == "csr":
        x, y = csr_array(x.astype("f4")), csr_array(random.integers(0, 2, (n, 4)).astype("u1"))
    return Dataset.from_arrays(x, y, sample_weight=random.random(n))


def read_content(ds: Dataset) -> tuple[Any, ...]:
    n = len(ds)
    x, y = ds.read_x(0, n), ds.read_y(0, n)
    dense = [v.toarray().tolist() if hasattr(v, "toarray") else v.tolist() for v in (x, y)]
    classes = None if ds.classes is None else ds.classes.tolist()
    codes = ds.read_codes(0, n).tolist() if classes else None
    return *dense, ds.read_weight(0, n).tolist(), classes, codes, ds.nnz, len(ds.pieces())  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["strings", "numbers", "csr"])
def test_every_earlier_state_is_reopened(kind: str, tmp_path: Path) -> None:
    old = [make_rows(0, kind).save(tmp_path / "a", shard_rows=20)]
    before = [
        (old[0].fingerprint(), old[0][5:30].fingerprint(), old[0][30:].fingerprint(), read_content(old[0]))
    ]
    for part in range(1, len(SIZES)):
        ds = append_rows(tmp_path / "a", make_rows(part, kind))
        before.append((ds.fingerprint(), ds[5:30].fingerprint(), ds[30:].fingerprint(), read_content(ds)))
    now = open_dataset(tmp_path / "a")
    for i, (whole, middle, end, content) in enumerate(before):
        found = find_earlier_rows(now, whole)
        assert found is not None
        assert (found.fingerprint(), len(found)) == (whole, sum(SIZES[: i + 1]))
        assert read_content(found)[:-1] == content[:-1]
        for rows, then in ((now[5:30], middle), (now[30:], end)):
            found = find_earlier_rows(rows, then)
            assert found is not None
            assert found.fingerprint() == then
            again = Dataset.from_spec(found.spec())  # Tasks on workers open a dataset by its spec.
            assert again.fingerprint() == then
            assert read_content(again) == read_content(found)
    assert find_earlier_rows(now, "another") is None
    assert find_earlier_rows(now[5:30], before[0][0]) is None


def test_a_task_continues_on_its_rows_after_an_append(tmp_path: Path) -> None:
    ds = make_rows(0, "strings").save(tmp_path / "a")
    spec, content = ds[3:].spec(), read_content(ds[3:])
    append_rows(tmp_path / "a", make_rows(1, "strings"))
    assert read_content(Dataset.from_spec(spec))[:-1] == content[:-1]
    with pytest.raises(DataError, match="has changed since this job started"):
        Dataset.from_spec({**spec, "fingerprint": "0" * 64})


def test_earlier_rows_are_found_with_their_earlier_targets(tmp_path: Path) -> None:
    x, v = (make_rows(0, "strings").save(tmp_path / name) for name in "xv")
    both = x.with_target(v)
    whole, part = both.fingerprint(), both[10:].fingerprint()
    weighted = x.with_weight(np.arange(40.0)).fingerprint()
    bare = x.without_labels().fingerprint()
    for name in "xv":
        append_rows(tmp_path / name, make_rows(1, "strings"))
    now = open_dataset(tmp_path / "x").with_target(open_dataset(tmp_path / "v"))
    found = [find_earlier_rows(now, whole), find_earlier_rows(now[10:], part)]
    assert [len(rows or ()) for rows in found] == [40, 30]
    reweighted = open_dataset(tmp_path / "x").with_weight(np.arange(50.0))
    assert len(find_earlier_rows(reweighted, weighted) or ()) == 40
    found = find_earlier_rows(open_dataset(tmp_path / "x").without_labels(), bare)
    assert found is not None
    assert (len(found), found.has_y) == (40, False)


def test_test_rows_are_reopened_at_the_same_state(tmp_path: Path) -> None:
    old = make_rows(0, "strings").save(tmp_path / "a")
    now = append_rows(tmp_path / "a", make_rows(1, "strings"))
    train = find_earlier_rows(now[:20], old[:20].fingerprint())
    assert train is not None
    assert rows_at_same_time(now[30:], train).extent == (30, 40)
    assert rows_at_same_time(now[30:35], train).extent == (30, 35)
    assert rows_at_same_time(now[42:], train).extent == (42, 50)
    assert rows_at_same_time(now[30:], now).extent == (30, 50)
