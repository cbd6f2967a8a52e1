"""Bounded memory: a child process handles files far larger than the growth it is allowed."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MB = 1 << 20
ROWS, WIDTH = 60_000, 784 * 2  # 94 MB of bytes
ALLOWED = 40 * MB

_CHILD = """
import json, pathlib, resource, sys
import numpy as np
from scalelatent.data import (Dataset, append_rows, convert_dataset, import_idx, import_npy, import_npz,
    open_dataset, shuffle_dataset)
folder, what = sys.argv[1:]
small = {"chunk_rows": 1000, "shard_rows": 2000, "overwrite": True}
# imports, codecs and loops first
warm = Dataset.from_arrays(np.zeros((4000, 8), "u1")).save(folder + "/warm", **small)
warm.read_x(0, 4000)
def peak():  # ru_maxrss of a child begins with its parent's on Linux, VmHWM does not
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
if what == "idx":
    import_idx(folder + "/x.idx.gz", None, folder + "/out", **small)
elif what == "npy":
    import_npy(folder + "/x.npy", folder + "/out", **small)
elif what == "npz":
    import_npz(folder + "/x.npz", folder + "/out", **small)
elif what == "read":
    ds = open_dataset(folder + "/ds")
    for a, b in ds.pieces():
        ds.read_x(a, b)
elif what == "whole":
    open_dataset(folder + "/ds").read_x(0, 60_000)
elif what == "save":
    open_dataset(folder + "/ds").save(folder + "/out", **small)
elif what == "shuffle":
    shuffle_dataset(folder + "/ds", folder + "/out", seed=0, memory=8 << 20, **small)
elif what == "convert":
    convert_dataset(folder + "/ds", folder + "/out", dtype="i2", overwrite=True)
elif what == "append":
    Dataset.from_arrays(np.zeros((9, 1568), "u1")).save(folder + "/grown", overwrite=True)
    append_rows(folder + "/grown", folder + "/ds", chunk_rows=1000, shard_rows=2000)
print(json.dumps(peak() - before))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scalelatent.data import Dataset

    path = tmp_path_factory.mktemp("large")
    rows = np.resize(np.arange(251, dtype="u1"), (ROWS, WIDTH))
    np.save(path / "x.npy", rows)
    np.savez(path / "x.npz", x=rows)
    with gzip.open(path / "x.idx.gz", "wb", compresslevel=1) as file:
        file.write(bytes([0, 0, 8, 2]) + ROWS.to_bytes(4, "big") + WIDTH.to_bytes(4, "big"))
        file.write(rows.tobytes())
    Dataset.from_arrays(rows).save(path / "ds", chunk_rows=1000, shard_rows=2000)
    return path


def _growth(folder: Path, what: str) -> int:
    run = [sys.executable, "-c", _CHILD, str(folder), what]
    return int(json.loads(subprocess.run(run, capture_output=True, timeout=120, check=True).stdout))


@pytest.mark.parametrize("what", ["idx", "npy", "npz", "read", "save", "shuffle", "convert", "append"])
def test_growth_is_a_few_shards_not_the_file(folder: Path, what: str) -> None:
    assert _growth(folder, what) < ALLOWED


def test_the_measure_sees_a_file_read_whole(folder: Path) -> None:
    assert _growth(folder, "whole") > 2 * ALLOWED
