"""Folder of compiled kernels and measured rates.

This module does not import numba, which takes half a second.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path


def _find_cache() -> str:
    """Return a writable folder of this host, from NUMBA_CACHE_DIR, XDG_CACHE_HOME or the home folder."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        return str(Path(given) / "scalelatent")
    name = f"numba-{platform.node() or 'host'}"
    # The folder belongs to this host, because numba's caches on shared file systems race and are slow (numba
    # issues 4807 and 10128).
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "scalelatent" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = Path(tempfile.gettempdir()) / f"scalelatent-{user}" / name
    return str(folder)


CACHE_FOLDER = _find_cache()
