"""The commands of ``scalelatent cluster``, with ``warm`` and ``doctor``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .exits import FAILED
from .show import (
    Json,
    SchedulerOptions,
    TlsFiles,
    VerbGroup,
    format_bytes,
    format_value,
    print_json,
    print_line,
    print_result,
    progress_bar,
    show_values,
    with_scheduler,
    with_tls,
)

app = VerbGroup(help="Start a cluster for jobs, add workers, create certificates.")

Workers = Annotated[int, typer.Option(min=0, help="Number of CPU worker processes.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads per CPU worker.")]
Memory = Annotated[
    str, typer.Option(help="Memory limit per worker, for example 4GB; auto divides the available memory.")
]
Gpus = Annotated[int, typer.Option(min=0, help="Number of additional GPU workers, one per GPU.")]


@app.command()
@with_tls
def up(
    workers: Workers = 2,
    threads: Threads = 1,
    memory_limit: Memory = "auto",
    gpus: Gpus = 0,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the scheduler; 0 chooses a free port.")
    ] = 0,
    host: Annotated[str, typer.Option(help="Address on which the scheduler listens.")] = "127.0.0.1",
    dashboard: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the dashboard; 'none' starts no dashboard.")
    ] = "127.0.0.1:0",
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt connections, and accept only clients with a certificate.")
    ] = False,
    tls_folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder of the certificates; --tls creates missing ones.")
    ] = Path("scalelatent-tls"),
    tls_files: TlsFiles = TlsFiles(),  # noqa: B008  the tuple is immutable
    scheduler_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the address of the scheduler to FILE.")
    ] = None,
    idle: Annotated[
        float | None, typer.Option(min=0, metavar="MINUTES", help="Stop after this time without a job.")
    ] = None,
    json: Json = False,
) -> None:
    """Start a scheduler and workers until Ctrl-C, which stops running jobs at a checkpoint."""
    from scalelatent.deploy.clusters import is_loopback, refuse_loopback
    from scalelatent.deploy.serving import interrupt_on_signals, prepare_certificates, serve
    from scalelatent.jobs.control import stop_jobs

    if not is_loopback(host):
        refuse_loopback(host, ", or 127.0.0.1 for a cluster on one machine")
    security, client_files = None, None
    if tls:
        if any(file is not None for file in tls_files):
            raise typer.BadParameter("give either --tls (creates certificates) or your own files")
        security, client_files = prepare_certificates(tls_folder)
    else:
        security = tls_files.security()
    page = None if dashboard.lower() == "none" else dashboard
    with interrupt_on_signals():
        try:
            with serve(
                workers=workers, threads=threads, memory_limit=memory_limit, gpus=gpus, port=port, host=host,
                dashboard_address=page, scheduler_file=scheduler_file,
                security=security, client_files=client_files,
            ) as served:  # fmt: skip
                _print_cluster(served.info, json)
                try:
                    served.wait(idle)
                    print_line(f"stopping: no job for {idle:g} minutes")
                except KeyboardInterrupt:
                    stop_jobs(served.client, print_line=print_line)
                    raise
        except KeyboardInterrupt:
            pass
        print_line("stopped: the scheduler and all workers have ended")


def _print_cluster(info: dict[str, Any], json: bool) -> None:
    for warning in info["warnings"]:
        typer.echo(typer.style("WARNING: ", fg="red", bold=True) + warning, err=True)
    if json:
        print_json(info)
        return
    pools = {True: [], False: []}  # type: dict[bool, list[dict[str, Any]]]
    for worker in info["workers"]:
        pools["GPU" in worker["resources"]].append(worker)
    values: dict[str, Any] = {key: info[key] for key in ("scheduler", "dashboard", "scheduler_file")}
    for name, pool in (("CPU workers", pools[False]), ("GPU workers", pools[True])):
        if pool:
            each = f"{pool[0]['threads']} thread(s)"
            limit = pool[0]["memory_bytes"]
            values[name] = f"{len(pool)}, each {each}, {format_bytes(limit) if limit else 'no memory limit'}"
    if info["tls"]:
        values["certificates for clients"] = info["tls"]
    show_values({key: value for key, value in values.items() if value is not None}, title="cluster")
    typer.echo(typer.style("next steps", bold=True))
    for command in info["next"]:
        typer.echo(f"  {command}")
    typer.echo("Press Ctrl-C to stop the cluster.")


@app.command()
@with_tls
def join(
    scheduler: Annotated[str | None, typer.Argument(metavar="URL", help="Address of the scheduler.")] = None,
    scheduler_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Wait for FILE, and read the address from it.")
    ] = None,
    workers: Workers = 1,
    threads: Threads = 1,
    memory_limit: Memory = "auto",
    gpus: Gpus = 0,
    host: Annotated[
        str | None,
        typer.Option(help="Address on which workers listen; by default in the network of the scheduler."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Prefix of the worker names.")] = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for the scheduler.")] = 300,
    tls_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder that `cluster certificates` has created.")
    ] = None,
    tls_files: TlsFiles = TlsFiles(),  # noqa: B008  the tuple is immutable
) -> None:
    """Start workers on this machine for a scheduler on another machine, until it ends or Ctrl-C."""
    import asyncio

    from scalelatent.deploy.connection import check_addresses
    from scalelatent.deploy.serving import interrupt_on_signals, read_scheduler_address
    from scalelatent.deploy.worker_processes import run_workers

    if tls_folder is not None:
        tls_files = TlsFiles(*(tls_folder / f"{name}.pem" for name in ("ca", "cluster-cert", "cluster-key")))
    with interrupt_on_signals():
        try:
            address = read_scheduler_address(scheduler, scheduler_file, wait)
            security = tls_files.security()  # a scheduler creates certificates before it writes its address
            check_addresses(address, host)
            work = run_workers(
                address, workers=workers, threads=threads, memory_limit=memory_limit, gpus=gpus,
                host=host, name=name, security=security, wait_seconds=wait,
                on_joined=lambda names: print_line(f"{', '.join(names)} joined {address}"),
            )  # fmt: skip
            asyncio.run(work)
        except KeyboardInterrupt:
            print_line("stopped: these workers have ended")
        else:
            print_line("the scheduler has ended, and these workers with it")


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the files.")],
    json: Json = False,
) -> None:
    """Create the certificates of a cluster with TLS, which expire after a year."""
    from scalelatent.deploy.security import make_certificates

    made = {name: str(file) for name, file in make_certificates(folder).items()}
    print_result(made, json, title="certificates")


def warm(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="KIND", help="Kinds of models, data; by default all kernels."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Number of processes; by default one per core.")
    ] = None,
    json: Json = False,
) -> None:
    """Compile the kernels now, so that the first fit does not wait for the compiler."""
    from scalelatent.deploy.warm import warm as compile_here

    with progress_bar("compiling kernels (once for this machine)", "kernels") as on_kernel:
        done = compile_here(kinds or (), processes=jobs, on_kernel=on_kernel)
    many, folder = len(done["compiled"]), done["folder"]
    text = f"{many} of {done['kernels']} kernels compiled in {done['seconds']} s"
    card = f"; for the GPU: {', '.join(done['cuda'])}" if done["cuda"] else ""
    print_result(done, json, line=f"{text if many else 'all kernels are compiled'} ({folder}){card}")


@with_scheduler
def doctor(
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="Folder for runs; by default the current one.")
    ] = None,
    scheduler_options: SchedulerOptions = SchedulerOptions(),  # noqa: B008  the tuple is immutable
    json: Json = False,
) -> None:
    """Check this machine or a cluster for problems, and print how to fix them."""
    if scheduler_options.address is None:
        from scalelatent.deploy.checks import examine

        findings = examine("." if folder is None else folder)
    else:
        from scalelatent.deploy.checks import examine_cluster

        with scheduler_options.client() as client:
            findings = examine_cluster(client, folder)
    failed = any(finding.status == "fail" for finding in findings)
    if json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for finding in findings:
            mark = typer.style(f"{finding.status:<4}", fg=colours[finding.status], bold=True)
            typer.echo(f"{mark}  {finding.check:<13}  {format_value(finding.found)}")
            if finding.fix:
                typer.echo(f"{'':<21}fix: {finding.fix}")
    if failed:
        raise typer.Exit(FAILED)
