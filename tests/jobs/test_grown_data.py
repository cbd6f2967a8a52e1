"""A job resumes with the rows that its datasets had when it started, even after an append."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from scalelatent import Dataset, load_model
from scalelatent.data import append_rows, open_dataset
from scalelatent.errors import RunError
from scalelatent.jobs.resolve import load_job
from scalelatent.jobs.runfolder import RunFolder
from scalelatent.jobs.runner import run_job
from tests.helpers import InterruptAt


def test_a_resume_reads_the_rows_with_which_the_job_started(
    job_paths: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Training, validation and test rows stay the same, also for an open-ended range and a new class."""
    folders = {}
    for name in ("whole", "broken"):
        job = load_job(job_paths.job, settings=[f"job.out={name}"])
        folders[name] = RunFolder.create(job.job.out, job)
    run_job(folders["whole"].read_job(), folders["whole"])
    with pytest.raises(KeyboardInterrupt):
        run_job(folders["broken"].read_job(), folders["broken"], callbacks=[InterruptAt(1, "pass_end")])
    old = open_dataset(job_paths.data)
    append_rows(job_paths.data, Dataset.from_arrays(old.read_x(0, 50), np.full(50, 9)))
    result = run_job(folders["broken"].read_job(), folders["broken"], resume=True)
    assert "the fit continues with rows 0:300" in caplog.text
    a, b = (load_model(folders[name].model_url) for name in folders)
    np.testing.assert_array_equal(a.W_, b.W_)
    assert b.classes_.tolist() == [0, 1, 2, 3]
    states = [folders[name].read_state() for name in folders]
    assert states[0]["test_error"] == states[1]["test_error"] == result.scores["test_error"]


def test_a_resume_on_other_rows_is_still_refused(job_paths: SimpleNamespace) -> None:
    job = load_job(job_paths.job)
    folder = RunFolder.create(job.job.out, job)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, folder, callbacks=[InterruptAt(1, "pass_end")])
    old = open_dataset(job_paths.data)
    x, y = old.read_x(0, 400), old.read_y(0, 400)
    Dataset.from_arrays(x[::-1].copy(), y[::-1]).save(job_paths.data, overwrite=True)
    append_rows(job_paths.data, Dataset.from_arrays(x[:20], y[:20]))
    with pytest.raises(RunError, match="train data"):
        run_job(job, folder, resume=True)
