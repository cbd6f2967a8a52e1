"""Locks in object stores, which have no file locks: leases with a heartbeat.

A lease is an object `lock/000001.json`, later `lock/000002.json`, …; only the object with the highest number
counts. The store must be able to refuse the creation of an object that exists.

- A process takes the lease by creating the next number. If several processes try, one succeeds.
- The holder writes its object again every `HEARTBEAT_SECONDS`. The lease is free if the object is older than
  `STALE_SECONDS` by the reader's clock (clocks must agree to about a minute), or if the holder's process ran
  on this machine and has ended.
- The holder releases the lease by writing "released" into the object. Numbers only grow, so a holder whose
  lease has expired finds a newer number at its next heartbeat, and stops.

Until this heartbeat, two processes may both use the lease. This does no harm: two processes that run the same
fit write identical files, and an append checks the dataset before its last write.
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

HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 90.0
# Maximum seconds that a release waits for the store.
RELEASE_SECONDS = 10.0


class ObjectLock:
    """Lock in an object store: a lease, that is, an object that the holder must write again regularly."""

    def __init__(self, location: ObjectLocation, key: str = "lock", **doing: object) -> None:
        self._location, self._key, self._doing = location, key, doing
        self._hold: _HeldLease | None = None

    @property
    def lost(self) -> bool:
        return self._hold is not None and self._hold.lost

    def acquire(self) -> None:
        newest = self.newest_number()
        if self._holder_of(newest) is not None:
            raise BlockingIOError(f"{self._location.name_of(self._key)} is locked by another process")
        number, me = newest + 1, this_process() | self._doing
        if not self._location.create(self._object_key(number), json.dumps(me).encode()):
            name = self._location.name_of(self._key)
            raise BlockingIOError(f"{name} was locked by another process just now")
        self._hold = _HeldLease(self, number, me)
        with suppress(OSError):  # Only the newest object counts, so older objects may remain.
            for old in self._all_numbers():
                if old < number:
                    self._location.delete(self._object_key(old))

    def release(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.end()

    def holder(self) -> dict[str, Any] | None:
        """Return `{"pid", "host", "seconds_left", …}` of the process that holds the lease, or None."""
        return self._holder_of(self.newest_number())

    def _holder_of(self, number: int) -> dict[str, Any] | None:
        record = self._read_lease(number) if number else {}
        if not record or record.get("released") or has_ended(record):
            return None
        age = self._location.age(self._object_key(number))
        if age is None or age > STALE_SECONDS:
            return None
        return {**record, "seconds_left": round(STALE_SECONDS - max(age, 0.0))}

    def newest_number(self) -> int:
        return max(self._all_numbers(), default=0)

    def rewrite(self, number: int, record: dict[str, Any]) -> None:
        """Write the lease object of this number again, unless the location has been removed."""
        if self._location.has(self._object_key(number)):
            self._location.write(self._object_key(number), json.dumps(record).encode())

    def _all_numbers(self) -> list[int]:
        names = (name.removesuffix(".json") for name in self._location.keys(self._key))
        return [int(name) for name in names if name.isdigit()]

    def _read_lease(self, number: int) -> dict[str, Any]:
        try:
            return dict(json.loads(self._location.read(self._object_key(number)) or b"{}"))
        except (ValueError, TypeError):
            return {}

    def _object_key(self, number: int) -> str:
        return f"{self._key}/{number:06d}.json"


class _HeldLease:
    """Lease that this process holds; only one thread writes the lease object, so writes stay in order."""

    def __init__(self, lock: ObjectLock, number: int, me: dict[str, Any]) -> None:
        self.lost = False
        self._lock, self._number, self._me = lock, number, me
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="lock-heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Release the lease; if the store does not respond, the lease expires after `STALE_SECONDS`."""
        self._stop.set()
        self._thread.join(RELEASE_SECONDS)

    def _send_heartbeats(self) -> None:
        beats = 0
        while not self._stop.wait(HEARTBEAT_SECONDS):
            beats += 1
            with suppress(OSError):  # The store cannot be reached now; if this lasts, the lease expires.
                if self._lock.newest_number() > self._number:
                    self.lost = True
                    return
                self._lock.rewrite(self._number, {**self._me, "beats": beats})
        with suppress(OSError):
            self._lock.rewrite(self._number, {**self._me, "released": True})


def this_process() -> dict[str, Any]:
    """Return the record about this process that a lock stores while this process holds the lock."""
    return {
        "token": uuid.uuid4().hex,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "space": _process_space(),
        "started": psutil.Process().create_time(),
    }


def _process_space() -> str:
    """Return an id of the boot and the container of this process, within which process numbers are unique."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # Other systems have no id, so the lock of an ended process remains until it expires.
        return uuid.uuid4().hex


def has_ended(written: dict[str, Any]) -> bool:
    """Return whether a holder's process belongs to this machine and has ended."""
    if written.get("space") != _process_space():
        return False
    try:
        return abs(psutil.Process(int(written["pid"])).create_time() - float(written["started"])) > 1.0
    except (psutil.Error, KeyError, ValueError, TypeError):
        return True
