"""Parameters of bootstrap networks, and of the compressive network that can replace one."""

from __future__ import annotations

from scalelatent.contract.parameters import (
    DEVICE,
    DEVICES,
    N_JOBS,
    RANDOM_STATE,
    Choice,
    Flag,
    Items,
    Number,
    Parameter,
    Parameters,
    Whole,
)


def _make_optional(name: str, doc: str) -> Parameter:
    return Parameter(name, None, Whole(also=(None,)), doc)


PARAMETERS = Parameters(
    (
        Parameter("n_clusterings", 400, Whole(), "clusterings of each layer"),
        Parameter(
            "n_pools",
            "auto",
            Whole(also=("auto", "paper")),
            "pools of rows that the first layer's clusterings share; 'paper': each clustering draws its own",
        ),
        _make_optional("k1", "centroids of the first layer's clusterings; None: half of the rows"),
        Parameter(
            "decay",
            "auto",
            Number(
                "give a number between 0 and 1 (0.5 is the paper's), or 'auto'",
                above=0,
                below=1,
                also=("auto",),
            ),
            "ratio of the numbers of centroids of two layers; 'auto' chooses it without labels",
        ),
        _make_optional("k_last", "fewest centroids that a layer may have"),
        Parameter(
            "feature_fraction",
            0.5,
            Number("give a number above 0 and up to 1 (0.5 is the paper's)", above=0, most=1),
            "share of the columns that a clustering uses",
        ),
        Parameter("metric", "euclidean", Choice(("euclidean", "cosine")), "distance of the first layer"),
        Parameter(
            "n_components",
            None,
            Whole(also=(None,), give="give a number of components, or None for n_classes"),
            "components of the output",
        ),
        _make_optional("n_classes", "expected number of clusters"),
        Parameter("output", "pca", Choice(("pca", "codes")), "what transform returns"),
        Parameter("keep_codes", False, Flag(), "keep the codes of all layers"),
        RANDOM_STATE,
        DEVICE,
        N_JOBS,
    )
)

COMPRESSIVE = Parameters(
    (
        Parameter(
            "hidden",
            (2048, 2048),
            Items(Whole(), "give whole numbers of at least 1", one=True),
            "units of each hidden layer",
        ),
        Parameter("n_epochs", 30, Whole(), "passes over the rows"),
        Parameter("batch_size", 256, Whole(), "rows of a step"),
        Parameter("learning_rate", 1e-3, Number("give a number above 0", above=0), "learning rate of Adam"),
        RANDOM_STATE,
        Parameter("device", "auto", Choice(DEVICES), "'auto' uses a GPU if there is one", decides=False),
        N_JOBS,
    )
)
