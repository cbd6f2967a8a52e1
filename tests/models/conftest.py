"""How hypothesis draws: the same examples in every run, more of them with HYPOTHESIS_PROFILE=more."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: the first call of a numba kernel compiles it, and machines that test are busy.
settings.register_profile("scalelatent", deadline=None, derandomize=True, database=None, max_examples=60)
settings.register_profile("more", deadline=None, derandomize=False, database=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "scalelatent"))
