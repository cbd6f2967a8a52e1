"""Kernels give the same bits for vectors of 8 and of 16 numbers, which different processors have."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np

from scalelatent.kernels.vectors import LANES
from scalelatent.models.linear_mixture.kernels import cpu, reference
from scalelatent.models.linear_mixture.kernels.reference import TangentSpec, group_rows


def compute_results() -> list[np.ndarray]:
    rng = np.random.Generator(np.random.Philox(3))
    out: list[np.ndarray] = []
    for n, k, h, shape in (
        (300, 30, 11, (9, 7)),
        (140, 5, 3, (16, 16)),
        (20, 3, 20, (7, 7)),
        (9, 6, 2, (35, 40)),
    ):
        p = shape[0] * shape[1]
        means, bases = rng.normal(size=(k, p)), rng.normal(size=(k, p, h)) / np.sqrt(p)
        x = rng.normal(size=(n, p)).astype("f4")
        noise, weights = np.exp(rng.normal(size=(k, p))), np.full(k, 1 / k)
        factors = reference.factor_scores(means, bases, noise, weights, np.zeros(p))
        for scores in (reference.error_scores(means, bases, means.mean(axis=0)), factors):
            scorer = cpu.make_scorer(scores, np.array([0, k // 3, k]))
            out += [*cpu.nearest(scorer, x, 0, 2), cpu.all_scores(scorer, x, 1, 2)]
            tangents = cpu.tangent_rows(x, shape, reference.TANGENTS, 0.6)
            candidates = rng.integers(0, k, (n, 3)).astype("i4")
            distances = cpu.tangent_distance(cpu.pack_tangent_scores(scores), x, tangents, candidates)
            out += [tangents, distances]
        groups = group_rows(rng.integers(0, k, n), k, rng.random(n))
        sums = np.zeros((k, p)), np.zeros((k, p)), np.zeros((k, h, p)), np.zeros((k, h, h))
        cpu.add_scatter(cpu.pack_bases(means, bases, True), x, groups, *sums)
        more = np.zeros((k, h, p)), np.zeros((k, 3))
        spec, still = (
            TangentSpec(reference.TANGENTS[4:], shape, 0.6),
            cpu.pack_bases(0 * means, bases, False),
        )
        cpu.add_tangent_scatter(still, x, groups, spec, rng.random((k, 3)), *more)
        out += [*sums, *more]
    return out


def compute_digests() -> list[str]:
    return [hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16] for a in compute_results()]


def test_the_vector_width_changes_no_bit():
    other = 8 if LANES == 16 else 16
    code = (
        "import json, sys; from tests.models.linear_mixture import test_widths as t; "
        "json.dump([t.LANES, t.compute_digests()], sys.stdout)"
    )
    environment = {**os.environ, "SCALELATENT_LANES": str(other)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=500, check=True
    )
    lanes, found = json.loads(done.stdout)
    assert lanes == other
    assert found == compute_digests()
