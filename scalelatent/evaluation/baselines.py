"""Baselines for representations: principal components and latent semantic analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent.errors import DataError

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline


def lsa(n_components: int = 5, *, random_state: int | None = 0) -> Pipeline:
    """Return latent semantic analysis (Deerwester et al., 1990), a truncated SVD of tf-idf weights.

    Parameters
    ----------
    n_components : int
        Number of components, at least 1.
    random_state : int, optional
        Seed of the randomised SVD.

    Returns
    -------
    sklearn.pipeline.Pipeline
        Unfitted; ``fit`` and ``transform`` accept word counts as CSR in memory.

    Raises
    ------
    DataError
        ``n_components`` is below 1.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> counts = scipy.sparse.csr_array(np.random.default_rng(0).poisson(0.3, (50, 20)))
    >>> lsa(3).fit_transform(counts).shape
    (50, 3)
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.pipeline import make_pipeline

    if n_components < 1:
        raise DataError(f"n_components={n_components}: give a whole number of at least 1")
    return make_pipeline(
        TfidfTransformer(sublinear_tf=True), TruncatedSVD(n_components, random_state=random_state)
    )


def pca(n_components: float = 0.98, *, whiten: bool = False) -> Pipeline:
    """Return PCA with a number of components, or with the fewest that hold a share of the variance.

    The paper on bootstrap networks uses the components that hold 98 % of the variance.

    Parameters
    ----------
    n_components : int or float
        Number of components, or share of the variance below 1.
    whiten : bool
        Scale the components to unit variance.

    Returns
    -------
    sklearn.decomposition.PCA

    Raises
    ------
    DataError
        ``n_components`` is neither a whole number nor a share between 0 and 1.

    Examples
    --------
    >>> import numpy as np
    >>> pca(2).fit_transform(np.random.default_rng(0).normal(size=(30, 5))).shape
    (30, 2)
    """
    from sklearn.decomposition import PCA

    if n_components <= 0 or (n_components >= 1 and n_components != int(n_components)):
        raise DataError(
            f"n_components={n_components}: give a whole number of components, or a share between 0 and 1"
        )
    count = n_components if n_components < 1 else int(n_components)
    return PCA(count, svd_solver="full", whiten=whiten)
