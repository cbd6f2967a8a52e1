"""Values of a job come from job file, environment or command line, and errors name invalid values."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.errors import JobError, nearest
from scalelatent.jobs.resolve import override, parse_setting, parse_value, resolve
from scalelatent.jobs.spec import Job, parse_rows

pytestmark = pytest.mark.usefixtures("use_fake_estimator")

MINIMAL = {"job": {"out": "run"}, "data": {"train": "a.zarr"}, "model": {"kind": "capsule"}}


def change_job(**sections):
    return {name: MINIMAL.get(name, {}) | sections.get(name, {}) for name in MINIMAL | sections}


def assert_refused(stored, *words, **options):
    with pytest.raises(JobError) as caught:
        resolve(stored, environ=options.pop("environ", {}), **options)
    for word in words:
        assert word in str(caught.value)


def test_values_come_from_the_source_with_the_highest_precedence():
    stored = change_job(model={"capsule_dim": 2, "max_iter": 7}, data={"train_rows": "0:10"})
    environ = {
        "SCALELATENT_MODEL__CAPSULE_DIM": "3",
        "SCALELATENT_MODEL__MAX_ITER": "8",
        "SCALELATENT_DATA": "/x",
    }
    job = resolve(stored, environ=environ, settings=["model.capsule_dim=4"])
    assert job.params["capsule_dim"] == 4
    assert job.params["max_iter"] == 8
    assert job.params["algorithm"] == "em"
    assert job.origins["model.capsule_dim"] == "command line"
    assert job.origins["model.max_iter"] == "environment SCALELATENT_MODEL__MAX_ITER"
    assert job.origins["data.train_rows"] == "job file"
    assert job.origins["model.algorithm"] == "default"
    assert set(job.origins) == set(job.values())


def test_relative_paths_become_absolute_and_urls_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = resolve(change_job(data={"train": "a.zarr", "test": "s3://bucket/t.zarr"}), environ={})
    assert job.data.train == str(tmp_path / "a.zarr")
    assert job.data.test == "s3://bucket/t.zarr"
    assert job.job.out == str(tmp_path / "run")


def test_the_word_none_means_no_value():
    stored = change_job(model={"nu_schedule": "none", "tol": "None"}, data={"validation": "none"})
    job = resolve(stored, environ={})
    assert job.params["nu_schedule"] is None
    assert job.params["tol"] is None
    assert job.data.validation is None


def test_refusals_name_their_source():
    assert_refused(MINIMAL, "--set model.capsul=4", "unknown key 'capsul'", settings=["model.capsul=4"])
    assert_refused(MINIMAL, "write --set section.key=value", settings=["capsule_dim"])
    assert_refused(MINIMAL, "unknown section [mode]", settings=["mode.kind=capsule"])
    environ = {"SCALELATENT_MODEL__CAPSUL_DIM": "4"}
    assert_refused(
        MINIMAL, "environment variable SCALELATENT_MODEL__CAPSUL_DIM", "capsule_dim", environ=environ
    )


def test_a_job_is_read_back_from_json(tmp_path):
    job = resolve(change_job(model={"nu_schedule": [[8, 3], [4, 3]]}), environ={}).with_seed()
    again = Job.from_dict(json.loads(json.dumps(job.to_dict())))
    assert again == job
    with pytest.raises(JobError, match="update scalelatent"):
        Job.from_dict(job.to_dict() | {"format_version": 99})
    with pytest.raises(JobError, match="not a scalelatent job"):
        Job.from_dict({})


def test_seed_is_drawn_once_and_reaches_the_estimator():
    job = resolve(MINIMAL, environ={})
    assert job.job.seed is None
    seeded = job.with_seed()
    assert seeded.origins["job.seed"] == "drawn"
    assert seeded.with_seed() == seeded
    assert seeded.estimator_params()["random_state"] == seeded.job.seed
    own = resolve(change_job(model={"random_state": 5}), environ={}).with_seed()
    assert own.job.seed is None
    assert own.estimator_params()["random_state"] == 5


def test_threads_without_workers_are_n_jobs():
    job = resolve(change_job(cluster={"threads": 3, "device": "cpu"}), environ={})
    assert job.estimator_params()["n_jobs"] == 3
    assert job.estimator_params()["device"] == "cpu"
    job = resolve(change_job(cluster={"threads": 3, "workers": 2}), environ={})
    assert job.estimator_params()["n_jobs"] is None


def test_resume_may_change_on_bad_shard():
    job = resolve(change_job(engine={"block_rows": 64}), environ={})
    skipping = override(job, ["engine.on_bad_shard=skip"])
    assert (skipping.engine.on_bad_shard, skipping.engine.block_rows) == ("skip", 64)
    assert skipping.origins["engine.on_bad_shard"] == "command line"
    assert skipping.cluster == job.cluster
    with pytest.raises(JobError, match="'stop' or 'skip', not 'skpi': did you mean 'skip'"):
        override(job, ["engine.on_bad_shard=skpi"])
    with pytest.raises(JobError, match="may only change"):
        override(job, ["engine.block_rows=128"])


def test_the_cache_is_a_setting_that_a_resume_may_change():
    job = resolve(change_job(engine={"cache": "2GiB"}), environ={})
    assert job.engine.cache == "2GiB"
    assert override(job, ["engine.cache=0.1"]).engine.cache == 0.1
    for wrong in ("-1", "lots", "true"):
        with pytest.raises(JobError, match=r"engine.cache.*give 'auto', an amount of memory"):
            override(job, [f"engine.cache={wrong}"])


def test_a_resume_may_change_the_cluster():
    job = resolve(change_job(cluster={"workers": 2}), environ={})
    assert override(job, ["cluster.workers=4"]).cluster.workers == 4
    moved = override(job, ["cluster.scheduler=tcp://h:1"])
    assert (moved.cluster.workers, moved.cluster.scheduler) == (None, "tcp://h:1")
    # The command line turns the option --scheduler into these two settings.
    moved = override(moved, ['cluster.scheduler="tcp://h:2"', "cluster.workers=none"])
    assert (moved.cluster.workers, moved.cluster.scheduler) == (None, "tcp://h:2")
    with pytest.raises(JobError, match="may only change"):
        override(job, ["model.capsule_dim=4"])
    with pytest.raises(JobError, match="did you mean 'workers'"):
        override(job, ["cluster.worker=4"])


def test_a_resume_may_change_parameters_that_do_not_decide_the_fit():
    job = resolve(change_job(model={"kind": "crbm"}), environ={})
    slower = override(job, ["model.learning_rate=0.01", "model.n_epochs=70"])
    assert (slower.params["learning_rate"], slower.params["n_epochs"]) == (0.01, 70)
    assert slower.origins["model.n_epochs"] == "command line"
    assert job.params["n_epochs"] is None
    with pytest.raises(
        JobError, match=r"engine.cache, model.learning_rate, model.n_epochs; to change other values"
    ):
        override(job, ["model.n_hidden=3"])


def test_an_unknown_kind_is_refused():
    from scalelatent.contract.kinds import find_kind

    with pytest.raises(JobError, match="capsul"):
        find_kind("capsul")
    with pytest.raises(JobError, match=r"there are: capsule, crbm, hcn, linear.*, mbn$"):
        find_kind("xyz")


def test_a_kind_that_only_python_fits_is_refused():
    from scalelatent.contract.kinds import find_job_kind, find_kind

    with pytest.raises(
        JobError, match=r"cannot be fitted by a job: in Python, scalelatent\.CompressiveMBN\(\)\.fit"
    ):
        find_job_kind("compressive")
    # The kind itself is known, because saved models of this kind can be loaded.
    assert find_kind("compressive").estimator_class().__name__ == "CompressiveMBN"


@given(st.text(min_size=1))
def test_any_text_is_a_valid_setting(text):
    parse_value(text)  # No text may raise an error; text that is not TOML is a string.


@given(st.one_of(st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.booleans()))
def test_values_are_parsed_back_from_their_text(value):
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    assert parse_setting(f"model.x={text}") == ("model", "x", value)


@given(st.integers(0, 50), st.integers(1, 50))
def test_row_ranges_follow_slices(start, length):
    assert parse_rows(f" {start} : {start + length} ") == slice(start, start + length)


def test_other_forms_of_row_ranges_are_read_or_refused():
    assert parse_rows("5:") == slice(5, None)
    assert parse_rows(":-3") == slice(None, -3)
    assert parse_rows("-5:") == slice(-5, None)
    for bad in ("", "5", "a:b", "1:2:3", ":0", "-3:-5"):
        with pytest.raises(ValueError, match=r"no row|not a range of rows"):
            parse_rows(bad)


def test_the_error_lists_all_names_if_none_is_similar():
    assert nearest("q", ["b", "a"]) == "valid are: a, b"


def test_a_removed_parameter_is_accepted_at_the_value_of_this_version_only():
    crbm = change_job(model={"kind": "crbm", "damping": 1})
    assert "damping" not in resolve(crbm, environ={}).params
    assert_refused(change_job(model={"kind": "crbm", "damping": 0.5}), "damping=0.5", "remove damping")
