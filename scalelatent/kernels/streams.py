"""Random numbers that depend only on (seed, purpose, index), so that any process can compute them."""

from __future__ import annotations

import hashlib

import numpy as np

from scalelatent.errors import DataError

# Number of 64-bit random numbers (words) per value of the counter of the random generator Philox 4 x 64.
_WORDS_PER_STEP = 4


def check_seed(seed: int) -> int:
    """Return the seed; raise DataError if it is negative or needs more than 64 bits."""
    if not 0 <= seed < 2**64:
        raise DataError(f"seed is {seed}: give a whole number from 0 to 2**64 - 1")
    return int(seed)


def stage_word(stage: str) -> int:
    """Return a hash of the purpose of random numbers, which is the second word of Philox's key."""
    return int.from_bytes(hashlib.blake2b(stage.encode(), digest_size=8).digest(), "little")


def random_words(seed: int, purpose: str, start: int, count: int) -> np.ndarray:
    """Return the words ``start`` to ``start + count`` of a Philox stream, uint64 (count,).

    These are raw bits of Philox 4 x 64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
    No numpy version changes them. A process can start anywhere in the stream.
    """
    step, skipped = divmod(start, _WORDS_PER_STEP)
    bits = np.random.Philox(
        key=np.array([seed % 2**64, stage_word(purpose)], dtype=np.uint64),
        counter=np.array([step, 0, 0, 0], dtype=np.uint64),
    )
    return np.asarray(bits.random_raw(skipped + count))[skipped:]


def stream(seed: int, stage: str, iteration: int = 0, index: int = 0) -> np.random.Generator:
    """Return the random generator for a purpose (``stage``), an iteration, and the index of some rows."""
    if seed < 0:
        raise ValueError(f"seed={seed}: give a whole number of at least 0")
    key = np.array([seed % 2**64, stage_word(stage)], dtype=np.uint64)
    counter = np.array([0, 0, index, iteration], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_seed() -> int:
    """Return a new seed from the operating system, which estimators store as ``seed_``."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def resolve_seed(random_state: object) -> int:
    """Return ``random_state`` if it is a number; for None or a generator return a random seed."""
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
