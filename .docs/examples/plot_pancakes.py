"""
Digits as pancakes: tangents, rejects and reconstructions
=========================================================

This example is for readers who classify images and want to know when to trust an answer. A
:class:`~scalelatent.LinearMixtureClassifier` describes each class by a few *pancakes*: a mean image and
some directions in which the image may change freely.
"""

# %%
# Fit with and without tangents
# -----------------------------
# A *tangent* is the change of an image that is shifted, rotated or scaled a little. With
# ``"tangent-distance"`` a row is compared with each pancake after the best small change. Here each class
# has one pancake of six directions.

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import scalelatent as sl

x, y = load_digits(return_X_y=True)
test = slice(1200, None)
tangents = ("shift-x", "shift-y", "rotation", "scaling")


def fit_plain(n_rows):
    model = sl.LinearMixtureClassifier(n_components=1, n_dims=6, random_state=0)
    return model.fit(x[:n_rows], y[:n_rows])


def fit_tangents(n_rows):
    model = sl.LinearMixtureClassifier(
        n_components=1,
        n_dims=6,
        tangents=tangents,
        image_shape=(8, 8),
        recognition="tangent-distance",
        random_state=0,
    )
    return model.fit(x[:n_rows], y[:n_rows])


print("share of wrong test rows     300 rows   1,200 rows")
for name, fit in (
    ("without tangents", fit_plain),
    ("tangent distance", fit_tangents),
    ("3 nearest neighbours", lambda n: KNeighborsClassifier(3).fit(x[:n], y[:n])),
):
    few, many = (1 - fit(n).score(x[test], y[test]) for n in (300, 1200))
    print(f"{name:28} {few:8.1%} {many:12.1%}")

# %%
# Tangents help most when rows are few. With 1,200 rows the nearest neighbours are better than one pancake
# per class. Three pancakes per class close the gap, see ``n_components``.
#
# Reject what is uncertain
# ------------------------
# ``reject_curve`` returns the error of the rows that remain when the least certain rows are rejected.

plain, tangent = fit_plain(1200), fit_tangents(1200)
figure, axes = plt.subplots()
for name, model in (("without tangents", plain), ("tangent distance", tangent)):
    rejected, error = model.reject_curve(x[test], y[test])
    axes.plot(100 * rejected, 100 * error, label=name)
axes.set(xlim=(0, 20), ylim=(0, None), xlabel="rejected rows, %", ylabel="error of the others, %")
axes.legend()
plt.show()

# %%
# Reconstruct
# -----------
# Each class tries to reconstruct a row with its best pancake. The class with the smallest error wins, so a
# look at the reconstructions explains the decision.

row = x[test][1]
panels = [row] + [tangent.reconstruct(row[None], label=label)[0] for label in tangent.classes_]
errors = [np.linalg.norm(panel - row) for panel in panels[1:]]
figure, axes = plt.subplots(2, 6, figsize=(7.5, 3.0), subplot_kw={"xticks": [], "yticks": []})
titles = ["row"] + [
    f"as a {label}: {error:.0f}" for label, error in zip(tangent.classes_, errors, strict=True)
]
for axis, image, title in zip(axes.flat, panels, titles, strict=False):
    axis.imshow(image.reshape(8, 8), vmin=0, vmax=16)
    axis.set_title(title, fontweight="bold" if title.startswith(f"as a {np.argmin(errors)}:") else None)
axes.flat[-1].set_axis_off()
plt.show()

rejected, error = tangent.reject_curve(x[test], y[test])
assert error[np.searchsorted(rejected, 0.05)] < error[0] < 0.06
