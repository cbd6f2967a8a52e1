"""What the runner needs of the workers of a cluster; imported only when there is one."""

from __future__ import annotations

import sys
from pathlib import Path

from distributed import Client

from scalelatent.deploy.asking import ask_workers

__all__ = ["peak_bytes", "peak_of_workers"]


def peak_of_workers(client: Client) -> int | None:
    """Return the largest peak of any worker, in bytes; None if they do not answer in time."""
    try:
        peaks = ask_workers(client, peak_bytes)
    except Exception:  # noqa: BLE001  whatever Dask raises: the work is done, a number less spoils nothing
        return None
    return max((peak for peak in peaks.values() if isinstance(peak, int)), default=None)


def peak_bytes() -> int:
    """Return the peak resident memory of this process, in bytes.

    Not ru_maxrss where it can be helped: that outlives exec, and so tells of the parent.

    Examples
    --------
    >>> from scalelatent.jobs.cluster_workers import peak_bytes
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
