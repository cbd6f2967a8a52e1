"""The job: a text file that names the model, the rows, the run folder and the cluster (see JOB.md).

A model with binary outputs reads them from the datasets' own targets, or row by row from datasets of outputs.
``target`` belongs to ``train``, and also to ``validation`` and ``test`` if they are rows of the same dataset;
``validation_target`` and ``test_target`` belong to other datasets. ``train_rows`` selects rows of both.

This module defines the sections of a job; `scalelatent.jobs.resolve` makes a job from file, environment and
command line. Credentials come from the environment or the usual files; a job with credentials is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from scalelatent.deploy.worker_processes import check_memory
from scalelatent.engine.cache import parse_cache
from scalelatent.engine.quarantine import check_choice
from scalelatent.errors import JobError

IN_MEMORY = "(in memory)"
"""Value of a key in ``[data]`` if Python code gave rows that no other process can open, such as arrays."""

FORMAT = "scalelatent-job"
FORMAT_VERSION = 1

_ROWS = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")


def parse_rows(text: str) -> slice:
    """Parse a range of rows such as ``"0:50000"``, ``"50000:"`` or ``":-1000"``."""
    found = _ROWS.fullmatch(text)
    if not found:
        raise ValueError(f'{text!r} is not a range of rows; write "START:STOP", for example "0:50000"')
    start, stop = (None if part is None else int(part) for part in found.groups())
    same_end = start is not None and stop is not None and (start < 0) == (stop < 0)
    if stop == 0 or (same_end and stop <= start):  # type: ignore[operator]
        raise ValueError(f"{text!r} contains no row; the stop must be larger than the start")
    return slice(start, stop)


def _parse_none(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


def _check_rows(value: str) -> str:
    parse_rows(value)
    return value


def _refuse_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _refuse_bool(value: Any) -> Any:
    """Refuse a bool, which Python treats as 0 or 1; convert the word "none" to None."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return _parse_none(value)


def _check_cache(value: object) -> object:
    parse_cache(value)
    return value


Text = Annotated[str, AfterValidator(_refuse_empty)]
OptText = Annotated[Text | None, BeforeValidator(_parse_none)]
Rows = Annotated[Annotated[str, AfterValidator(_check_rows)] | None, BeforeValidator(_parse_none)]
OptCount = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_refuse_bool)]
OptSeconds = Annotated[Annotated[float, Field(ge=0)] | None, BeforeValidator(_refuse_bool)]
OptMemory = Annotated[
    Annotated[str | int | float, AfterValidator(check_memory)] | None, BeforeValidator(_refuse_bool)
]
BadShardChoice = Annotated[Annotated[str, AfterValidator(check_choice)] | None, BeforeValidator(_parse_none)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class JobSection(_Section):
    """``[job]``: name and folders of the run."""

    name: OptText = None
    """Name of the run; by default the last part of `out`."""
    seed: Annotated[Annotated[int, Field(ge=0, lt=2**32)] | None, BeforeValidator(_refuse_bool)] = None
    """Seed of all random numbers; by default drawn at random and recorded."""
    out: Text
    """Run folder: a path, or an address in an object store. It must not exist yet."""
    scratch: OptText = None
    """Folder that every worker sees, for temporary rows of the fit; by default `out`."""


class DataSection(_Section):
    """``[data]``: the datasets and their row ranges."""

    train: Text
    """Dataset to fit."""
    train_rows: Rows = None
    """Range of rows of `train`, for example `"0:50000"`; by default all rows."""
    labels: bool = True
    """`false`: fit `train` without its labels; errors still use the labels of `validation` and `test`."""
    validation: OptText = None
    """Dataset for validation during the fit."""
    validation_rows: Rows = None
    """Range of rows of `validation`."""
    test: OptText = None
    """Dataset for the scores at the end."""
    test_rows: Rows = None
    """Range of rows of `test`."""
    target: OptText = None
    """Dataset with the outputs of `train`, row by row, for models that learn outputs."""
    validation_target: OptText = None
    """Dataset with the outputs of `validation`; not needed if `validation` and `train` are one dataset."""
    test_target: OptText = None
    """Dataset with the outputs of `test`; not needed if `test` and `train` are one dataset."""
    storage_options: Annotated[dict[str, Any] | None, BeforeValidator(_parse_none)] = None
    """Options of the fsspec file system for addresses, for example `{anon = true}`; no credentials."""


class EngineSection(_Section):
    """``[engine]``: sizes of blocks, and intervals of checkpoints and reports."""

    block_rows: OptCount = None
    """Rows per kernel call; by default chosen from the bytes of a row."""
    leaf_rows: OptCount = None
    """Rows that are summed in a fixed order; by default chosen from the bytes of the statistics."""
    checkpoint_passes: OptCount = None
    """Passes between checkpoints."""
    checkpoint_seconds: OptSeconds = None
    """Seconds between checkpoints."""
    checkpoint_steps: OptCount = None
    """Steps between checkpoints of an online fit."""
    report_steps: OptCount = None
    """Steps between reports of an online fit."""
    validate_steps: OptCount = None
    """Steps between validations of an online fit; once an epoch by default."""
    run_rows: OptCount = None
    """Consecutive rows that stay together in the shuffled order of an epoch."""
    buffer_runs: OptCount = None
    """Number of ranges of `run_rows` rows that are shuffled together."""
    keep_scratch: bool | None = None
    """Keep the temporary rows in `scratch` after the fit."""
    on_bad_shard: BadShardChoice = None
    """`"stop"`, or `"skip"`: exclude rows that cannot be read, and report them."""
    cache: Annotated[Any, BeforeValidator(_parse_none), AfterValidator(_check_cache)] = None
    """Memory of a worker to keep rows between passes: a share, a size such as `"2GiB"`, or `"auto"`."""


def _check_grid(value: Any) -> Any:
    """Check a mapping from parameters to lists of values; convert the word "none" to None."""
    if not isinstance(value, Mapping) or not value:
        raise ValueError("write parameters with lists of values, for example { capsule_dim = [2, 4, 8] }")
    for name, values in value.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name} = {values!r} is not a list of values; write for example [2, 4, 8]")
    return {name: [_parse_none(item) for item in values] for name, values in value.items()}


class SearchSection(_Section):
    """``[search]``: a search for the best values of model parameters."""

    grid: Annotated[dict[str, list[Any]], BeforeValidator(_check_grid)]
    """Model parameters with lists of values, for example `{ capsule_dim = [4, 8] }`."""
    n_iter: OptCount = None
    """Number of candidates to draw from the grid; by default the whole grid."""
    cv: Annotated[Annotated[int, Field(ge=2)] | None, BeforeValidator(_refuse_bool)] = None
    """Number of folds; by default candidates are compared on the validation rows."""
    scoring: OptText = None
    """Metric for the comparison; by default the score of the model."""
    halving: bool = False
    """Stop the worse half of the candidates early, repeatedly."""
    min_passes: Annotated[int, Field(ge=1)] = 8
    """Passes before the first candidates are stopped."""


class ClusterSection(_Section):
    """``[cluster]``: a running Dask scheduler, or workers to start; by default only this process."""

    scheduler: OptText = None
    """Address of a running Dask scheduler."""
    workers: OptCount = None
    """Worker processes to start on this machine."""
    threads: OptCount = None
    """Threads per worker; without workers, threads of this process."""
    memory_limit: OptMemory = None
    """Memory limit per worker: a size such as `"4GiB"`, bytes, a share of the machine, or `"auto"`."""
    device: OptText = None
    """`"cpu"`, `"gpu"`, or `"auto"`."""
    allow_mismatch: bool = False
    """Run although versions differ between client, scheduler and workers."""
    tls_ca: OptText = None
    """File with the certificate of the authority, for a scheduler at `tls://`."""
    tls_cert: OptText = None
    """File with the certificate of this client."""
    tls_key: OptText = None
    """File with the private key of `tls_cert`."""


SECTIONS: dict[str, type[_Section] | None] = {
    "job": JobSection,
    "data": DataSection,
    "model": None,  # its keys are the estimator's parameters
    "search": SearchSection,
    "engine": EngineSection,
    "cluster": ClusterSection,
}


@dataclass(frozen=True)
class Job:
    """Job whose keys all have values: from job file, environment, command line or defaults."""

    job: JobSection
    data: DataSection
    kind: str
    params: dict[str, Any]
    engine: EngineSection = field(default_factory=EngineSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    origins: dict[str, str] = field(default_factory=dict)
    search: SearchSection | None = None
    callbacks: tuple[dict[str, Any], ...] = ()

    def values(self) -> dict[str, Any]:
        """Return all values by ``"section.key"``, in the order of the job file."""
        found = {}
        for name, section in self._sections().items():
            found.update({f"{name}.{key}": value for key, value in section.items()})
        for table in self.callbacks:
            kind = table["kind"]
            found.update({f"callbacks.{kind}.{key}": v for key, v in table.items() if key != "kind"})
        return found

    def estimator_params(self) -> dict[str, Any]:
        """Return the arguments of the estimator's constructor, including seed, device and threads."""
        params = dict(self.params)
        if params.get("random_state") is None and "random_state" in params:
            params["random_state"] = self.job.seed
        if self.cluster.device is not None and "device" in params:
            params["device"] = self.cluster.device
        in_process = self.cluster.workers is None and self.cluster.scheduler is None
        if in_process and self.cluster.threads is not None and params.get("n_jobs") is None:
            params["n_jobs"] = self.cluster.threads
        return params

    def with_seed(self) -> Job:
        """Return the job with a seed: its own, or one drawn now and recorded (origin ``"drawn"``)."""
        if self.job.seed is not None or self.params.get("random_state") is not None:
            return self
        seed = secrets.randbits(31)
        origins = self.origins | {"job.seed": "drawn"}
        return replace(self, job=self.job.model_copy(update={"seed": seed}), origins=origins)

    @property
    def keys_in_memory(self) -> list[str]:
        """Keys of ``[data]`` whose rows were only in the memory of the Python process that fitted them."""
        return [key for key, value in self.data.model_dump().items() if value == IN_MEMORY]

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON-able values, as written to ``job.json`` in the run folder."""
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        # Write callbacks only if a job has some, so that other jobs keep the older format.
        callbacks = {"callbacks": [dict(table) for table in self.callbacks]} if self.callbacks else {}
        return head | self._sections() | callbacks | {"origins": dict(self.origins)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], *, where: str = "job.json") -> Job:
        if stored.get("format") != FORMAT:
            raise JobError(f"{where} is not a scalelatent job (its 'format' is {stored.get('format')!r})")
        version = stored.get("format_version")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise JobError(
                f"{where} has job format version {version}; this scalelatent reads versions up to "
                f"{FORMAT_VERSION}; update scalelatent"
            )
        model = dict(stored["model"])
        return cls(
            job=JobSection.model_validate(stored["job"]),
            data=DataSection.model_validate(stored["data"]),
            kind=model.pop("kind"),
            params=model,
            engine=EngineSection.model_validate(stored["engine"]),
            cluster=ClusterSection.model_validate(stored["cluster"]),
            origins=dict(stored.get("origins", {})),
            search=SearchSection.model_validate(stored["search"]) if "search" in stored else None,
            callbacks=tuple(stored.get("callbacks", ())),
        )

    def _sections(self) -> dict[str, dict[str, Any]]:
        return {
            "job": self.job.model_dump(),
            "data": self.data.model_dump(),
            "model": {"kind": self.kind, **self.params},
            # Write the search only if a job has one, so that other jobs keep the older format.
            **({} if self.search is None else {"search": self.search.model_dump()}),
            "engine": self.engine.model_dump(),
            "cluster": self.cluster.model_dump(),
        }
