"""Counter-based random words for rows: word `i` of a stream is a function of (seed, purpose, i) alone."""

from __future__ import annotations

import hashlib

import numpy as np

from scalelatent.errors import DataError

__all__ = ["check_seed", "random_words", "stage_word"]

_WORDS_PER_STEP = 4  # Philox 4 x 64: one step of the counter gives four words


def check_seed(seed: int) -> int:
    """A seed, if it is one word of Philox's key."""
    if not 0 <= seed < 2**64:
        raise DataError(f"seed is {seed}, but a seed is a whole number from 0 to 2**64 - 1")
    return int(seed)


def stage_word(stage: str) -> int:
    """The second word of Philox's key: what the numbers are for."""
    return int.from_bytes(hashlib.blake2b(stage.encode(), digest_size=8).digest(), "little")


def random_words(seed: int, purpose: str, start: int, count: int) -> np.ndarray:
    """The words `start:start + count` of a Philox stream, uint64 (count,).

    Raw bits of Philox 4 x 64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which no
    numpy version changes; any process can begin anywhere in the stream.
    """
    step, skipped = divmod(start, _WORDS_PER_STEP)
    bits = np.random.Philox(
        key=np.array([seed % 2**64, stage_word(purpose)], dtype=np.uint64),
        counter=np.array([step, 0, 0, 0], dtype=np.uint64),
    )
    return np.asarray(bits.random_raw(skipped + count))[skipped:]
