"""The folder that keeps compiled kernels, and what is measured of the machine; apart from numba, which takes
half a second to import.
"""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path


def _find_cache() -> str:
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        return str(Path(given) / "scalelatent")
    name = f"numba-{platform.node() or 'host'}"
    # Compiled kernels in a folder of this host: caches on shared file systems race and are slow (numba issues
    # 4807, 10128).
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "scalelatent" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        user = os.getuid() if hasattr(os, "getuid") else 0
        folder = Path(tempfile.gettempdir()) / f"scalelatent-{user}" / name
    return str(folder)


CACHE = _find_cache()
