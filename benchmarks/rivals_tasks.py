"""Data sets, methods and scores of rivals.py.

A method receives rows and a seed, fits, and answers for held-out rows. Methods have the default parameters
of their library, except for the most important parameter of some methods (such as C of the SVM), which is
chosen on a fifth of the training rows. "chosen" in the name of a model of scalelatent means that its numbers
of components and directions are chosen in this way. The seconds of a method include its choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from common import mnist, rcv1_subset, shrink_to_16x16, usps
from defaults import load_small_sets, make_splits
from hcn_common import count_found
from hcn_single import SETS as IMAGE_SETS
from hcn_single import count_placed_kinds, cut_patches, draw_image, make_estimator
from scipy.ndimage import median_filter
from sklearn.cluster import HDBSCAN, KMeans, SpectralClustering
from sklearn.datasets import make_classification, make_multilabel_classification
from sklearn.decomposition import NMF, PCA, MiniBatchDictionaryLearning
from sklearn.ensemble import IsolationForest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, roc_auc_score
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import train_test_split
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import ClassifierChain
from sklearn.neighbors import KernelDensity, KNeighborsClassifier, NearestNeighbors
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import scalelatent as sl
from scalelatent.evaluation.clustering import clustering_accuracy, nmi
from scalelatent.kernels.corruption import corrupt

# Function that receives the rows of a task and a seed, and returns the answer for held-out rows.
Method = Callable[[Any, int], Any]
# Function that receives a seed, and returns an unfitted estimator.
MakeEstimator = Callable[[int], Any]
# A parameter is chosen with at most this number of training rows, to save time.
CHOICE_ROWS = 5_000
# A small fit with this number of rows per class runs before the measurement, so that the code is compiled.
FIRST_ROWS = 20


@dataclass(frozen=True)
class TaskRows:
    """Training rows with their targets, and held-out rows with the true answers."""

    train: Any
    target: Any
    test: Any
    truth: Any


@dataclass(frozen=True)
class Task:
    """Data sets and methods by name, and the score of an answer.

    ``first`` returns the rows of the small fit before the measurement. A score is a dictionary of
    percentages, except for log-likelihoods (nats per row) and counts.
    """

    sets: dict[str, Callable[[int], Any]]
    methods: dict[str, Method]
    score: Callable[[Any, Any], dict[str, float]]
    first: Callable[[Any, str], Any]
    # Data sets that are measured after all others, because their fits take long.
    large: tuple[str, ...] = ()
    # Data sets by method, for methods that cannot run on all sets.
    only: dict[str, tuple[str, ...]] | None = None

    def list_pairs(self) -> list[tuple[str, str]]:
        """Return all pairs of a set and a method that can run on it."""
        only = self.only or {}
        return [(s, m) for s in self.sets for m in self.methods if s in only.get(m, (s,))]


def predict_with(make: MakeEstimator) -> Method:
    """Return a method that predicts the targets of held-out rows."""
    return lambda rows, seed: make(seed).fit(rows.train, rows.target).predict(rows.test)


def choose_and_predict(*makes: MakeEstimator) -> Method:
    """Return a method that first chooses the estimator with the fewest wrong targets of validation rows.

    An estimator that raises ValueError, because it needs more rows, is not chosen.
    """

    def run(rows: TaskRows, seed: int) -> Any:
        train, held, target, truth = train_test_split(
            rows.train, rows.target, test_size=0.2, random_state=seed
        )
        train, target, held, truth = (part[:CHOICE_ROWS] for part in (train, target, held, truth))
        wrong = []
        for make in makes:
            try:
                wrong.append(np.mean(make(seed).fit(train, target).predict(held) != truth))
            except ValueError:
                wrong.append(np.inf)
        return predict_with(makes[int(np.argmin(wrong))])(rows, seed)

    return run


def to_percent(value: float) -> float:
    """Return a share in percent with three decimals."""
    return round(100 * float(value), 3)


def load_small_set(name: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return rows and class codes of a data set of defaults.py, and True if its rows need standardisation."""
    found = next((given for given in load_small_sets() if given[0] == name), None)
    if found is None:
        raise FileNotFoundError(f"{name} needs SCALELATENT_DATA")
    _, x, y, standardise = found
    return (
        x if standardise else np.asarray(x, np.float32),
        np.unique(y, return_inverse=True)[1],
        standardise,
    )


def split_rows(name: str, seed: int) -> TaskRows:
    """Return 70 % training and 30 % held-out rows; measured values are standardised by the training rows."""
    x, y, standardise = load_small_set(name)
    train, target, test, truth = next(make_splits(x, y, standardise, seed))
    return TaskRows(train, target, test, truth)


def load_usps(seed: int) -> TaskRows:
    return TaskRows(*usps(), *usps("test"))


def load_mnist(seed: int, n: int = 60_000) -> TaskRows:
    """Return n random training images of MNIST and all test images, float32 in [0, 1]."""
    (x, y), (test, truth) = mnist(), mnist(part="test")
    kept = np.sort(np.random.default_rng(seed).permutation(len(x))[:n])
    return TaskRows(x[kept] / np.float32(255), y[kept], test / np.float32(255), truth)


def generate_rows(seed: int, n: int) -> TaskRows:
    """Return n rows of five classes with five clusters each; a fifth of the rows are held out."""
    x, y = make_classification(
        n, 40, n_informative=15, n_redundant=10, n_classes=5, n_clusters_per_class=5, random_state=seed
    )
    train, test, target, truth = train_test_split(x.astype(np.float32), y, test_size=0.2, random_state=seed)
    return TaskRows(train, target, test, truth)


def make_lightgbm(seed: int, trees: int = 100) -> Any:
    from lightgbm import LGBMClassifier

    return LGBMClassifier(n_estimators=trees, random_state=seed, n_jobs=1, verbose=-1)


def make_capsules(seed: int, **given: Any) -> Any:
    return sl.CapsuleRegression(random_state=seed, n_jobs=1, **given)


def make_mixtures(seed: int, components: int | None = None, dims: int | None = None) -> Any:
    return sl.LinearMixtureClassifier(n_components=components, n_dims=dims, random_state=seed, n_jobs=1)


def make_logistic(seed: int, c: float) -> Any:
    return LogisticRegression(C=c, max_iter=300)


def select_first_of_classes(rows: TaskRows, method: str) -> TaskRows:
    """Return rows for the small fit that compiles the code before the measurement.

    They are 20 training rows of each class, and 50 held-out rows.
    """
    found = [np.flatnonzero(rows.target == c)[:FIRST_ROWS] for c in np.unique(rows.target)]
    kept = np.concatenate(found)
    return TaskRows(rows.train[kept], rows.target[kept], rows.test[:50], rows.truth[:50])


CLASSIFICATION = Task(
    sets={
        "digits": lambda seed: split_rows("digits", seed),
        "Isolet1": lambda seed: split_rows("Isolet1", seed),
        "USPS": load_usps,
        "generated, 50,000 rows": lambda seed: generate_rows(seed, 50_000),
        "MNIST, 10,000 rows": lambda seed: load_mnist(seed, 10_000),
        "generated, 500,000 rows": lambda seed: generate_rows(seed, 500_000),
        "MNIST, 60,000 rows": load_mnist,
    },
    methods={
        "CapsuleRegression": predict_with(make_capsules),
        "CapsuleRegression, all_vs_all": predict_with(
            lambda seed: make_capsules(seed, architecture="all_vs_all")
        ),
        "LinearMixtureClassifier": predict_with(make_mixtures),
        "LinearMixtureClassifier, chosen": choose_and_predict(
            make_mixtures,
            lambda seed: make_mixtures(seed, 1, 10),
            lambda seed: make_mixtures(seed, 5, 10),
            lambda seed: make_mixtures(seed, 20, 10),
        ),
        "logistic regression": choose_and_predict(
            lambda seed: make_logistic(seed, 0.1), lambda seed: make_logistic(seed, 1.0)
        ),
        "k nearest neighbours": choose_and_predict(
            *(lambda seed, k=k: KNeighborsClassifier(k) for k in (1, 3, 5))
        ),
        "RBF SVM": choose_and_predict(lambda seed: SVC(), lambda seed: SVC(C=10)),
        "LightGBM, 20 rounds": predict_with(lambda seed: make_lightgbm(seed, 20)),
        "LightGBM": predict_with(make_lightgbm),
        "MLP": predict_with(lambda seed: MLPClassifier(early_stopping=True, random_state=seed)),
    },
    score=lambda rows, answer: {"error": to_percent(np.mean(answer != rows.truth))},
    first=select_first_of_classes,
    large=("generated, 500,000 rows", "MNIST, 60,000 rows"),
)


def load_noisy_digits(seed: int) -> TaskRows:
    """Return digits whose grey levels are made continuous by uniform noise of the width of a level."""
    rows = split_rows("digits", seed)
    rng = np.random.default_rng(seed)
    return replace(
        rows, train=rows.train + rng.random(rows.train.shape), test=rows.test + rng.random(rows.test.shape)
    )


def load_usps_levels(seed: int) -> TaskRows:
    """Return USPS rows in 256 grey levels, made continuous by uniform noise of the width of a level."""
    rows, rng = load_usps(seed), np.random.default_rng(seed)
    return replace(
        rows,
        train=256.0 * rows.train.astype(float) + rng.random(rows.train.shape),
        test=256.0 * rows.test.astype(float) + rng.random(rows.test.shape),
    )


def load_mnist_levels(seed: int, n: int) -> TaskRows:
    """Return MNIST rows in 256 grey levels, made continuous by noise, averaged to 16 x 16 pixels."""
    rows, rng = load_mnist(seed, n), np.random.default_rng(seed)
    noisy = (255 * x + rng.random(x.shape, dtype=np.float32) for x in (rows.train, rows.test))
    train, test = (shrink_to_16x16(x / 256).astype(float) * 256 for x in noisy)
    return replace(rows, train=train, test=test)


def add_outliers(load: Callable[[int], TaskRows]) -> Callable[[int], TaskRows]:
    """Return a loader that trains without a class (never the largest), and tests with two kinds of outliers.

    The truth is 0 for rows of the other classes, 1 for rows of the excluded class, and 2 for mixtures of
    two held-out rows, in which each column comes from one of the two.
    """

    def make(seed: int) -> TaskRows:
        rows = load(seed)
        counts = np.bincount(rows.target)
        absent = np.argsort(counts, kind="stable")[seed % (len(counts) - 1)]
        usual, rng = rows.test[rows.truth != absent], np.random.default_rng(seed)
        mixed = np.where(rng.random(usual.shape) < 0.5, usual[rng.permutation(len(usual))], usual)
        other = rows.test[rows.truth == absent]
        truth = np.repeat([0, 1, 2], [len(usual), len(other), len(mixed)])
        test = np.concatenate([usual, other, mixed])
        return TaskRows(rows.train[rows.target != absent], None, test, truth)

    return make


def score_with_density(*makes: MakeEstimator, is_density: bool = True) -> Method:
    """Return a method that scores held-out rows by the model with the best likelihood of validation rows.

    ``is_density`` is False if the scores are not log-likelihoods.
    """

    def run(rows: TaskRows, seed: int) -> tuple[np.ndarray, bool]:
        best = makes[0]
        if len(makes) > 1:
            train, held = train_test_split(rows.train, test_size=0.2, random_state=seed)
            train, held = train[:CHOICE_ROWS], held[:CHOICE_ROWS]
            found = [compute_likelihood(make(seed), train, held) for make in makes]
            best = makes[int(np.argmax(found))]
        return best(seed).fit(rows.train).score_samples(rows.test), is_density

    return run


def compute_likelihood(model: Any, train: np.ndarray, held: np.ndarray) -> float:
    """Return the mean log-likelihood of validation rows; -inf if the model raises ValueError."""
    try:
        return float(model.fit(train).score_samples(held).mean())
    except ValueError:
        return -np.inf


def make_linear_mixture(
    seed: int, components: int | None = None, dims: int | None = None, **given: Any
) -> Any:
    given = {"likelihood": "ppca", "random_state": seed, "n_jobs": 1} | given
    return sl.LinearMixture(n_components=components, n_dims=dims, **given)


class KernelDensityByScale:
    """Kernel density whose bandwidth is a multiple of the mean standard deviation of a column."""

    def __init__(self, width: float) -> None:
        self.width = width

    def fit(self, x: np.ndarray) -> Any:
        return KernelDensity(bandwidth=self.width * float(np.sqrt(x.var(axis=0).mean()))).fit(x)


def compute_density_score(rows: TaskRows, answer: tuple[np.ndarray, bool]) -> dict[str, float]:
    """Return the mean log-likelihood of usual rows, and the ROC areas in percent of both outlier kinds."""
    scores, is_density = answer
    found = {}
    for kind, code in (("class", 1), ("mixed", 2)):
        kept = (rows.truth == 0) | (rows.truth == code)
        found[f"auc_{kind}"] = to_percent(roc_auc_score(rows.truth[kept] == code, -scores[kept]))
    if is_density:
        found["log_likelihood"] = round(float(scores[rows.truth == 0].mean()), 3)
    return found


DENSITY = Task(
    sets={
        "New-Thyroid": add_outliers(lambda seed: split_rows("New-Thyroid", seed)),
        "breast cancer": add_outliers(lambda seed: split_rows("breast cancer", seed)),
        "digits": add_outliers(load_noisy_digits),
        "USPS": add_outliers(load_usps_levels),
        "MNIST 16 x 16, 10,000 rows": add_outliers(lambda seed: load_mnist_levels(seed, 10_000)),
    },
    methods={
        "LinearMixture": score_with_density(make_linear_mixture),
        "LinearMixture, factor analysis": score_with_density(
            lambda seed: make_linear_mixture(seed, likelihood="factor-analysis")
        ),
        "LinearMixture, chosen": score_with_density(
            make_linear_mixture,
            *(
                lambda seed, k=k, h=h: make_linear_mixture(seed, k, h)
                for k, h in ((3, 4), (10, 4), (3, 20), (3, 40), (10, 40))
            ),
        ),
        "GaussianMixture": score_with_density(
            *(lambda seed, k=k: GaussianMixture(k, random_state=seed) for k in (1, 3, 10))
        ),
        "PCA": score_with_density(*(lambda seed, share=share: PCA(share) for share in (0.5, 0.9, 0.99))),
        "kernel density": score_with_density(
            *(lambda seed, width=width: KernelDensityByScale(width) for width in (0.1, 0.2, 0.4, 0.8))
        ),
        "isolation forest": score_with_density(
            lambda seed: IsolationForest(random_state=seed), is_density=False
        ),
    },
    score=compute_density_score,
    first=lambda rows, method: TaskRows(rows.train[:200], None, rows.test[::20], rows.truth[::20]),
)


def load_all_rows(name: str) -> Callable[[int], TaskRows]:
    """Return a loader of a data set to cluster: all rows are training rows and held-out rows."""

    def make(seed: int) -> TaskRows:
        x, y, standardise = load_small_set(name)
        x = StandardScaler().fit_transform(x) if standardise else x
        return TaskRows(x, None, x, y)

    return make


def load_small_mnist(seed: int) -> TaskRows:
    """Return 500 random images of each digit."""
    rows = load_mnist(seed)
    kept = np.concatenate([np.flatnonzero(rows.target == c)[:500] for c in range(10)])
    return TaskRows(rows.train[kept], None, rows.train[kept], rows.target[kept])


def cluster_embedding(embed: Callable[[np.ndarray, int, int], np.ndarray]) -> Method:
    """Return a method that runs k-means with ten starts on an embedding of the rows.

    ``embed`` receives the rows, the number of clusters and the seed.
    """

    def run(rows: TaskRows, seed: int) -> np.ndarray:
        k = len(np.unique(rows.truth))
        return KMeans(k, n_init=10, random_state=seed).fit_predict(embed(rows.train, k, seed))

    return run


def embed_by_network(x: np.ndarray, k: int, seed: int, **given: Any) -> np.ndarray:
    model = sl.MultilayerBootstrapNetwork(n_classes=k, random_state=seed, n_jobs=1, **given)
    return model.fit_transform(x)


def embed_by_umap(x: np.ndarray, k: int, seed: int) -> np.ndarray:
    """Embed rows with min_dist=0, as the documentation of UMAP advises for clusters."""
    from umap import UMAP

    return UMAP(min_dist=0.0, random_state=seed, n_jobs=1).fit_transform(x)


def cluster_spectrally(rows: TaskRows, seed: int) -> np.ndarray:
    k = len(np.unique(rows.truth))
    near = SpectralClustering(k, affinity="nearest_neighbors", random_state=seed)
    return near.fit_predict(rows.train)


def select_first_to_cluster(rows: TaskRows, method: str) -> TaskRows:
    """Return random rows for the small first fit: 300, or 4,200 for UMAP on a large set.

    From 4,096 rows on, UMAP uses another neighbour search, which it has to compile.
    """
    most = 4_200 if method.startswith("UMAP") and len(rows.train) >= 4_096 else 300
    order = np.random.default_rng(0).permutation(len(rows.train))[:most]
    return TaskRows(rows.train[order], None, rows.train[order], rows.truth[order])


CLUSTERING = Task(
    sets={
        **{
            name: load_all_rows(name)
            for name in ("wine", "New-Thyroid", "digits", "UMIST", "Isolet1", "COIL20")
        },
        "MNIST, 5,000 rows": load_small_mnist,
    },
    methods={
        "MultilayerBootstrapNetwork": cluster_embedding(embed_by_network),
        "MultilayerBootstrapNetwork, decay .5": cluster_embedding(
            lambda x, k, seed: embed_by_network(x, k, seed, decay=0.5)
        ),
        "k-means": cluster_embedding(lambda x, k, seed: x),
        "UMAP + k-means": cluster_embedding(embed_by_umap),
        "spectral clustering": cluster_spectrally,
        "HDBSCAN": lambda rows, seed: HDBSCAN(copy=True).fit_predict(rows.train),
    },
    score=lambda rows, answer: {
        "nmi": to_percent(nmi(rows.truth, answer)),
        "accuracy": to_percent(clustering_accuracy(rows.truth, answer)),
    },
    first=select_first_to_cluster,
)


# The tasks of denoising have this number of training images, and this number of held-out images.
IMAGE_ROWS, HELD_IMAGES = 5_000, 2_000


def make_corrupted_mnist(seed: int, **how: Any) -> TaskRows:
    """Return binary images of MNIST, with corruption as rows and without corruption as targets."""
    rows = load_mnist(seed, IMAGE_ROWS)
    v, truth = ((x > 0.5).astype(np.uint8) for x in (rows.train, rows.test[:HELD_IMAGES]))
    train, test = (
        corrupt(clean, np.arange(len(clean)), seed=seed, stage=stage, **how)
        for stage, clean in (("train", v), ("test", truth))
    )
    return TaskRows(train, v, test, truth)


def make_silhouettes(seed: int) -> TaskRows:
    """Return upper halves as rows, and lower halves as targets, of 20 kinds of filled shapes.

    The logarithm of a shape's radius is a sum of five harmonics of the angle; size and place are random.
    """
    rng, n = np.random.default_rng(seed), IMAGE_ROWS + HELD_IMAGES
    kinds = rng.normal(size=(20, 5, 2)) * 0.35 / np.arange(1, 6)[:, None] ** 0.5
    waves = kinds[rng.integers(0, 20, n)] * rng.normal(1, 0.15, (n, 5, 2))
    size, place = rng.uniform(7, 9.5, (n, 1, 1)), rng.uniform(-2, 2, (2, n, 1, 1))
    row, column = np.mgrid[:28, :28] - 13.5
    y, x = row - place[0], column - place[1]
    angle, outline = np.arctan2(y, x), np.zeros((n, 28, 28))
    for order in range(1, 6):
        cosine, sine = waves[:, order - 1].T[..., None, None]
        outline += cosine * np.cos(order * angle) + sine * np.sin(order * angle)
    images = (np.hypot(y, x) < size * np.exp(outline)).astype(np.uint8).reshape(n, 784)
    upper, lower = images[:, :392], images[:, 392:]
    return TaskRows(upper[:IMAGE_ROWS], lower[:IMAGE_ROWS], upper[IMAGE_ROWS:], lower[IMAGE_ROWS:])


class LabelNeighbours:
    """Classifier of several labels: a label is on if most of the k nearest training rows have the label."""

    def __init__(self, k: int) -> None:
        self.near = NearestNeighbors(n_neighbors=k)

    def fit(self, x: np.ndarray, v: np.ndarray) -> LabelNeighbours:
        self.near.fit(x)
        self.v = np.asarray(v)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return (self.v[self.near.kneighbors(x, return_distance=False)].mean(axis=1) > 0.5).astype(np.uint8)


class TargetPerceptron(MLPClassifier):
    """MLP with a logistic output per target; without hidden units it is logistic regression."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> TargetPerceptron:
        # scikit-learn 1.9 confuses the columns of uint8 targets if there are more than 256.
        return super().fit(X, np.asarray(y, np.int64))


def make_perceptron(
    hidden: Sequence[int], epochs: int, rate: float = 1e-3, alpha: float = 1e-4
) -> MakeEstimator:
    return lambda seed: TargetPerceptron(
        tuple(hidden), max_iter=epochs, learning_rate_init=rate, alpha=alpha, random_state=seed
    )


def make_conditional_rbm(seed: int, **given: Any) -> Any:
    return sl.ConditionalRBM(random_state=seed, n_jobs=1, **given)


def filter_by_median(rows: TaskRows, seed: int) -> np.ndarray:
    images = rows.test.reshape(-1, 28, 28)
    return median_filter(images, size=(1, 3, 3)).reshape(len(images), -1)


def restore_by_unet(epochs: int) -> Method:
    """Return a method that trains a U-Net with two poolings and 16 to 64 channels.

    The epoch with the fewest wrong pixels on a tenth of the training rows is used.
    """

    def run(rows: TaskRows, seed: int) -> np.ndarray:
        import torch
        from torch import nn

        torch.manual_seed(seed)
        torch.set_num_threads(1)

        def make_convolutions(channels: int, out: int) -> nn.Module:
            first, second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
            return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())

        class UNet(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.down = nn.ModuleList(
                    [make_convolutions(1, 16), make_convolutions(16, 32), make_convolutions(32, 64)]
                )
                self.up = nn.ModuleList([make_convolutions(96, 32), make_convolutions(48, 16)])
                self.out, self.pool = nn.Conv2d(16, 1, 1), nn.MaxPool2d(2)
                self.wide = nn.Upsample(scale_factor=2)

            def forward(self, x: Any) -> Any:
                a = self.down[0](x)
                b = self.down[1](self.pool(a))
                x = self.up[0](torch.cat([self.wide(self.down[2](self.pool(b))), b], 1))
                return self.out(self.up[1](torch.cat([self.wide(x), a], 1)))

        def to_pictures(x: np.ndarray) -> Any:
            whole = np.zeros((len(x), 784), np.float32)  # Hidden halves are 0.
            whole[:, : x.shape[1]] = x
            return torch.from_numpy(whole.reshape(-1, 1, 28, 28))

        size = rows.target.shape[1]
        net, x, v = UNet(), to_pictures(rows.train), torch.from_numpy(np.asarray(rows.target, np.float32))

        def compute_logits(x: Any) -> Any:
            return net(x).reshape(len(x), -1)[:, -size:]

        def restore(x: Any) -> np.ndarray:
            with torch.no_grad():
                return np.concatenate(
                    [(compute_logits(part) > 0).numpy().astype(np.uint8) for part in x.split(500)]
                )

        steps = torch.optim.Adam(net.parameters(), lr=2e-3)
        held, best = len(x) // 10, (1.0, {})
        truth = np.asarray(rows.target[:held])
        for _ in range(epochs):
            for batch in (held + torch.randperm(len(x) - held)).split(64):
                steps.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(compute_logits(x[batch]), v[batch]).backward()
                steps.step()
            wrong = float(np.mean(restore(x[:held]) != truth))
            if wrong < best[0] or not best[1]:
                best = wrong, {name: values.clone() for name, values in net.state_dict().items()}
        net.load_state_dict(best[1])
        return restore(to_pictures(rows.test))

    return run


def compute_restored_score(rows: TaskRows, answer: np.ndarray) -> dict[str, float]:
    """Return the percentage of wrong pixels and, for whole images, of those that the corruption changed."""
    wrong = answer != rows.truth
    found = {"error": to_percent(wrong.mean())}
    if rows.test.shape[1] == 784:
        found["changed_error"] = to_percent(wrong[rows.test != rows.truth].mean())
    return found


DENOISING = Task(
    sets={
        "MNIST, 10 % flipped": lambda seed: make_corrupted_mnist(seed, kind="flip", rate=0.1),
        "MNIST, 12 x 12 hidden": lambda seed: make_corrupted_mnist(
            seed, kind="occlude", size=(12, 12), shape=(28, 28)
        ),
        "silhouettes, lower half": make_silhouettes,
    },
    methods={
        "median filter": filter_by_median,
        "k nearest neighbours": choose_and_predict(
            *(lambda seed, k=k: LabelNeighbours(k) for k in (1, 5, 15))
        ),
        "logistic regression": choose_and_predict(
            *(make_perceptron((), 20, 0.01, alpha) for alpha in (0.1, 1.0, 10.0))
        ),
        "MLP, 256 units": choose_and_predict(
            *(make_perceptron((256,), 20, 0.003, alpha) for alpha in (1e-4, 0.1, 1.0))
        ),
        "U-Net, 3 epochs": restore_by_unet(3),
        "ConditionalRBM, 3 epochs": predict_with(lambda seed: make_conditional_rbm(seed, n_epochs=3)),
        "ConditionalRBM": predict_with(make_conditional_rbm),
        "U-Net": restore_by_unet(15),
    },
    score=compute_restored_score,
    first=lambda rows, method: TaskRows(rows.train[:100], rows.target[:100], rows.test[:20], rows.truth[:20]),
    only={"median filter": ("MNIST, 10 % flipped",)},
)


def load_documents(seed: int) -> TaskRows:
    """Return 5,000 documents of RCV1 as 500 binary terms, with the 20 most frequent topics as labels."""
    counts, topics, _ = rcv1_subset(500)
    rows = np.sort(np.random.default_rng(seed).permutation(counts.shape[0])[:5000])
    found = topics[rows].toarray()
    common = np.argsort(-found.sum(axis=0, dtype=np.int64), kind="stable")[:20]
    return hold_out((counts[rows].toarray() > 0).astype(np.uint8), found[:, common], seed)


def generate_labels(seed: int) -> TaskRows:
    """Return 5,000 rows of 50 standardised counts with 15 labels; a row has four labels on average."""
    x, y = make_multilabel_classification(5000, 50, n_classes=15, n_labels=4, random_state=seed)
    rows = hold_out(x, y, seed)
    scaler = StandardScaler().fit(rows.train)
    return replace(rows, train=scaler.transform(rows.train), test=scaler.transform(rows.test))


def hold_out(x: np.ndarray, y: np.ndarray, seed: int) -> TaskRows:
    """Return 70 % training and 30 % held-out rows."""
    train, test, target, truth = train_test_split(x, y.astype(np.uint8), test_size=0.3, random_state=seed)
    return TaskRows(train, target, test, truth)


def make_chain(seed: int) -> Any:
    return ClassifierChain(make_logistic(seed, 1.0), order="random", random_state=seed)


def predict_by_ten_chains(rows: TaskRows, seed: int) -> np.ndarray:
    """Return the labels whose mean probability over ten classifier chains exceeds one half."""
    chains = (make_chain(10 * seed + i).fit(rows.train, rows.target) for i in range(10))
    return np.mean([one.predict_proba(rows.test) for one in chains], axis=0) > 0.5


def compute_labels_score(rows: TaskRows, answer: np.ndarray) -> dict[str, float]:
    """Return three percentages: wrong labels, micro-averaged F1, and rows with a wrong label."""
    return {
        "error": to_percent(np.mean(answer != rows.truth)),
        "f1": to_percent(f1_score(rows.truth, answer, average="micro")),
        "rows_wrong": to_percent(np.mean((answer != rows.truth).any(axis=1))),
    }


def select_first_labels(rows: TaskRows, method: str) -> TaskRows:
    """Return 100 training rows for the small first fit; each label has both values, as methods need."""
    target = rows.target[:100].copy()
    target[:20], target[20:40] = 0, 1
    return TaskRows(rows.train[:100], target, rows.test[:20], rows.truth[:20])


LABELS = Task(
    sets={"generated": generate_labels, "RCV1, 20 topics": load_documents},
    methods={
        "one-vs-rest logistic regression": choose_and_predict(
            *(lambda seed, c=c: OneVsRestClassifier(make_logistic(seed, c)) for c in (0.1, 1.0, 10.0))
        ),
        "classifier chain": predict_with(make_chain),
        "ten classifier chains": predict_by_ten_chains,
        "k nearest neighbours": choose_and_predict(
            *(lambda seed, k=k: LabelNeighbours(k) for k in (1, 5, 15))
        ),
        "MLP, 256 units": choose_and_predict(*(make_perceptron((256,), epochs) for epochs in (3, 10, 30))),
        "ConditionalRBM": predict_with(make_conditional_rbm),
        "ConditionalRBM, 30 epochs": predict_with(lambda seed: make_conditional_rbm(seed, n_epochs=30)),
    },
    score=compute_labels_score,
    first=select_first_labels,
)


@dataclass(frozen=True)
class GeneratedPicture:
    """Image with the generator that knows its true features; ``epochs`` limits the small first fit."""

    name: str
    seed: int
    images: Any
    dataset: Any
    epochs: int | None = None


def make_picture(name: str) -> Callable[[int], GeneratedPicture]:
    return lambda seed: GeneratedPicture(name, seed, *draw_image(name, seed, 0))


def learn_parts_by_network(restarts: int) -> Method:
    def run(given: GeneratedPicture, seed: int) -> np.ndarray:
        model = make_estimator(given.name, seed, restarts)
        if given.epochs:
            model.set_params(n_epochs=given.epochs, n_restarts=1)
        model.fit(given.dataset)
        return model.weights_[0][model.used_[0]]

    return run


def decompose_patches(make: Callable[[int, int], Any]) -> Method:
    """Return a method that decomposes image patches into components, three times as many as the network has.

    Each component gives three features, whose pixels are on above 0.3, 0.5 or 0.7 of its maximum.
    """

    def run(given: GeneratedPicture, seed: int) -> np.ndarray:
        count, window = IMAGE_SETS[given.name][1]
        found = np.abs(
            make(3 * count, seed).fit(cut_patches(given.name, given.images, given.dataset)).components_
        )
        found /= np.maximum(found.max(axis=1, keepdims=True), 1e-12)
        return np.concatenate([found > cut for cut in (0.3, 0.5, 0.7)]).reshape(-1, 1, *window)

    return run


def make_dictionary(count: int, seed: int, **given: Any) -> Any:
    return MiniBatchDictionaryLearning(count, random_state=seed, **given)


def compute_parts_score(given: GeneratedPicture, features: np.ndarray) -> dict[str, float]:
    """Return the percentage of the image's building blocks that match a feature, and their number."""
    kinds = given.images.features[count_placed_kinds(given.images)[0]]
    found = count_found(features, kinds) if len(features) else 0
    return {"found": to_percent(found / len(kinds)), "kinds": len(kinds)}


IMAGE_PARTS = Task(
    sets={name: make_picture(name) for name in ("bars", "symbols", "letters", "noisy letters")},
    methods={
        "HierarchicalCompositionalNetwork, 1 start": learn_parts_by_network(1),
        "HierarchicalCompositionalNetwork, 10 starts": learn_parts_by_network(10),
        "NMF": decompose_patches(
            lambda count, seed: NMF(count, init="random", max_iter=500, random_state=seed)
        ),
        "dictionary learning": decompose_patches(make_dictionary),
        "dictionary learning, positive": decompose_patches(
            lambda count, seed: make_dictionary(
                count, seed, positive_dict=True, positive_code=True, fit_algorithm="cd"
            )
        ),
    },
    score=compute_parts_score,
    first=lambda given, method: replace(given, epochs=2),
)

TASKS = {
    "labels": LABELS,
    "density": DENSITY,
    "classification": CLASSIFICATION,
    "clustering": CLUSTERING,
    "parts": IMAGE_PARTS,
    "denoising": DENOISING,
}
# Package of the extra "bench" that a method needs, by the first word of the method's name.
NEEDS = {"LightGBM": "lightgbm", "UMAP": "umap", "U-Net": "torch"}
