"""What the runner needs of the workers of a cluster; imported only when there is one."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

from distributed import Client, WorkerPlugin

__all__ = ["DeafToCtrlC", "peak_bytes", "peak_of_workers"]


class DeafToCtrlC(WorkerPlugin):
    """Keep a terminal's Ctrl-C from the workers of a local cluster.

    A terminal sends it to every process of the command; workers that die of it could not finish the pass
    whose end the driver waits for. They end when the driver closes the cluster.
    """

    name = "scalelatent-deaf-to-ctrl-c"

    def setup(self, worker: Any) -> None:
        """Ignore SIGINT from now on; run in the worker's main thread, also after a restart."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def peak_of_workers(client: Client) -> int | None:
    """Return the largest peak of any worker, in bytes; None if they do not answer."""
    try:
        peaks = client.run(peak_bytes, on_error="ignore")
    except (OSError, TimeoutError):
        return None  # the work is done; a number less spoils nothing
    return max(peaks.values(), default=None)


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes.

    Not ru_maxrss where it can be helped: that outlives exec, and so tells of the parent.

    Examples
    --------
    >>> from scalelatent.jobs.workers import peak_bytes
    >>> peak_bytes() > 2**20
    True
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
