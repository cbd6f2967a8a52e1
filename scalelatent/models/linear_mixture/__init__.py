"""Mixtures of linear models (Hinton, Revow, Dayan, 1995): pancakes fitted by streamed EM."""

from __future__ import annotations

from scalelatent.contract.kinds import Kind

# No estimator yet: mathematics and kernels alone.
KINDS: tuple[Kind, ...] = ()
