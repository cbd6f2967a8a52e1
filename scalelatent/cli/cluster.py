"""The verbs of ``scalelatent cluster``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .exits import FAILED
from .show import (
    Json,
    Reach,
    TlsFiles,
    Verbs,
    answer,
    emit,
    progress_bar,
    say,
    show_values,
    size,
    text_of,
    with_scheduler,
    with_tls,
)

app = Verbs(help="Start a cluster to send jobs to; make its certificates.")

Workers = Annotated[int, typer.Option(min=0, help="CPU worker processes.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each CPU worker.")]
Memory = Annotated[str, typer.Option(help="Of each worker, for example 4GB; auto shares what there is.")]
Gpus = Annotated[int, typer.Option(min=0, help="GPU workers beside them, one for each device.")]


@app.command()
@with_tls
def up(
    workers: Workers = 2,
    threads: Threads = 1,
    memory_limit: Memory = "auto",
    gpus: Gpus = 0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the scheduler; 0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    dashboard: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Of the dashboard; 'none' for none.")
    ] = "127.0.0.1:0",
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and admit only who has a certificate.")
    ] = False,
    tls_folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where --tls makes certificates, or finds them.")
    ] = Path("scalelatent-tls"),
    tls_files: TlsFiles = TlsFiles(),  # noqa: B008  no state in it
    scheduler_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the scheduler's address to FILE too.")
    ] = None,
    idle: Annotated[
        float | None, typer.Option(min=0, metavar="MINUTES", help="End once no job was left for so long.")
    ] = None,
    json: Json = False,
) -> None:
    """Start a scheduler and workers, and stay until Ctrl-C; jobs that run then stop at a checkpoint."""
    from scalelatent.deploy.clusters import is_loopback, refuse_loopback
    from scalelatent.deploy.serving import interrupt_on_signals, prepare_certificates, serve
    from scalelatent.jobs.control import stop_jobs

    if not is_loopback(host):
        refuse_loopback(host, ", or 127.0.0.1 for a cluster on one machine")
    security, client_files = None, None
    if tls:
        if any(file is not None for file in tls_files):
            raise typer.BadParameter("give --tls (makes certificates) or your own files, not both")
        security, client_files = prepare_certificates(tls_folder, host)
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
                _tell(served.info, json)
                try:
                    served.wait(idle)
                    say(f"no job for {idle:g} minutes")
                except KeyboardInterrupt:
                    stop_jobs(served.client, tell=say)
                    raise
        except KeyboardInterrupt:
            pass
        say("stopped: the scheduler and all workers have ended")


def _tell(told: dict[str, Any], json: bool) -> None:
    for warning in told["warnings"]:
        typer.echo(typer.style("WARNING: ", fg="red", bold=True) + warning, err=True)
    if json:
        emit(told)
        return
    pools = {True: [], False: []}  # type: dict[bool, list[dict[str, Any]]]
    for worker in told["workers"]:
        pools["GPU" in worker["resources"]].append(worker)
    values: dict[str, Any] = {key: told[key] for key in ("scheduler", "dashboard", "scheduler_file")}
    for name, pool in (("CPU workers", pools[False]), ("GPU workers", pools[True])):
        if pool:
            each = f"{pool[0]['threads']} thread(s)"
            limit = pool[0]["memory_bytes"]
            values[name] = f"{len(pool)}, each {each}, {size(limit) if limit else 'no memory limit'}"
    if told["tls"]:
        values["clients show"] = told["tls"]
    show_values({key: value for key, value in values.items() if value is not None}, title="cluster")
    typer.echo(typer.style("next", bold=True))
    for command in told["next"]:
        typer.echo(f"  {command}")
    typer.echo("Ctrl-C ends it.")


@app.command()
@with_tls
def join(
    scheduler: Annotated[str | None, typer.Argument(metavar="[URL]", help="The scheduler's address.")] = None,
    scheduler_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Wait for FILE, and read the address from it.")
    ] = None,
    workers: Workers = 1,
    threads: Threads = 1,
    memory_limit: Memory = "auto",
    gpus: Gpus = 0,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; by default the one the scheduler sees."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What the workers' names begin with.")] = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to try for the scheduler.")] = 300,
    tls_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="What `cluster certificates` made.")
    ] = None,
    tls_files: TlsFiles = TlsFiles(),  # noqa: B008  no state in it
) -> None:
    """Start the workers of this machine for a scheduler elsewhere, and stay until it ends, or Ctrl-C."""
    import asyncio

    from scalelatent.deploy.connection import check_listening_address, check_protocol
    from scalelatent.deploy.serving import interrupt_on_signals, read_scheduler_address
    from scalelatent.deploy.worker_processes import run_workers

    if tls_folder is not None:
        tls_files = TlsFiles(*(tls_folder / f"{name}.pem" for name in ("ca", "cluster-cert", "cluster-key")))
    with interrupt_on_signals():
        try:
            address = read_scheduler_address(scheduler, scheduler_file, wait)
            security = tls_files.security()  # a scheduler may make them just before it writes its address
            check_protocol(address, security)
            if host is not None:
                check_listening_address(host, address)
            work = run_workers(
                address, workers=workers, threads=threads, memory_limit=memory_limit, gpus=gpus,
                host=host, name=name, security=security, wait_seconds=wait,
                on_joined=lambda names: say(f"{', '.join(names)} joined {address}"),
            )  # fmt: skip
            asyncio.run(work)
        except KeyboardInterrupt:
            say("stopped: these workers have ended")
        else:
            say("the scheduler has ended, and these workers with it")


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where they go; made if missing.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address of a machine of the cluster; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long they are valid.")] = 365,
    json: Json = False,
) -> None:
    """Make the certificates of a cluster with TLS."""
    from scalelatent.deploy.security import make_certificates

    made = {name: str(file) for name, file in make_certificates(folder, hosts=host or (), days=days).items()}
    answer(made, json, title="certificates")


@with_scheduler
def warm(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND]...", help="Models, data, evaluation; all by default."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes; all cores by default.")
    ] = None,
    reach: Reach = Reach(),  # noqa: B008  no state in it
    json: Json = False,
) -> None:
    """Compile kernels ahead, so that no first fit waits for them."""
    if reach.address is None:
        from scalelatent.deploy.warm import warm as compile_here

        with progress_bar("compiling kernels (once for this machine)", "kernels") as on_kernel:
            done = compile_here(kinds or (), processes=jobs, on_kernel=on_kernel)
        hosts = {"": done}
    else:
        from scalelatent.deploy.warm import warm_cluster

        if jobs is not None:
            raise typer.BadParameter("--jobs is for this machine; with --scheduler hosts use all their cores")
        with reach.client() as client:
            hosts = warm_cluster(client, kinds or ())
    if json:
        emit(hosts[""] if reach.address is None else {"hosts": hosts})
        return
    for host, done in hosts.items():
        many, seconds = len(done["compiled"]), done["seconds"]
        text = (
            f"{many} of {done['kernels']} kernels compiled in {seconds} s"
            if many
            else "all kernels are compiled"
        )
        card = f"; for the GPU: {', '.join(done['cuda'])}" if done["cuda"] else ""
        typer.echo(f"{f'{host}: ' if host else ''}{text} ({done['folder']}){card}")


@with_scheduler
def doctor(
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help="Where runs will be written; here by default.")
    ] = None,
    reach: Reach = Reach(),  # noqa: B008  no state in it
    json: Json = False,
) -> None:
    """Check this machine, or a cluster, and name fixes."""
    if reach.address is None:
        from scalelatent.deploy.checks import examine

        findings = examine("." if folder is None else folder)
    else:
        from scalelatent.deploy.checks import examine_cluster

        with reach.client() as client:
            findings = examine_cluster(client, folder)
    failed = any(finding.status == "fail" for finding in findings)
    if json:
        emit({"ok": not failed, "findings": [finding.to_dict() for finding in findings]})
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for finding in findings:
            mark = typer.style(f"{finding.status:<4}", fg=colours[finding.status], bold=True)
            typer.echo(f"{mark}  {finding.check:<13}  {text_of(finding.found)}")
            if finding.fix:
                typer.echo(f"{'':<21}fix: {finding.fix}")
    if failed:
        raise typer.Exit(FAILED)
