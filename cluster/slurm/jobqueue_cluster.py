"""A cluster whose workers are SLURM jobs (dask-jobqueue), with TLS; it runs until Ctrl-C.

    python jobqueue_cluster.py FOLDER --jobs 4 --cores 8 --memory 32GB --walltime 12:00:00

FOLDER must be on storage that this machine and all nodes share. The certificates and scheduler.json are
written there. This process is the scheduler. Start it where it can keep running: on a login node, or as a
small job.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import dask

from scalelatent.deploy.clusters import PAGE_PRELOAD, refuse_loopback
from scalelatent.deploy.connection import dashboard_url
from scalelatent.deploy.security import tls_options
from scalelatent.deploy.serving import Served, interrupt_on_signals, prepare_certificates
from scalelatent.deploy.worker_processes import WORKER_ENVIRONMENT, dask_configuration
from scalelatent.errors import JobError
from scalelatent.jobs.control import stop_jobs

# Time limits of SLURM: minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]].
# The last letter of the name of a group is its unit.
WALLTIME = re.compile(
    r"(?:(?P<d>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<m>\d+)(?::(?P<s>\d+))?)"
)
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}  # Seconds of each unit.


def parse_walltime(walltime: str) -> int:
    """Return the seconds of a time limit in a format of SLURM."""
    found = WALLTIME.fullmatch(walltime)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{walltime!r} is not a time limit of SLURM; write minutes, [hours:]minutes:seconds or "
            "days-hours[:minutes[:seconds]]"
        )
    return sum(UNITS[name[-1]] * int(value) for name, value in found.groupdict().items() if value)


def check_walltime(text: str) -> str:
    """Return a time limit unchanged if SLURM accepts its format, and otherwise raise an error of argparse."""
    parse_walltime(text)
    return text


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder on shared storage")
    parser.add_argument(
        "--jobs", type=int, default=2, help="number of SLURM jobs; a job that ends is replaced"
    )
    parser.add_argument("--adapt", type=int, metavar="MOST", help="scale between --jobs and MOST jobs")
    parser.add_argument("--cores", type=int, default=8, help="cores per job; one worker process per core")
    parser.add_argument("--memory", default="32GB", help="memory per job")
    parser.add_argument(
        "--walltime", type=check_walltime, default="12:00:00", help="time limit per job, as for sbatch"
    )
    parser.add_argument("--queue", help="SLURM partition")
    parser.add_argument("--account", help="SLURM account")
    parser.add_argument("--host", help="address of this machine for the nodes")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--idle", type=float, metavar="MINUTES", help="end after this time without a job")
    parser.add_argument("--sbatch", action="append", default=[], help="another option of sbatch; repeatable")
    return parser.parse_args(arguments)


def environment(files: dict[str, str]) -> dict[str, Any]:
    """Return the environment variables of a worker: sizes of thread pools, and certificates for its
    connections.
    """
    tls = {"DASK_DISTRIBUTED__COMM__TLS__CA_FILE": files["ca"]}
    for role in ("WORKER", "CLIENT"):  # The driver of a job is a client that runs on a worker.
        for part in ("cert", "key"):
            tls[f"DASK_DISTRIBUTED__COMM__TLS__{role}__{part.upper()}"] = files[part]
    return WORKER_ENVIRONMENT | tls


def make_cluster(options: argparse.Namespace) -> Any:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        from dask_jobqueue import SLURMCluster
    except ImportError as error:
        raise JobError("SLURM jobs need dask-jobqueue; run: pip install 'scalelatent[slurm]'") from error

    for number, handler in handlers.items():  # The import of dask_jobqueue replaces the handlers of signals.
        signal.signal(number, handler)
    folder = options.folder.absolute()
    security, _ = prepare_certificates(folder / "tls")
    files = {"ca": folder / "tls/ca.pem", "cert": folder / "tls/cluster-cert.pem"}
    files = {name: str(file) for name, file in (files | {"key": folder / "tls/cluster-key.pem"}).items()}
    walltime = parse_walltime(options.walltime)
    host = {"host": options.host} if options.host else {}
    # SLURM kills jobs at the walltime. Workers end before it, each at another time, and first pass their
    # results on to other workers.
    lifetime = ["--lifetime", f"{int(0.9 * walltime)}s", "--lifetime-stagger", f"{int(0.05 * walltime)}s"]
    with dask_configuration():
        return SLURMCluster(
            cores=options.cores, processes=options.cores, memory=options.memory, walltime=options.walltime,
            queue=options.queue, account=options.account, job_extra_directives=options.sbatch,
            protocol="tls://", security=security, shared_temp_directory=str(folder),
            worker_extra_args=lifetime,
            job_script_prologue=[f"export {name}={value}" for name, value in environment(files).items()],
            scheduler_options=host | {
                "port": options.port, "dashboard_address": "127.0.0.1:0",
                "preload": [PAGE_PRELOAD],
            },
            log_directory=str(folder / "logs"),
        )  # fmt: skip


def ask_slurm_about_jobs(cluster: Any) -> None:
    """Raise a JobError with the message of SLURM if SLURM would refuse the jobs of the workers."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
        script.write(cluster.job_script())
        script.flush()
        try:
            asked = subprocess.run(
                ["sbatch", "--test-only", script.name],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise JobError(
                f"sbatch cannot run ({error}); start this script on a machine that can submit jobs"
            ) from None
    if asked.returncode:
        message = " ".join(asked.stderr.split())
        raise JobError(
            f"SLURM refuses the jobs of the workers ({message}); check --queue, --account and --sbatch"
        )


def run(options: argparse.Namespace) -> None:
    from distributed import Client
    from distributed.utils import get_ip

    refuse_loopback(options.host or get_ip())
    cluster = make_cluster(options)
    file = options.folder / "scheduler.json"
    try:
        ask_slurm_about_jobs(cluster)
        # Even for a fixed number of jobs, adapt() is needed: it replaces jobs that reach their walltime.
        cluster.adapt(
            minimum_jobs=max(1, options.jobs),
            maximum_jobs=max(1, options.adapt or options.jobs),
            wait_count=30,
        )
        file.write_text(json.dumps({"address": cluster.scheduler_address}))
        tls = options.folder.absolute() / "tls"
        names = {"ca": "ca.pem", "cert": "client-cert.pem", "key": "client-key.pem"}
        reach = ["--scheduler-file", str(file.absolute())]
        reach += tls_options({name: str(tls / pem) for name, pem in names.items()})
        with Client(cluster, set_as_default=False) as client:
            print(
                f"dashboard {dashboard_url(client)}",
                "scalelatent doctor " + " ".join(reach),
                sep="\n",
                flush=True,
            )
            try:
                Served(client, {}).wait(options.idle)
                print(f"stopping: no job for {options.idle:g} minutes", flush=True)
            except KeyboardInterrupt:
                stop_jobs(client, print_line=lambda line: print(line, flush=True))
        print("ending the jobs of the workers", flush=True)
    finally:
        file.unlink(missing_ok=True)
        cluster.close(timeout=60)


def main() -> None:
    with interrupt_on_signals():
        try:
            run(parse())
        except JobError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    with dask.config.set({"distributed.comm.require-encryption": True}):
        main()
