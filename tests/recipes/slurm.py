"""A real SLURM for tests: the daemons of Debian, with a configuration, a key and ports of the test."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.helpers import wait_for

DAEMONS = ("munged", "slurmctld", "slurmd")
TOOLS = ("sbatch", "scontrol", "sacctmgr", "squeue", "scancel", "srun", "sinfo")
NODES = ("virtual1", "virtual2")
CONFIGURATION = """
ClusterName=scalelatent
SlurmctldHost={host}
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
# A job that is queued again waits until its credential expires: by default 120 s, and at least 5 s.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=1,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=5
InactiveLimit=0
NodeName={nodes[0]} NodeHostname={host} Port={ports[1]} CPUs=2 RealMemory=4000
NodeName={nodes[1]} NodeHostname={host} Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=test Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def list_missing_programs() -> str:
    """Return the names of the SLURM programs that are not installed, joined by commas."""
    return ", ".join(name for name in (*DAEMONS, *TOOLS) if find_program(name) is None)


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def find_free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class SlurmCluster:
    """A SLURM controller and two virtual nodes that run as this user; all waits have time limits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle (at most 60 s)."""
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        (folder / "state").mkdir()
        for node in NODES:
            (folder / f"spool-{node}").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        text = CONFIGURATION.format(
            folder=folder,
            host=host,
            user=pwd.getpwuid(os.getuid()).pw_name,
            nodes=NODES,
            ports=find_free_ports(3),
        )
        (folder / "slurm.conf").write_text(text)
        # slurmd needs the file cgroup.conf, but all other settings are in slurm.conf.
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        wait_for((folder / "munge.socket").exists, 20)
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: all(self.read_node_state(node).startswith("idle") for node in NODES), 60)

    def start_node(self, node: str) -> None:
        """Start slurmd, the daemon of a virtual node."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node and all processes of its jobs, as if the machine failed."""
        import psutil

        daemon = self._daemons.pop(node)
        daemon.kill()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    for step in process.parents():
                        if step.name() == "slurmstepd":
                            step.kill()
                    process.kill()
        daemon.wait(20)

    def read_node_state(self, node: str) -> str:
        """Return the state of a node: ``idle``, ``alloc``, ``down``, …"""
        return self.call("sinfo", "--noheader", "--nodes", node, "--format", "%t", check=False).strip()

    def call(self, *words: str, check: bool = True, **environ: str) -> str:
        """Run a program of SLURM with the test's configuration, and return its output."""
        ended = subprocess.run(
            words, env=self.environ | environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert not check or ended.returncode == 0, (words, ended.stdout, ended.stderr)
        return ended.stdout

    def submit(self, *words: str, **environ: str) -> str:
        """Submit a job by `sbatch`, and return its number."""
        return self.call("sbatch", "--parsable", *words, **environ).strip()

    def show_job(self, number: str) -> dict[str, str]:
        """Return what the SLURM controller reports about a job: values by name."""
        words = self.call("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words)

    def close(self) -> None:
        """Cancel all jobs of this user, wait at most 30 s for their end, and stop the daemons."""
        self.call("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name, check=False)
        try:
            wait_for(lambda: not self.call("squeue", "--noheader", check=False).strip(), 30)
        finally:
            for name in (*NODES, "slurmctld", "munged"):
                if name in self._daemons:
                    self._daemons[name].terminate()
                    try:
                        self._daemons[name].wait(15)
                    except subprocess.TimeoutExpired:
                        self._daemons[name].kill()
                        self._daemons[name].wait(15)

    def _start(self, program: str, *words: str, name: str | None = None) -> None:
        found = find_program(program)
        assert found is not None
        with open(self.folder / f"{name or program}.out", "ab") as log:
            self._daemons[name or program] = subprocess.Popen(
                [found, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ
            )
