"""Preload module of a scheduler: ``dask scheduler --preload scalelatent.monitor.preload``.

The setting in Dask's configuration is ``distributed: {scheduler: {preload: [scalelatent.monitor.preload]}}``.
The module adds the page ``/scalelatent``, ``/scalelatent.json`` and the Prometheus metrics to the scheduler
before the first job starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent.engine.dask.hooks import add_plugin

from .plugin import PLUGIN, ScalelatentPlugin

if TYPE_CHECKING:
    from distributed import Scheduler


async def dask_setup(scheduler: Scheduler) -> None:
    """Add the plugin to the scheduler that is starting."""
    await add_plugin(scheduler, ScalelatentPlugin(), PLUGIN)
