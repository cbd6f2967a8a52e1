"""
Outliers and missing sensors by a mixture
=========================================

This example is for readers with rows of sensor values. A :class:`~scalelatent.LinearMixture` learns a
density. The density finds rows that do not belong, and estimates sensors that are missing.
"""

# %%
# Rows
# ----
# A machine runs in three states. In each state 20 sensors follow 3 hidden causes, plus noise. An outlier
# has the mean and the spread of normal rows, sensor by sensor, but its sensors do not fit together.

import matplotlib.pyplot as plt
import numpy as np
from sklearn.ensemble import IsolationForest
from sklearn.impute import KNNImputer
from sklearn.metrics import roc_auc_score

import scalelatent as sl

rng = np.random.default_rng(0)
means = rng.normal(0, 3, (3, 20))
causes = rng.normal(size=(3, 3, 20))


def draw_rows(n_rows):
    state = rng.integers(3, size=n_rows)
    hidden = rng.normal(size=(n_rows, 1, 3)) @ causes[state]
    return (means[state] + hidden[:, 0] + rng.normal(0, 0.3, (n_rows, 20))).astype("float32")


train, normal = draw_rows(5000), draw_rows(900)
outliers = np.stack([rng.permutation(column) for column in draw_rows(100).T], axis=1)
rows, is_outlier = np.concatenate([normal, outliers]), np.arange(1000) >= 900

# %%
# Outliers
# --------
# ``score_samples`` returns the log-likelihood of each row. A low value marks an outlier. The area under the
# ROC curve (AUC) is 1 if all outliers come first.

density = sl.LinearMixture(n_components=3, n_dims=3, likelihood="ppca", random_state=0).fit(train)
forest = IsolationForest(random_state=0).fit(train)
scores = {"mixture": density.score_samples(rows), "isolation forest": forest.score_samples(rows)}
for name, score in scores.items():
    print(f"{name:18} AUC {roc_auc_score(is_outlier, -score):.3f}")

figure, axes = plt.subplots(figsize=(6, 3.2))
for name, score in scores.items():
    axes.plot(np.cumsum(is_outlier[np.argsort(score)]), label=name)
axes.set(xlabel="rows inspected, the lowest score first", ylabel="outliers found, of 100")
axes.legend(loc="lower right")
plt.show()

# %%
# Missing sensors
# ---------------
# Suppose that the last five sensors are missing. ``reconstruct`` replaces them by their conditional means,
# given the other sensors.

observed = np.arange(20) < 15
gaps = np.where(observed, normal, np.nan)
estimates = {
    "mixture": density.reconstruct(normal, observed=observed),
    "5 nearest neighbours": KNNImputer(n_neighbors=5).fit(train).transform(gaps),
    "mean of the column": np.where(observed, normal, train.mean(axis=0)),
}
print("\nroot mean squared error of the missing sensors (their noise alone is 0.30)")
for name, estimate in estimates.items():
    print(f"{name:22} {np.sqrt(np.mean((estimate - normal)[:, ~observed] ** 2)):.2f}")

assert roc_auc_score(is_outlier, -scores["mixture"]) > 0.95
