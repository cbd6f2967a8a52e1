"""Counter-based random streams: a number depends on what it is for, never on who draws it."""

from __future__ import annotations

import numpy as np

from .random_words import stage_word


def stream(seed: int, stage: str, iteration: int = 0, index: int = 0) -> np.random.Generator:
    """Philox stream of one (seed, stage, iteration, row or leaf)."""
    if seed < 0:
        raise ValueError(f"seed={seed}: a seed is a whole number of at least 0")
    key = np.array([seed % 2**64, stage_word(stage)], dtype=np.uint64)
    counter = np.array([0, 0, index, iteration], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_seed() -> int:
    """A fresh seed from the operating system, to be recorded (``seed_``)."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def resolve_seed(random_state: object) -> int:
    """The seed that a ``random_state`` means: itself, or drawn where it is None or a generator."""
    if random_state is None:
        return draw_seed()
    if (
        isinstance(random_state, (int, np.integer))
        and not isinstance(random_state, bool)
        and random_state >= 0
    ):
        return int(random_state)
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**32))
    raise ValueError(
        f"random_state={random_state!r}: give None, a whole number of at least 0, a numpy Generator or "
        "RandomState"
    )
