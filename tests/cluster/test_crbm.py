"""A fit of a conditional RBM on a cluster or with several threads has the bits of a fit with one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelatent import ConditionalRBM, Dataset
from scalelatent.contract.stats import Stats
from scalelatent.engine.dask.online_steps import DaskSteps
from scalelatent.errors import DivergenceError
from scalelatent.models.crbm.model.online import CrbmLearner
from scalelatent.models.crbm.model.state import CrbmState
from tests.estimators.test_crbm import make_patterns

FIELDS = ("W_", "Wvx_", "Whx_", "bv_", "bh_")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    folder = tmp_path_factory.mktemp("crbm")
    x, v = make_patterns(400, 1)
    rows = Dataset.from_arrays(x).save(folder / "x", chunk_rows=50)
    both = rows.with_target(Dataset.from_arrays(v).save(folder / "v", chunk_rows=70))
    return both[:320], both[320:]


# Batches of 12 rows are small compared with the columns of x, so a chain (part of a batch) returns factors
# of its gradient.
SMALL_BATCHES = {"batch_size": 12}
OPTIONS: list[dict[str, Any]] = [
    {}, SMALL_BATCHES, {"learner": "pcd", "momentum": 0.5}, {"local_steps": 2, "learner": "cd"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_cluster_gives_the_bits_of_one_process(
    client: Any,
    start_other_cluster: Any,
    pairs: tuple[Dataset, Dataset],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from distributed import Client

    train, held = pairs
    if options is SMALL_BATCHES:
        seen: list[bool] = []
        original = CrbmLearner.step

        def step(self: CrbmLearner, state: CrbmState, stats: Stats, n_rows: int) -> CrbmState:
            seen.append(bool(stats.layout.row_fields))
            return original(self, state, stats, n_rows)

        monkeypatch.setattr(CrbmLearner, "step", step)
        monkeypatch.setattr(DaskSteps, "_use_one", lambda self, groups: groups == 1)

    def fit(jobs: int, **more: Any) -> ConditionalRBM:
        model = ConditionalRBM(
            n_hidden=5, n_epochs=2, n_chains=4, random_state=0, n_jobs=jobs, **{"batch_size": 20, **options}
        )
        return model.fit(train, validation=held, engine={"block_rows": 20, "leaf_rows": 40}, **more)

    fits = [fit(1), fit(3), fit(1, client=client, run_dir=tmp_path / "two")]
    if not options:
        with start_other_cluster(1) as cluster, Client(cluster, timeout=30, set_as_default=False) as one:
            fits.append(fit(1, client=one, run_dir=tmp_path / "one"))
    assert options is not SMALL_BATCHES or (seen and all(seen))
    for other in fits[1:]:
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(other, name), getattr(fits[0], name))
        keys = ("objective", "train_error", "validation_error", "changed_error", "converged")
        reported = [
            [[record[key] for key in keys] for record in model.history_] for model in (fits[0], other)
        ]
        assert reported[0] == reported[1]


def test_arrays_are_corrupted_on_a_cluster(client: Any, tmp_path: Path) -> None:
    v = make_patterns(200, 1)[1]
    model = ConditionalRBM(n_hidden=3, n_epochs=1, corruption={"kind": "flip", "rate": 0.1}, random_state=0)
    alone = model.fit(v).W_
    np.testing.assert_array_equal(model.fit(v, client=client, run_dir=tmp_path / "run").W_, alone)


def test_rows_are_held_out_on_a_cluster(client: Any, pairs: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    model = ConditionalRBM(n_hidden=3, n_chains=2, random_state=0)
    alone = model.fit(pairs[0])
    history, weights = alone.history_, alone.W_
    model.fit(pairs[0], client=client, run_dir=tmp_path / "run")
    np.testing.assert_array_equal(model.W_, weights)
    errors = [[record["validation_error"] for record in reported] for reported in (history, model.history_)]
    assert errors[0] == errors[1]


def test_diverging_local_steps_are_reported_on_a_cluster(
    client: Any, pairs: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    model = ConditionalRBM(
        n_hidden=3, n_epochs=1, n_chains=2, local_steps=3, learning_rate=1e6, random_state=0
    )
    with pytest.raises(DivergenceError, match=r"epoch 1, step \d, at learning_rate=1e\+06: try"):
        model.fit(pairs[0], client=client, run_dir=tmp_path / "run")
