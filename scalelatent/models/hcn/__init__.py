"""Hierarchical compositional networks (Lázaro-Gredilla et al., 2016): parts of binary images."""

from __future__ import annotations

from scalelatent.contract.kinds import Kind

KINDS: tuple[Kind, ...] = ()
