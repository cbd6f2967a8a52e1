"""Mixtures of linear models (Hinton, Revow, Dayan, 1995): pancakes fitted by streamed EM."""

from __future__ import annotations

from scalelatent.contract.kinds import Kind

# Not listed yet: no report, no warm kernels.
KINDS: tuple[Kind, ...] = ()
