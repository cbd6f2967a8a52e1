"""The svmlight importer agrees with scikit-learn and Python's float, and refuses every kind of bad file."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file, load_svmlight_file
from typer.testing import CliRunner

from scalelatent.cli import app
from scalelatent.data import import_svmlight, open_dataset
from scalelatent.errors import DataError
from scalelatent.importers import svmlight

X = sp.random_array((300, 50), density=0.1, rng=np.random.default_rng(0), format="csr")
Y = np.arange(300) % 5 - 2


def write_text(**options: Any) -> bytes:
    out = io.BytesIO()
    dump_svmlight_file(X, Y, out, **options)
    return out.getvalue()


def _import(text: bytes | str, tmp_path: Path, **options: Any) -> Any:
    path = tmp_path / "x.svm"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return import_svmlight(path, tmp_path / "ds", overwrite=True, **options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("zero_based", [False, True])
@pytest.mark.parametrize("block", [100, 1 << 22])
def test_rows_are_those_of_scikit_learn(
    zero_based: bool, packed: bool, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelatent.importers.svmlight._BLOCK_BYTES", block)
    text = write_text(zero_based=zero_based, comment="a comment: 1:2", query_id=np.arange(300))
    calls: list[tuple[int, int]] = []
    ds = _import(
        gzip.compress(text) if packed else text, tmp_path, shard_rows=64, progress=lambda *c: calls.append(c)
    )
    wanted, labels = load_svmlight_file(io.BytesIO(text), zero_based="auto")
    assert (ds.read_x(0, 300) != wanted).nnz == 0  # Numbers are equal to the last bit.
    assert ds.read_x(0, 300).nnz == wanted.nnz
    np.testing.assert_array_equal(ds.read_y(0, 300), labels)
    assert ds.read_y(0, 1).dtype == np.int64
    assert ds.dtype == np.float64
    assert [c for c in calls if c[0]] == [(64, 300), (128, 300), (192, 300), (256, 300), (300, 300)]
    assert ds.attrs["provenance"]["options"] == {"zero_based": zero_based}


def _as_float64(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.one_of(
            st.integers(0, 2**64 - 1).map(_as_float64).filter(np.isfinite).map(repr),
            st.floats(allow_nan=False, allow_infinity=False).map(lambda v: f"{v:.25e}"),
            st.floats(-1e6, 1e6).map(lambda v: f"{v:.5f}"),
            st.tuples(st.integers(0, 10**30), st.integers(-345, 280)).map(lambda p: f"{p[0]}e{p[1]}"),
            # These numbers are halfway between two floats.
            st.integers(2**53, 2**54).map(lambda m: f"{2 * m + 1}"),
            st.integers(2**52, 2**53).map(lambda m: f"{(2 * m + 1) * 5}e-1"),
        ),
        min_size=1,
        max_size=200,
    )
)
@example(values=["4.9e-324", "2.2250738585072011e-308", "1.7976931348623157e308", "+1.5E+2", "-.5", "5."])
@example(values=["9007199254740993.00000000000000000000000000000000000001", "0e999", "1e-400", "-0.0"])
def test_numbers_are_those_of_python(values: list[str], tmp_path_factory: Any) -> None:
    values = [v for v in values if np.isfinite(float(v))]
    if not values:
        return
    line = "1 " + " ".join(f"{i + 1}:{v}" for i, v in enumerate(values))
    ds = _import(line, tmp_path_factory.mktemp("svm"))
    wanted = np.array([float(v) for v in values])
    assert (ds.read_x(0, 1).data.view("u8") == wanted.view("u8")).all()


def test_labels_of_every_kind_are_read(tmp_path: Path) -> None:
    assert _import("1.5 1:1\n-2 2:1\n", tmp_path).read_y(0, 2).tolist() == [1.5, -2.0]
    assert not _import("1:1\n\n2:1 # three\n", tmp_path).has_y
    ds = _import("0,3 1:1\n 2:1\n2 2:1\n3,3,1 1:1\n", tmp_path)
    assert (ds.y_kind, ds.n_targets) == ("multilabel", 4)
    wanted = [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1]]
    assert ds.read_y(0, 4).toarray().tolist() == wanted


def test_empty_rows_blank_lines_and_comments_are_read(tmp_path: Path) -> None:
    ds = _import("1\n1 1:2 3:1.5\r\n\n# nothing\n2\t2:7", tmp_path, n_features=4)
    assert ds.read_x(0, 3).toarray().tolist() == [[0, 0, 0, 0], [2, 0, 1.5, 0], [0, 7, 0, 0]]


def test_columns_count_from_zero_or_one(tmp_path: Path) -> None:
    text = "1 1:1 3:1\n"
    assert _import(text, tmp_path).n_features == 3
    assert _import(text, tmp_path, zero_based=True).n_features == 4
    assert _import("1 0:1 3:1\n", tmp_path).n_features == 4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (b"", ["holds no rows: it is empty"]),
        (b"# a\n\n  \n", ["holds no rows"]),
        (b"1 1:1\nabc 1:1\n", ["line 2: 'abc 1:1' is not LABEL COLUMN:VALUE", "b'abc'"]),
        (b"1, 1:1\n", ["line 1: '1, 1:1' is not LABEL"]),
        (b"1 1:1\n\n1 x:1 2:2\n", ["line 3: '1 x:1 2:2' is not LABEL"]),
        (b"1 1:1\n1 -1:1\n", ["line 2: '1 -1:1' is not LABEL", "Invalid index -1"]),
        (b"1 1:1\n1 7\n", ["line 2: '1 7' is not LABEL"]),
        (b"1 1:1\n1 2:", ["line 2: '1 2:' is not LABEL", "it may be cut short"]),
        (b"1 1:1\n1 2: 3:1\n", ["line 2: '1 2: 3:1' is not LABEL"]),
        (b"1 1:1\n1 2:4x 3:1\n", ["line 2: '1 2:4x 3:1' is not LABEL", "b'4x'"]),
        (b"1 1:1\n1 2:0.5e\n", ["line 2: '1 2:0.5e' is not LABEL"]),
        (b"1 1:1\n1 3:1 2:1\n", ["line 2: '1 3:1 2:1' is not LABEL", "should be sorted and unique"]),
        (b"1 1:1\n1 2:1 2:1\n", ["line 2: '1 2:1 2:1' is not LABEL", "should be sorted and unique"]),
        (b"1 99999999999999999999:1\n", ["line 1: '1 99999999999999999999:1' is not LABEL"]),
        (b"1 1:1\n1 2:nan\n", ["row 1, column 1 is nan"]),
        (b"1 1:1\n1 3:-inf\n", ["row 1, column 2 is -inf"]),
        (b"1 1:1e999\n", ["row 0, column 0 is inf"]),
        (b"1 1:1\n2:1\n", ["1 of 2 rows have no label"]),
        (b"1,2 1:1\n1.5 2:1\n", ["whole numbers of at least 0"]),
        (b"1,-2 1:1\n", ["whole numbers of at least 0"]),
        (b"\x93NUMPY\x01\x00v\x00{'descr': '<f8'}\n" + bytes(100), ["line 1", "is not LABEL"]),
    ],
)
def test_bad_text_is_refused(text: bytes, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        _import(text, tmp_path)
    for part in parts:
        assert part in str(error.value)
    assert str(tmp_path / "x.svm") in str(error.value)
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(tmp_path / "ds")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_based": False}, "has entries in column 0"),
        ({"zero_based": "maybe"}, "zero_based is 'maybe'"),
        ({"n_features": 3}, "needs 4 features, not 3"),
        ({"shard_rows": 0}, "shard_rows is 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        _import("1 0:1 3:1e300\n", tmp_path, **options)
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(tmp_path / "ds")


def test_truncated_and_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress(write_text())
    with pytest.raises(DataError, match="is truncated or damaged after byte"):
        _import(packed[:-200], tmp_path)
    with pytest.raises(DataError, match="is truncated or damaged after byte"):
        _import(packed[:1000] + b"\xff\x00\xff" * 20 + packed[1060:], tmp_path)
    with pytest.raises(DataError, match=r"none\.svm does not exist"):
        import_svmlight(tmp_path / "none.svm", tmp_path / "ds")


def test_line_numbers_count_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelatent.importers.svmlight._BLOCK_BYTES", 64)
    with pytest.raises(DataError, match="line 500: 'x 1:1' is not LABEL"):
        _import("1 1:1\n" * 499 + "x 1:1\n" + "1 1:1\n" * 99, tmp_path)
    with pytest.raises(DataError, match="line 300: '1 1:x' is not LABEL"):
        _import("1 1:1\n" * 299 + "1 1:x\n" + "1 1:1\n" * 99, tmp_path)
    monkeypatch.setattr("scalelatent.importers.svmlight._MAX_LINE_BYTES", 1000)
    with pytest.raises(DataError, match="a line of more than 1,000 bytes"):
        _import("1 " + "1:1 " * 1000, tmp_path)


def test_rows_that_the_temporary_folder_cannot_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(block: Any, parsed: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(svmlight._Block, "write", write)
    with pytest.raises(DataError, match="set the environment variable TMPDIR"):
        _import(write_text(), tmp_path)
    assert not (tmp_path / "ds").exists()


def test_the_command_imports_svmlight_text(tmp_path: Path) -> None:
    (tmp_path / "x.svm").write_bytes(write_text())
    args = ["data", "import", "svmlight", str(tmp_path / "x.svm"), str(tmp_path / "ds"), "--features", "60"]
    done = CliRunner().invoke(app, [*args, "--zero-based", "--json"])
    found = json.loads(done.stdout)
    assert (found["features"], found["nnz"], found["dtype"]) == (60, X.nnz, "float64")
    assert found["classes"] == [-2, -1, 0, 1, 2]
