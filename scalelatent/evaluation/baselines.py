"""What a representation is held against: principal components and latent semantic analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalelatent.errors import DataError

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline


def lsa(n_components: int = 5, *, random_state: int | None = 0) -> Pipeline:
    """Latent semantic analysis (Deerwester et al., 1990): a truncated SVD of tf-idf weights.

    Parameters
    ----------
    n_components : int
    random_state : int, optional

    Returns
    -------
    sklearn.pipeline.Pipeline
        ``fit`` and ``transform`` take word counts (CSR, whole in memory).

    Raises
    ------
    DataError
        No component.

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
    """Principal components: so many, or as many as hold a share of the variance (the paper's baseline: 98 %).

    Parameters
    ----------
    n_components : int or float
        A number of components, or a share below 1.
    whiten : bool
        Scale components to unit variance, as kernel PCA with unit eigenvectors does.

    Returns
    -------
    sklearn.decomposition.PCA

    Raises
    ------
    DataError
        A number that is neither.

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
