"""Test whether a run can use a folder, by writing a file there; permissions alone do not show this."""

from __future__ import annotations

import os
import socket
import uuid

from scalelatent.errors import ScalelatentError

from .disk import is_local, locate


def find_folder_problem(url: str, mark: str | None = None) -> str:
    """Return why this process cannot see, write, read or delete files in a folder; "" if it can do all.

    ``mark`` names a file that another process has just written into the folder. If this process does not see
    the file, both processes see different folders. If the folder does not exist yet, its nearest existing
    parent is tested. The test file is removed.
    """
    host, probe, data = socket.gethostname(), f".probe-{uuid.uuid4().hex[:12]}", bytes(4096)
    try:
        location = locate(url)
        if mark is not None and not location.has(mark):
            if is_local(url) and not os.path.exists(location.url):
                return f"it does not exist on host {host}"
            return "the file that the asking machine wrote is missing: it is another folder of the same name"
        if is_local(url):
            folder = _find_existing_parent(location.url)
            if not os.path.isdir(folder):
                return f"{folder} on host {host} is a file"
            location = locate(folder)
        location.write(probe, data)
        try:
            works = location.read(probe) == data and (is_local(url) or probe in location.keys(""))
        finally:
            location.delete(probe)
    except OSError as error:
        return error.strerror or str(error)
    except ScalelatentError as error:
        return str(error)
    return "" if works else "a file that was written there cannot be read back"


def _find_existing_parent(folder: str) -> str:
    while True:
        try:
            os.stat(folder)
        except (FileNotFoundError, NotADirectoryError):
            folder = os.path.dirname(folder)
        else:
            return folder
