"""Monitoring of a run: live progress, the logs of its run folder, and a page of the Dask dashboard.

Names are imported on first use, because a fit in one process needs neither Dask nor a web server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent._lazy import attach

if TYPE_CHECKING:
    from .plugin import ScalelatentPlugin, install
    from .publish import ClusterLog

__all__ = ["ClusterLog", "ScalelatentPlugin", "install"]

_WHERE = {".plugin": ("ScalelatentPlugin", "install"), ".publish": ("ClusterLog",)}

__getattr__, __dir__ = attach(__name__, _WHERE)
