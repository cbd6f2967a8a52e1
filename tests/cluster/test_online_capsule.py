"""Stepwise EM of capsule regression on a cluster has the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_same_bits_on_a_cluster(
    client: Any, fit: Any, fit_alone: Any, assert_same: Any, tmp_path: Path
) -> None:
    options = {"algorithm": "stepwise", "n_epochs": 2, "n_chains": 4, "batch_rows": 1000}
    assert_same(fit(client, run_dir=tmp_path / "run", **options), fit_alone(**options))
    assert not list(tmp_path.rglob("leaf-*.rec"))
