"""Passes over a dataset, in process or on Dask, with the same bits either way.

``rows -> block -> kernel -> Stats -> fixed tree -> M-step -> checkpoint``: :mod:`.passes` runs a span,
:mod:`.grid` merges, :mod:`.inprocess` and :mod:`.dask` are the two executors, :mod:`.loop` is batch
learning; :mod:`.order`, :mod:`.feeding`, :mod:`.chains` and :mod:`.online` are online learning;
:mod:`.mapwrite` writes outputs as large as the data, :mod:`.store` keeps what a resume needs. The engine
knows the contracts of data and models, and no model by name.
"""
