"""Preload of a scheduler: ``dask scheduler --preload scalelatent.monitor.preload``.

Or in Dask's configuration: ``distributed: {scheduler: {preload: [scalelatent.monitor.preload]}}``. It puts
the page ``/scalelatent``, ``/scalelatent.json`` and the Prometheus metrics on the scheduler, before any job
comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent.engine.dask.hooks import add_plugin

from .plugin import PLUGIN, ScalelatentPlugin

if TYPE_CHECKING:
    from distributed import Scheduler


async def dask_setup(scheduler: Scheduler) -> None:
    """Put the plugin on the scheduler that is starting."""
    await add_plugin(scheduler, ScalelatentPlugin(), PLUGIN)
