"""
Infinite digits: more rows from few
===================================

This example is for readers whose images are few. ``make_digits`` writes any number of small smooth
distortions of given images. The example shows how far such rows lower the test error of a classifier.
"""

# %%
# Distort
# -------
# Row ``i`` depends on the seed and on ``i`` alone, so any process can make any row. ``base_rows`` keeps the
# digits of the test out of the training rows.

import matplotlib.pyplot as plt
from sklearn.svm import SVC

import scalelatent as sl
from scalelatent.data import make_digits

n_base = 400
made = make_digits("memory://infinite", 30_000, base_rows=(0, n_base), overwrite=True)
figure, axes = plt.subplots(3, 8, figsize=(7.5, 3), subplot_kw={"xticks": [], "yticks": []})
for line in range(3):
    start = line * n_base
    for axis, image in zip(axes[line], made.read_x(start, start + 8), strict=True):
        axis.imshow(image.reshape(8, 8))
    axes[line, 0].set_ylabel(("given", "copy 1", "copy 2")[line])
plt.show()

# %%
# Learn
# -----

# The first rows of such a set are the given images, unchanged. Their grey values run from 0 to 255.
test = make_digits("memory://infinite-test", 1797 - n_base, base_rows=(n_base, 1797), overwrite=True)
sizes = (n_base, 1_000, 3_000, 10_000, 30_000)
errors = {"capsules": [], "support vector machine": []}
print("    rows   capsules   support vector machine")
for n_rows in sizes:
    model = sl.CapsuleRegression(capsule_dim=8, random_state=0).fit(made[:n_rows])
    errors["capsules"].append(1 - model.score(test))
    line = f"{n_rows:8,} {errors['capsules'][-1]:10.1%}"
    if n_rows <= 3_000:  # its cost grows with the square of the rows
        rival = SVC().fit(made.read_x(0, n_rows) / 255, made.read_y(0, n_rows))
        wrong = rival.predict(test.read_x(0, len(test)) / 255) != test.read_y(0, len(test))
        errors["support vector machine"].append(wrong.mean())
        line += f" {wrong.mean():24.1%}"
    print(line)

# %%
# Both classifiers gain from distorted rows. The support vector machine is better at each size that it can
# take. Capsules read any number of rows from disk.

figure, axes = plt.subplots(figsize=(6, 3))
for marker, (name, values) in zip("o^", errors.items(), strict=True):
    axes.plot(sizes[: len(values)], [100 * value for value in values], marker=marker, label=name)
axes.set(xscale="log", ylim=(0, None), xlabel=f"rows, made of {n_base} digits", ylabel="test error, %")
axes.legend()
plt.show()

assert errors["capsules"][-1] < errors["capsules"][0]
