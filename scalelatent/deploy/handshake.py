"""The version handshake: what runs here, on the scheduler and on the workers must be the same.

Dask sends functions by name and arrays as bytes; another version on the other side fails late and obscurely,
or computes other bits. So versions are compared before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scalelatent.engine.threads import within
from scalelatent.errors import JobError, RunError

from .asking import ASK_SECONDS, address_of, ask_scheduler, ask_workers
from .versions import versions

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["PACKAGES", "Difference", "check_versions", "differences", "table_of"]

PACKAGES = ("scalelatent", "python", "numpy", "numba", "llvmlite", "zarr", "numcodecs", "dask", "distributed")
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
MISSING = "missing"


@dataclass(frozen=True)
class Difference:
    """A package whose versions differ.

    Attributes
    ----------
    package : str
    client, scheduler : str
        Version there, or ``"missing"``; empty where it does not matter.
    workers : dict of str to list of str
        Version to the addresses of the workers that have it.
    """

    package: str
    client: str
    scheduler: str
    workers: dict[str, list[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return {name: getattr(self, name) for name in ("package", "client", "scheduler", "workers")}


def differences(client: Client) -> list[Difference]:
    """Compare the versions here with those of a cluster.

    Parameters
    ----------
    client : distributed.Client

    Returns
    -------
    list of Difference
        Empty where all agree. Python is compared to its minor version. CuPy is compared among the workers
        that have it: one without a GPU needs none.

    Examples
    --------
    >>> from scalelatent.deploy.handshake import differences
    >>> differences(client)  # doctest: +SKIP
    []
    """
    here = _relevant(versions())
    scheduler, workers = _ask(client)
    rows = []
    for package in PACKAGES:
        there: dict[str, list[str]] = {}
        for address, found in sorted(workers.items()):
            there.setdefault(found[package], []).append(address)
        if {here[package], scheduler[package], *there} != {here[package]}:
            rows.append(Difference(package, here[package], scheduler[package], there))
    with_cupy: dict[str, list[str]] = {}
    for address, found in sorted(workers.items()):
        if found["cupy"] != MISSING:
            with_cupy.setdefault(found["cupy"], []).append(address)
    if len(with_cupy) > 1:
        rows.append(Difference("cupy", "", "", with_cupy))
    return rows


def _relevant(found: Mapping[str, str | None]) -> dict[str, str]:
    kept = {name: found.get(name) or MISSING for name in PACKAGES}
    kept["python"] = ".".join(kept["python"].split(".")[:2])
    kept["cupy"] = next((found[name] or MISSING for name in CUPY if found.get(name)), MISSING)
    return kept


def versions_here(scheduler: Any) -> dict[str, str | None]:
    """Return the versions of the process that asks itself."""
    return versions()


def _ask(client: Client) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Versions of the scheduler, and of each worker by its address.

    Asked by a function of scalelatent, which says whether that can be imported, not what a package manager
    believes; who cannot answer it is asked by Dask's own means.
    """
    answers = ask_workers(client, versions)
    workers = {a: _relevant(v) for a, v in answers.items() if isinstance(v, dict)}
    try:
        scheduler = _relevant(ask_scheduler(client, versions_here))
        if len(workers) == len(answers):
            return scheduler, workers
    except RunError:
        raise
    except Exception:  # noqa: BLE001  whatever an import there raises
        scheduler = {}
    others = [name for name in (*PACKAGES, *CUPY) if name != "python"]  # that, Dask tells by itself
    asked: Any = within(ASK_SECONDS, lambda: client.get_versions(packages=others))
    for address, told in asked["workers"].items():
        if address in answers and address not in workers:
            workers[address] = _relevant(told["packages"] | {"scalelatent": None})
    return scheduler or _relevant(asked["scheduler"]["packages"] | {"scalelatent": None}), workers


def table_of(rows: list[Difference]) -> str:
    """Show differences as a table, a line for each package.

    Examples
    --------
    >>> from scalelatent.deploy.handshake import Difference, table_of
    >>> row = Difference("numba", "0.63.1", "0.63.1", {"0.62.0": ["tcp://a:40331"], "0.63.1": ["b", "c"]})
    >>> print(table_of([row]))
    package  here    scheduler  workers
    numba    0.63.1  0.63.1     0.62.0 (tcp://a:40331), 0.63.1 (2 workers)
    """
    lines = [("package", "here", "scheduler", "workers")]
    for row in rows:
        told = (
            f"{version} ({addresses[0] if len(addresses) == 1 else f'{len(addresses)} workers'})"
            for version, addresses in sorted(row.workers.items())
        )
        lines.append((row.package, row.client, row.scheduler, ", ".join(told)))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(line, [*widths, 0], strict=True)).rstrip()
        for line in lines
    )


def check_versions(
    client: Client, allow_mismatch: bool = False, tell: Callable[[str], None] = lambda line: None
) -> list[Difference]:
    """Refuse a cluster whose versions differ from those here.

    Parameters
    ----------
    client : distributed.Client
    allow_mismatch : bool
        Only tell them. A cluster without scalelatent is refused all the same.
    tell : callable
        Called with the table.

    Returns
    -------
    list of Difference

    Raises
    ------
    JobError
        With one table of what differs.
    """
    rows = differences(client)
    if not rows:
        return rows
    table = table_of(rows)
    for row in rows:
        if row.package == "scalelatent" and (MISSING in row.workers or row.scheduler == MISSING):
            who = [*(["the scheduler"] if row.scheduler == MISSING else []), *row.workers.get(MISSING, [])]
            others = " and others" if len(who) > 5 else ""
            raise JobError(
                f"scalelatent cannot be imported by {', '.join(who[:5])}{others} "
                f"of the cluster {address_of(client)}: install it there in the environment that Dask "
                f"runs in (pip install scalelatent), and start it again\n{table}"
            )
    if not allow_mismatch:
        raise JobError(
            f"the cluster {address_of(client)} has other versions than this environment:\n{table}\n"
            "Use one environment (or image) for all of them; or add --allow-mismatch ([cluster] "
            "allow_mismatch = true) to run all the same, where results may have other bits, or tasks may fail"
        )
    tell(f"versions differ, which --allow-mismatch allows:\n{table}")
    return rows
