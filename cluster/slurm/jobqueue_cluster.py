"""A cluster whose workers are SLURM jobs (dask-jobqueue), with TLS; runs until Ctrl-C.

    python jobqueue_cluster.py FOLDER --jobs 4 --cores 8 --memory 32GB --walltime 12:00:00

FOLDER lies on storage that this machine and all nodes share; it gets the certificates and scheduler.json.
This process is the scheduler: start it where it may stay (a login node, or a small job of its own).
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from pathlib import Path
from typing import Any

import dask

from scalelatent.deploy.clusters import page_preload
from scalelatent.deploy.security import tls_options
from scalelatent.deploy.serving import own_certificates
from scalelatent.deploy.worker_processes import PIN, configured


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="on shared storage")
    parser.add_argument("--jobs", type=int, default=2, help="SLURM jobs to ask for")
    parser.add_argument("--adapt", type=int, metavar="MOST", help="from --jobs to MOST jobs, as work demands")
    parser.add_argument("--cores", type=int, default=8, help="of each job; one worker process each")
    parser.add_argument("--memory", default="32GB", help="of each job")
    parser.add_argument("--walltime", default="12:00:00", help="of each job")
    parser.add_argument("--queue", help="SLURM partition")
    parser.add_argument("--account", help="SLURM account")
    parser.add_argument("--host", help="this machine as the nodes see it; its network's by default")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--sbatch", action="append", default=[], help="a further line of options; repeatable")
    return parser.parse_args(arguments)


def environment(files: dict[str, str]) -> dict[str, Any]:
    """What a worker is told before it starts: thread pools, and certificates for what connects from it."""
    tls = {"DASK_DISTRIBUTED__COMM__TLS__CA_FILE": files["ca"]}
    for role in ("WORKER", "CLIENT"):  # the driver of a job is a client that runs on a worker
        for part in ("cert", "key"):
            tls[f"DASK_DISTRIBUTED__COMM__TLS__{role}__{part.upper()}"] = files[part]
    return PIN | tls


def make_cluster(options: argparse.Namespace) -> Any:
    from dask_jobqueue import SLURMCluster

    folder = options.folder.absolute()
    security, _ = own_certificates(folder / "tls", options.host or "0.0.0.0")
    files = {"ca": folder / "tls/ca.pem", "cert": folder / "tls/cluster-cert.pem"}
    files = {name: str(file) for name, file in (files | {"key": folder / "tls/cluster-key.pem"}).items()}
    hours, minutes, seconds = (int(part) for part in options.walltime.split(":"))
    walltime = 3600 * hours + 60 * minutes + seconds
    host = {"host": options.host} if options.host else {}
    # SLURM kills at the walltime; workers that leave a little before, and not all at once, lose nothing.
    lifetime = ["--lifetime", f"{int(0.9 * walltime)}s", "--lifetime-stagger", f"{int(0.05 * walltime)}s"]
    with configured():
        return SLURMCluster(
            cores=options.cores, processes=options.cores, memory=options.memory, walltime=options.walltime,
            queue=options.queue, account=options.account, job_extra_directives=options.sbatch,
            protocol="tls://", security=security, shared_temp_directory=str(folder),
            worker_extra_args=lifetime,
            job_script_prologue=[f"export {name}={value}" for name, value in environment(files).items()],
            scheduler_options=host | {
                "port": options.port, "dashboard_address": "127.0.0.1:0",
                "preload": page_preload(),
            },
            log_directory=str(folder / "logs"),
        )  # fmt: skip


def main() -> None:
    options = parse()
    cluster = make_cluster(options)
    try:
        if options.adapt:
            cluster.adapt(minimum_jobs=max(1, options.jobs), maximum_jobs=options.adapt, wait_count=30)
        else:
            cluster.scale(jobs=options.jobs)
        file = options.folder / "scheduler.json"
        file.write_text(json.dumps({"address": cluster.scheduler_address}))
        tls = options.folder.absolute() / "tls"
        names = {"ca": "ca.pem", "cert": "client-cert.pem", "key": "client-key.pem"}
        reach = ["--scheduler", cluster.scheduler_address]
        reach += tls_options({name: str(tls / pem) for name, pem in names.items()})
        page = f"http://127.0.0.1:{cluster.scheduler_info['services']['dashboard']}/status"  # on this machine
        print(f"dashboard {page}", "scalelatent doctor " + " ".join(reach), sep="\n", flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        threading.Event().wait()
    except KeyboardInterrupt:
        print("ending the jobs")
    finally:
        (options.folder / "scheduler.json").unlink(missing_ok=True)
        cluster.close(timeout=60)


if __name__ == "__main__":
    with dask.config.set({"distributed.comm.require-encryption": True}):
        main()
