"""Whether this process can use a folder as a run does: tried, since permissions do not tell."""

from __future__ import annotations

import os
import socket
import uuid

from scalelatent.errors import ScalelatentError

from .disk import is_local, locate

__all__ = ["folder_trouble"]


def folder_trouble(url: str, mark: str | None = None) -> str:
    """Why this process cannot see, write, read and delete files in a folder; empty where it can.

    ``mark`` names a file that another process has just written there: without it the folder is not the same
    one. A folder that does not exist yet is tried where it would be made; nothing is left behind.
    """
    host, probe, data = socket.gethostname(), f".probe-{uuid.uuid4().hex[:12]}", bytes(4096)
    try:
        place = locate(url)
        if mark is not None and not place.has(mark):
            if is_local(url) and not os.path.exists(place.url):
                return f"it does not exist on host {host}"
            return "does not show what the asking machine writes there: another folder of the same name"
        if is_local(url):
            folder = _existing(place.url)
            if not os.path.isdir(folder):
                return f"{folder} on host {host} is a file"
            place = locate(folder)
        place.write(probe, data)
        try:
            works = place.read(probe) == data and (is_local(url) or probe in place.keys(""))
        finally:
            place.delete(probe)
    except OSError as error:
        return error.strerror or str(error)
    except ScalelatentError as error:
        return str(error)
    return "" if works else "what is written is not read"


def _existing(folder: str) -> str:
    while True:
        try:
            os.stat(folder)
        except (FileNotFoundError, NotADirectoryError):
            folder = os.path.dirname(folder)
        else:
            return folder
