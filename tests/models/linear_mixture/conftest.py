"""The kernels of a model that no kind lists yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scalelatent.contract import kinds
from scalelatent.engine import backend
from scalelatent.models.linear_mixture.kernels import KERNELS


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend, "find_kernels", lambda name: KERNELS.get(name) or kinds.find_kernels(name))
    yield
    backend.find_kernel.cache_clear()
