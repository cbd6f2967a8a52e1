"""Run a complete example (`demo`) with the digits that are part of scikit-learn.

The demo makes datasets and a job file and uses the same runner as `fit`, so that users see the usual output
of a job.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from scalelatent.errors import JobError
from scalelatent.storage.disk import is_local

from .resolve import load_job
from .runfolder import is_run_folder
from .spec import Job

MARKER = ".scalelatent-demo"
# Ranges of digits from which each dataset is made; the ranges do not overlap, so that scores are fair.
TRAIN_BASES, VALIDATION_BASES, TEST_BASES = (0, 1200), (1200, 1500), (1500, 1797)

JOB = """\
# The job of `scalelatent demo --rows {rows}`. Run it again with other settings, for example:
#   scalelatent fit {file} --set model.capsule_dim=4 --out {other}

[job]
name = "demo"
seed = 0
out = {out}

[data]
train = {train}  # {rows:,} images generated from digits {train_bases}
validation = {validation}  # digits {validation_bases}, unchanged
test = {test}  # digits {test_bases}, unchanged

[model]
kind = "capsule"
capsule_dim = 8
nu_schedule = [[0.8, 5], [0.4, 5], [0.0, 5]]  # rounds: [nu, passes without improvement that end the round]
max_iter = 150

[cluster]
workers = {workers}  # Dask workers, started for this job
threads = 1
"""


def prepare(
    out: str | os.PathLike[str],
    *,
    rows: int = 1_000_000,
    workers: int = 2,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
    print_line: Callable[[str], None] = lambda line: None,
) -> Job:
    """Create the datasets and the job file of the demo."""
    from scalelatent.data import make_digits

    if not is_local(out):
        raise JobError(f"--out {os.fspath(out)}: the demo needs a folder on this machine; give a path")
    folder = Path(os.path.abspath(out))
    _make_room(folder, overwrite)
    print_line(f"generating {rows:,} digits in {folder / 'train.zarr'}")
    paths = {name: folder / f"{name}.zarr" for name in ("train", "validation", "test")}
    make_digits(str(paths["train"]), rows, base_rows=TRAIN_BASES, progress=progress)
    for name, (start, stop) in {"validation": VALIDATION_BASES, "test": TEST_BASES}.items():
        make_digits(str(paths[name]), stop - start, base_rows=(start, stop))
    file = folder / "job.toml"
    text = JOB.format(
        rows=rows,
        file=file,
        out=_as_toml_string(folder / "run"),
        other=folder / "run2",
        workers=workers,
        train_bases="{}:{}".format(*TRAIN_BASES),
        validation_bases="{}:{}".format(*VALIDATION_BASES),
        test_bases="{}:{}".format(*TEST_BASES),
        **{name: _as_toml_string(path) for name, path in paths.items()},
    )
    file.write_text(text, encoding="utf-8")
    return load_job(file)


def _as_toml_string(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _make_room(folder: Path, overwrite: bool) -> None:
    """Create the folder; remove only an earlier demo, and only on request."""
    if folder.exists() and not folder.is_dir():
        raise JobError(f"--out {folder} is a file; choose another folder with --out")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARKER).is_file():
            raise JobError(f"folder {folder} exists and is not empty; choose another folder with --out")
        if not overwrite and (folder / "job.toml").exists():  # the last file that a demo writes
            run = folder / "run"
            again = "replace it with --overwrite, or choose another folder with --out"
            look = f"; see its run with: scalelatent status {run}" if is_run_folder(run) else ""
            raise JobError(f"folder {folder} already contains a demo; {again}{look}")
        for name in ("train.zarr", "validation.zarr", "test.zarr", "run"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "job.toml").unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(
            "created by scalelatent demo, and replaced by scalelatent demo --overwrite\n"
        )
    except OSError as error:
        raise JobError(
            f"folder {folder} cannot be written: {error.strerror}; choose another folder with --out"
        ) from error
