"""Work that is begun, and begun anew until it ends or it is clear that it will not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from scalelatent.engine.executor import OnRows
from scalelatent.errors import RunError

from .failures import LeftOut, look_after
from .trial import look_back, try_alone
from .watch import Again
from .work import Work

if TYPE_CHECKING:
    from .executor import DaskExecutor

W = TypeVar("W", bound=Work)
# Times that work is begun anew without one more item done in between.
ATTEMPTS = 4


def run_to_end(executor: DaskExecutor, make: Callable[[], W], on_rows: OnRows) -> W:
    """Look after work to its end; returns what ended.

    Parameters
    ----------
    executor : DaskExecutor
    make : callable
        Gives the work, each time as it is to be begun by then.
    on_rows : callable

    Raises
    ------
    RunError
        It does not get on, or rows are found that workers die of.
    """
    tries, most = 0, -1
    while True:
        current = make()
        try:
            if _tried_first(executor, current):
                continue
            look_after(executor, current, on_rows)
            return current
        except LeftOut:
            current.cancel()
            # What is done of this pass was done of all rows.
            executor.store.drop_nodes()
            executor.rename()
            tries, most = 0, -1
        except Again as again:
            try:
                executor.watch.call_off(current)
            finally:
                current.cancel()
            tries = 1 if current.rows_done > most else tries + 1
            most = max(most, current.rows_done)
            if tries > ATTEMPTS:
                raise RunError(
                    f"{current.name} (pass {current.number}) was begun {tries} times and did not get on: "
                    f"{again}. Look at the logs of the workers, then resume the run"
                ) from None
            executor.rename()
            executor.wait_for_workers()
        except BaseException:
            current.cancel()
            raise


def _tried_first(executor: DaskExecutor, current: Work) -> bool:
    """Try what is suspect before the work begins; whether something was, and the work is to be made anew."""
    if current.began is not None:  # behind the pass before it
        if executor.watch.suspects(current):
            raise Again("two workers have died of it")
        return False
    if not executor.looked_back:
        executor.looked_back = True
        look_back(executor, current)
    return try_alone(executor, current)
