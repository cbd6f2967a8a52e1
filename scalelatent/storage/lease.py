"""One driver per run folder in an object store, where there is no file lock: a lease with a heartbeat."""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .run_lock import HEARTBEAT_SECONDS, STALE_SECONDS

if TYPE_CHECKING:
    from .objects import ObjectLocation

__all__ = ["ObjectLock"]

FOLDER = "lock"
RELEASE_SECONDS = 10.0


class ObjectLock:
    """The lease of one run folder."""

    def __init__(self, place: ObjectLocation) -> None:
        self._place = place
        self._me = {"token": uuid.uuid4().hex, **_this_process()}
        self._hold: _Hold | None = None

    @property
    def lost(self) -> bool:
        """Whether another driver has taken over from this one."""
        return self._hold is not None and self._hold.lost

    def acquire(self) -> None:
        """Take the lease."""
        newest = self._newest()
        if self._holder_of(newest) is not None:
            raise BlockingIOError(f"{self._place.url} is held")
        number = newest + 1
        mine = json.dumps(self._me).encode()
        # A first request whose answer was lost may have put it: then it is ours, and bears our token.
        if not self._place.create(_key(number), mine) and self._place.read(_key(number)) != mine:
            raise BlockingIOError(f"{self._place.url} was taken just now")
        self._hold = _Hold(self._place, number, self._me)
        with suppress(OSError):  # they count no more, so they may as well stay
            for old in _numbers(self._place):
                if old < number:
                    self._place.delete(_key(old))

    def release(self) -> None:
        """Give the lease back; safe to call when it is not held."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.end()

    def holder(self) -> dict[str, Any] | None:
        """Return ``{"pid", "host", "seconds_left", …}`` of who holds the lease, or None."""
        return self._holder_of(self._newest())

    def _holder_of(self, number: int) -> dict[str, Any] | None:
        content = self._place.read(_key(number)) if number else None
        try:
            written = {} if content is None else dict(json.loads(content))
        except (ValueError, TypeError):
            written = {}
        if not written or written.get("released") or _seen_gone(written):
            return None
        age = self._place.age(_key(number))
        if age is None or age > STALE_SECONDS:
            return None
        return {**written, "seconds_left": round(STALE_SECONDS - max(age, 0.0))}

    def _newest(self) -> int:
        return max(_numbers(self._place), default=0)


class _Hold:
    """One number of the lease while it is held: all that is put under it is put by one thread, in order."""

    def __init__(self, place: ObjectLocation, number: int, me: dict[str, Any]) -> None:
        self.lost = False
        self._place, self._number, self._me = place, number, me
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run-folder-heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Give the number back; after a while without an answer whoever waits is let go."""
        self._stop.set()
        self._thread.join(RELEASE_SECONDS)

    def _keep(self) -> None:
        beats = 0
        while not self._stop.wait(HEARTBEAT_SECONDS):
            beats += 1
            with suppress(OSError):  # out of reach for now; if it stays so, the lease ends by itself
                if max(_numbers(self._place), default=0) > self._number:
                    self.lost = True
                    return
                self._put(beats=beats)
        with suppress(OSError):
            # Where the run folder was removed, "released" would be all that is in it.
            if self._place.has(_key(self._number)):
                self._put(released=True)

    def _put(self, **more: Any) -> None:
        self._place.write(_key(self._number), json.dumps({**self._me, **more}).encode())


def _numbers(place: ObjectLocation) -> list[int]:
    names = (name.removesuffix(".json") for name in place.keys(FOLDER))
    return sorted(int(name) for name in names if name.isdigit())


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"


def _this_process() -> dict[str, Any]:
    import psutil

    started = psutil.Process().create_time()
    return {"pid": os.getpid(), "host": socket.gethostname(), "space": _process_space(), "started": started}


def _process_space() -> str:
    """Where a process number means the same: this boot of this machine, and container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: then nobody is ever seen to be gone, and leases end by time
        return uuid.uuid4().hex


def _seen_gone(written: dict[str, Any]) -> bool:
    """Whether a holder's process would be seen here, and is not."""
    import psutil

    if written.get("space") != _process_space():
        return False
    try:
        return abs(psutil.Process(int(written["pid"])).create_time() - float(written["started"])) > 1.0
    except (psutil.Error, KeyError, ValueError, TypeError):
        return True
