"""Passes on a Dask cluster.

The driver: :mod:`.executor` with :mod:`.passes`, :mod:`.maps` and :mod:`.online`, whose futures
:mod:`.window` bounds, :mod:`.watch` looks after and :mod:`.trial` tries alone where workers died;
:mod:`.pools` shares spans by device. The workers: :mod:`.tasks`, :mod:`.online_tasks`,
:mod:`.trial`. The scheduler: :mod:`.scheduler_side`. Clusters of one's own: :mod:`.cluster`,
:mod:`.workers`, :mod:`.security`.
"""
