"""Files of cluster/ (Kubernetes, Docker Compose, SLURM, SSH) match their schemas and the code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main

import scalelatent as sl
from scalelatent.cli import app
from scalelatent.deploy import worker_processes as workers
from scalelatent.errors import JobError

yaml = pytest.importorskip("yaml")
CLUSTER = Path(__file__).resolve().parents[2] / "cluster"
KUBERNETES = sorted((CLUSTER / "kubernetes").glob("*.yaml"))
COMPOSE = CLUSTER / "compose"


def read_documents(*files: Path) -> list[dict[str, Any]]:
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def find_pods(kind: str) -> list[dict[str, Any]]:
    """Return the specifications of pods of a kind ("scheduler" or "worker") in the Kubernetes manifests."""
    specs = [
        d["spec"] for d in read_documents(*KUBERNETES) if d["kind"] in ("DaskCluster", "DaskWorkerGroup")
    ]
    return [spec[kind]["spec"] for spec in specs if kind in spec]


def find_containers(kind: str) -> list[dict[str, Any]]:
    """Return the containers of all pods of a kind ("scheduler" or "worker")."""
    return [container for pod in find_pods(kind) for container in pod["containers"]]


def read_compose() -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


def test_dask_configuration_matches_the_verbs():
    config = yaml.safe_load((CLUSTER / "dask.yaml").read_text())["distributed"]
    assert config["nanny"]["pre-spawn-environ"] == workers.WORKER_ENVIRONMENT
    given = {f"distributed.scheduler.{name}": value for name, value in config["scheduler"].items()}
    assert given == workers.SCHEDULER_SETTINGS | {
        "distributed.scheduler.preload": ["scalelatent.monitor.preload"]
    }


def test_dask_configuration_gives_every_role_a_certificate(tmp_path):
    pytest.importorskip("cryptography")
    import dask
    from distributed import Security

    from scalelatent.deploy.security import make_certificates

    made = make_certificates(tmp_path)
    text = (CLUSTER / "dask.yaml").read_text().replace("/tls/", f"{tmp_path}/")
    with dask.config.set(dask.config.merge(dask.config.config, yaml.safe_load(text))):
        security = Security()
        assert security.require_encryption
        assert security.tls_ca_file == str(made["ca.pem"])
        for role in ("scheduler", "worker", "client"):
            assert security.get_connection_args(role)["ssl_context"] is not None


def list_dask_commands() -> list[list[str]]:
    found = [container["args"] for kind in ("scheduler", "worker") for container in find_containers(kind)]
    services = read_compose()["services"]
    return found + [services[name]["command"].split() for name in ("scheduler", "worker", "gpu-worker")]


@pytest.mark.parametrize("words", list_dask_commands(), ids=" ".join)
def test_commands_use_options_of_the_installed_dask(words):
    verb = importlib.import_module(f"distributed.cli.dask_{words[1]}").main
    assert words[0] == "dask"
    # To make a context, click parses the options and refuses unknown ones, but starts no process.
    values = verb.make_context(words[1], words[2:]).params
    if words[1] == "worker" and values["resources"]:
        assert (values["resources"], values["nthreads"], values["n_workers"]) == ("GPU=1", 1, "1")


@pytest.fixture(scope="module")
def validators() -> dict[str, Any]:
    """Return a JSON schema validator for each Kubernetes kind of the Dask operator, by kind."""
    jsonschema = pytest.importorskip("jsonschema")
    found = importlib.util.find_spec("dask_kubernetes")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs dask-kubernetes")
    crds = Path(found.submodule_search_locations[0], "operator/deployment/helm/dask-kubernetes-operator/crds")
    # The schemas have all fields of a pod. The Python parser would take half a minute, so use the C parser.
    texts = [yaml.load(file.read_text(), yaml.CSafeLoader) for file in crds.glob("*.yaml")]
    return {
        crd["spec"]["names"]["kind"]: jsonschema.Draft202012Validator(
            close_schema(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        )
        for crd in texts
    }


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda file: file.name)
def test_manifests_follow_the_operators_schemas(file, validators):
    for document in read_documents(file):
        if document["apiVersion"] != "kubernetes.dask.org/v1":
            continue
        validator = validators[document["kind"]]
        assert [error.message for error in validator.iter_errors({"spec": document["spec"]})] == []
        misspelt = {"spec": document["spec"] | {"replica": 3}}  # The operator would ignore "replica".
        assert not validator.is_valid(misspelt)


def close_schema(schema: Any) -> Any:
    """Return a stricter schema that refuses unknown names, which the operator would ignore."""
    if isinstance(schema, list):
        return [close_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: close_schema(value) for key, value in schema.items()}
    if "properties" in out and not out.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out


def test_kubernetes_pools_match_their_resources():
    (scheduler,) = find_containers("scheduler")
    cpu, gpu = find_containers("worker")
    names = {document["metadata"]["name"] for document in read_documents(*KUBERNETES)}
    assert {"scalelatent", "scalelatent-gpu", "scalelatent-data"} <= names
    assert "--protocol=tls" in scheduler["args"]
    for worker in (cpu, gpu):
        assert worker["env"][0]["value"] == "tls://scalelatent-scheduler:8786"
        assert "--name=$(DASK_WORKER_NAME)" in worker["args"]  # The operator finds the worker by this name.
        assert worker["resources"]["limits"]["memory"] == worker["resources"]["requests"]["memory"]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert f"--nthreads={cpu['resources']['limits']['cpu']}" in cpu["args"]


def list_images() -> list[str]:
    ours = [container["image"] for kind in ("scheduler", "worker") for container in find_containers(kind)]
    return ours + [service["image"] for service in read_compose()["services"].values()]


@pytest.mark.parametrize("image", sorted(set(list_images())))
def test_images_have_exact_versions(image):
    name, _, tag = image.partition(":")
    assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag)
    if "/" not in name:
        assert tag == sl.__version__


@pytest.mark.parametrize("kind", ["scheduler", "worker"])
def test_pods_follow_the_restricted_standard(kind):
    """The rules are in https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted."""
    for pod in find_pods(kind):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        sources = {source for volume in pod["volumes"] for source in volume} - {"name"}
        assert sources <= {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        for container in pod["containers"]:
            closed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == closed
            assert all("hostPort" not in port for port in container["ports"])


@pytest.mark.parametrize("kind", ["scheduler", "worker"])
def test_containers_are_pulled_if_absent_and_probed_at_their_port(kind):
    for container in find_containers(kind):
        assert container["imagePullPolicy"] == "IfNotPresent"
        probe = container["livenessProbe"]
        assert probe["httpGet"] == {"port": "http-dashboard", "path": "/health"}
        (port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "http-dashboard")
        assert f"--dashboard-address=:{port}" in container["args"]


def test_workers_without_a_scheduler_end_before_a_probe_kills_them():
    """If there is no scheduler, no worker answers the probe; workers must end before the probe fails."""
    for worker in find_containers("worker"):
        probe = worker["livenessProbe"]
        (limit,) = (word for word in worker["args"] if word.startswith("--death-timeout="))
        silence = probe["initialDelaySeconds"] + probe["periodSeconds"] * probe["failureThreshold"]
        assert silence > float(limit.partition("=")[2])


def test_the_network_policy_admits_the_operator():
    (policy,) = (document for document in read_documents(*KUBERNETES) if document["kind"] == "NetworkPolicy")
    labels = [source.get("namespaceSelector", {}).get("matchLabels", {})
              for rule in policy["spec"]["ingress"] for source in rule["from"]]  # fmt: skip
    installed = re.search(r"helm install .* -n (\S+)", (CLUSTER / "kubernetes/README.md").read_text())
    assert installed is not None
    assert {"kubernetes.io/metadata.name": installed[1]} in labels


def test_compose_publishes_on_loopback_only():
    ports = [port for service in read_compose()["services"].values() for port in service.get("ports", ())]
    assert len(ports) >= 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_mounts_existing_files():
    for service in read_compose()["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), source
        build = service.get("build")
        if build:
            assert (COMPOSE / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.skipif(shutil.which("docker") is None, reason="needs docker compose")
def test_compose_file_is_read_by_docker():
    version = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if version.returncode:
        pytest.skip("docker has no compose here")
    command = ["docker", "compose", "--profile", "gpu", "config", "--quiet"]
    read = subprocess.run(
        command, cwd=COMPOSE, env={"GRAFANA_PASSWORD": "x", "PATH": "/usr/bin:/usr/local/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert read.returncode == 0, read.stderr


def test_prometheus_keeps_the_names_of_jobs():
    (scheduler,) = (
        scrape
        for scrape in yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
        if scrape["job_name"] == "scheduler"
    )
    assert scheduler["honor_labels"]  # Without honor_labels, Prometheus renames the label "job".


def list_dashboard_queries() -> list[str]:
    board = json.loads((COMPOSE / "grafana/dashboards/scalelatent.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.mark.cluster
def test_the_board_uses_existing_metrics(tls_cluster, tls_client):
    from urllib.request import urlopen

    port = next(iter(tls_client.scheduler_info(n_workers=-1)["workers"].values()))["services"]["dashboard"]
    pages = [tls_cluster["dashboard"].replace("/status", "/metrics"), f"http://127.0.0.1:{port}/metrics"]
    reported = "".join(urlopen(page, timeout=10).read().decode() for page in pages)
    probed = [urlopen(page.replace("/metrics", "/health"), timeout=10).status for page in pages]
    assert probed == [200, 200]  # Kubernetes probes the address /health.
    there = set(re.findall(r"^# TYPE (\S+)", reported, re.MULTILINE))
    asked = {
        name for query in list_dashboard_queries() for name in re.findall(r"(?:dask|process)_[a-z_]+", query)
    }
    assert len(asked) >= 6
    assert asked <= there
    ours = {name for query in list_dashboard_queries() for name in re.findall(r"scalelatent_[a-z_]+", query)}
    source = importlib.util.find_spec("scalelatent.monitor.metrics")
    if source is not None:
        text = Path(str(source.origin)).read_text()
        assert all(f'"{name.removesuffix("_total")}"' in text for name in ours)


@pytest.mark.parametrize(
    "script", ["ssh/up", "slurm/cluster.sbatch", "slurm/fit.sbatch", "slurm/gpu-workers.sbatch"]
)
def test_scripts_are_read_by_bash_and_use_known_options(script):
    file = CLUSTER / script
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    commands = typer.main.get_command(app).commands
    verbs = commands | {f"cluster {name}": verb for name, verb in commands["cluster"].commands.items()}
    options = {name: {word for option in verb.params for word in option.opts} for name, verb in verbs.items()}
    text = file.read_text().replace("\\\n", " ")
    calls = re.findall(r"scalelatent (cluster (?:up|join|certificates)|fit|resume|cancel)\b(.*)", text)
    assert calls
    for verb, rest in calls:
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", rest)) <= options[verb]


@pytest.fixture(scope="module")
def jobqueue() -> Any:
    spec = importlib.util.spec_from_file_location("jobqueue_cluster", CLUSTER / "slurm/jobqueue_cluster.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [("30", 1800), ("30:10", 1810), ("2:00:00", 7200), ("1-12", 129600), ("1-00:30", 88200),
     ("1-00:00:00", 86400)],
)  # fmt: skip
def test_walltimes_of_slurm_are_converted_to_seconds(jobqueue, tmp_path, walltime, seconds):
    assert jobqueue.parse_walltime(walltime) == seconds
    assert jobqueue.parse([str(tmp_path), "--walltime", walltime]).walltime == walltime


@pytest.mark.parametrize("walltime", ["", "1h", "1:2:3:4", "1-", "-5"])
def test_invalid_walltimes_are_refused(jobqueue, tmp_path, capsys, walltime):
    with pytest.raises(SystemExit):
        jobqueue.parse([str(tmp_path), f"--walltime={walltime}"])
    assert "is not a time limit of SLURM; write minutes" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--host", "localhost"), ("--host", "127.0.0.1"), ()])
def test_jobs_on_other_nodes_refuse_loopback(jobqueue, tmp_path, monkeypatch, words):
    monkeypatch.setattr("distributed.utils.get_ip", lambda: "127.0.1.1")
    with pytest.raises(
        JobError, match="is a loopback address .*give the address of this machine in the network"
    ):
        jobqueue.run(jobqueue.parse([str(tmp_path), *words]))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Return a function that runs a script of cluster/, and returns the exit status and the output.

    Small scripts replace the programs `scalelatent`, `squeue` and `srun`.
    """
    replacements = {
        "scalelatent": 'echo "scalelatent $*"; touch done',
        "squeue": "true",
        "srun": "until [ -e done ]; do sleep 0.05; done",
    }
    (tmp_path / "bin").mkdir()
    for name, text in replacements.items():
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def run(script: str, *words: str, **environ: str) -> tuple[int, str]:
        ended = subprocess.run(
            ["bash", str(CLUSTER / script), *words], env=os.environ | environ, cwd=tmp_path,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return ended.returncode, ended.stdout + ended.stderr

    return run


@pytest.mark.skipif(shutil.which("getent") is None, reason="needs getent")
@pytest.mark.parametrize("address", ["localhost", "127.0.1.1", "::1"])
def test_recipes_for_several_machines_refuse_loopback(run_script, tmp_path, address):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("box 1 0\n")
    alone = f"error: {address} is a loopback address"
    status, output = run_script("ssh/up", str(hosts), ADDRESS=address)
    assert (status, output) == (2, f"{alone}: set ADDRESS to the address of this machine in the network\n")
    job = {"ADDRESS": address, "SLURM_JOB_ID": "1"}
    status, output = run_script("slurm/cluster.sbatch", "folder", **job, SLURM_JOB_NUM_NODES="2")
    assert status == 2
    assert output.startswith(alone)
    assert "set ADDRESS to its address in the network" in output
    _, output = run_script("slurm/cluster.sbatch", "folder", **job, SLURM_JOB_NUM_NODES="1")
    assert "scalelatent cluster up --workers 0 --host 127.0.0.1 " in output


@pytest.mark.skipif(importlib.util.find_spec("dask_jobqueue") is None, reason="needs dask-jobqueue")
@pytest.mark.cluster
def test_the_job_script_of_jobqueue_has_all_options(jobqueue, tmp_path):
    options = jobqueue.parse([str(tmp_path), "--cores", "4", "--memory", "8GB", "--walltime", "10:00:00",
                              "--host", "127.0.0.1"])  # fmt: skip
    cluster = jobqueue.make_cluster(options)
    try:
        script = cluster.job_script()
        assert cluster.scheduler_address.startswith("tls://127.0.0.1:")
    finally:
        cluster.close()
    assert "#SBATCH -t 10:00:00" in script
    assert "export NUMBA_NUM_THREADS=1" in script
    assert f"export DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY={tmp_path}/tls/cluster-key.pem" in script
    assert "--lifetime 32400s --lifetime-stagger 1800s" in script
    assert "--nthreads 1" in script
    assert "--nworkers 4" in script
