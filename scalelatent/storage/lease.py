"""Locks in object stores, which have none on files: leases with a heartbeat.

A lease is an object of its own, `lock/000001.json`, then `lock/000002.json`, …; the newest counts. It needs
one thing of the store: putting an object only where none lies.

- To take the lease is to put the next number. Of several that try, the store lets one in.
- The holder puts its object again every `HEARTBEAT_SECONDS`. One put longer ago than `STALE_SECONDS` (by the
  clock of who looks; clocks have to agree to about a minute), or whose process is seen to be gone on this
  very machine, is free.
- To give it back is to put "released" into it. Numbers only grow, so a holder that slept through its own
  lease finds a newer number at its next heartbeat, and stops.

Until that heartbeat two may be at work. Drivers of a run write the same bits, and an append compares what it
began with before its last write: the lease saves work and keeps logs in order.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from .objects import ObjectLocation

__all__ = ["HEARTBEAT_SECONDS", "STALE_SECONDS", "ObjectLock", "seen_gone", "this_process"]

HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 90.0
RELEASE_SECONDS = 10.0


class ObjectLock:
    """The lease `key` of a place."""

    def __init__(self, place: ObjectLocation, key: str = "lock", **doing: object) -> None:
        self._numbers, self._doing = _Numbers(place, key), doing
        self._hold: _Hold | None = None

    @property
    def lost(self) -> bool:
        return self._hold is not None and self._hold.lost

    def acquire(self) -> None:
        newest = self._numbers.newest()
        if self._holder_of(newest) is not None:
            raise BlockingIOError(f"{self._numbers.name} is held")
        number, me = newest + 1, this_process() | self._doing
        if not self._numbers.create(number, me):
            raise BlockingIOError(f"{self._numbers.name} was taken just now")
        self._hold = _Hold(self._numbers, number, me)
        with suppress(OSError):  # they count no more, so they may as well stay
            self._numbers.delete_before(number)

    def release(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.end()

    def holder(self) -> dict[str, Any] | None:
        """`{"pid", "host", "seconds_left", …}` of the process that holds the lease, or None."""
        return self._holder_of(self._numbers.newest())

    def _holder_of(self, number: int) -> dict[str, Any] | None:
        written = self._numbers.read(number) if number else {}
        if not written or written.get("released") or seen_gone(written):
            return None
        age = self._numbers.age(number)
        if age is None or age > STALE_SECONDS:
            return None
        return {**written, "seconds_left": round(STALE_SECONDS - max(age, 0.0))}


class _Numbers:
    """The objects of one lease."""

    def __init__(self, place: ObjectLocation, key: str) -> None:
        self._place, self._key = place, key
        self.name = place.name_of(key)

    def all(self) -> list[int]:
        names = (name.removesuffix(".json") for name in self._place.keys(self._key))
        return sorted(int(name) for name in names if name.isdigit())

    def newest(self) -> int:
        return max(self.all(), default=0)

    def create(self, number: int, record: dict[str, Any]) -> bool:
        return self._place.create(self._object(number), json.dumps(record).encode())

    def read(self, number: int) -> dict[str, Any]:
        try:
            return dict(json.loads(self._read(number) or b"{}"))
        except (ValueError, TypeError):
            return {}

    def write(self, number: int, record: dict[str, Any]) -> None:
        self._place.write(self._object(number), json.dumps(record).encode())

    def has(self, number: int) -> bool:
        return self._place.has(self._object(number))

    def age(self, number: int) -> float | None:
        return self._place.age(self._object(number))

    def delete_before(self, number: int) -> None:
        for old in self.all():
            if old < number:
                self._place.delete(self._object(old))

    def _read(self, number: int) -> bytes | None:
        return self._place.read(self._object(number))

    def _object(self, number: int) -> str:
        return f"{self._key}/{number:06d}.json"


class _Hold:
    """One number of a lease while it is held: all that is put under it is put by one thread, in order."""

    def __init__(self, numbers: _Numbers, number: int, me: dict[str, Any]) -> None:
        self.lost = False
        self._numbers, self._number, self._me = numbers, number, me
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lock-heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Give the number back, or, where the store does not answer, let it end by itself."""
        self._stop.set()
        self._thread.join(RELEASE_SECONDS)

    def _keep(self) -> None:
        beats = 0
        while not self._stop.wait(HEARTBEAT_SECONDS):
            beats += 1
            with suppress(OSError):  # out of reach for now; if it stays so, the lease ends by itself
                if self._numbers.newest() > self._number:
                    self.lost = True
                    return
                self._numbers.write(self._number, {**self._me, "beats": beats})
        with suppress(OSError):
            # Where the place was removed, "released" would be all that is in it.
            if self._numbers.has(self._number):
                self._numbers.write(self._number, {**self._me, "released": True})


def this_process() -> dict[str, Any]:
    """What the record of a lock says of its holder."""
    return {
        "token": uuid.uuid4().hex,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "space": _process_space(),
        "started": psutil.Process().create_time(),
    }


def _process_space() -> str:
    """Where a process number means the same: this boot of this machine, and container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: no process is ever seen to be gone, and locks end by time
        return uuid.uuid4().hex


def seen_gone(written: dict[str, Any]) -> bool:
    """Whether a holder's process would be seen here, and is not."""
    if written.get("space") != _process_space():
        return False
    try:
        return abs(psutil.Process(int(written["pid"])).create_time() - float(written["started"])) > 1.0
    except (psutil.Error, KeyError, ValueError, TypeError):
        return True
