"""
Digits by capsules of competing length
======================================

This example is for readers who classify labelled rows and want a latent vector for each row. A
:class:`~scalelatent.CapsuleRegression` gives each class a short vector, its *capsule*. The class with the
longest capsule wins.
"""

# %%
# Fit
# ---
# The 1,797 digits of scikit-learn have 8 x 8 pixels. Each class gets a capsule of four numbers, in one
# model of all classes. The default has a model per class, which makes fewer errors and has two capsules per
# class.

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import scalelatent as sl

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
train, test = slice(0, 1300), slice(1300, None)

model = sl.CapsuleRegression(architecture="multiclass", capsule_dim=4, random_state=0).fit(x[train], y[train])
print(f"capsules:                {1 - model.score(x[test], y[test]):.1%} of the test rows are wrong")
rival = SVC().fit(x[train], y[train])
print(f"support vector machine:  {1 - rival.score(x[test], y[test]):.1%}")

# %%
# The support vector machine makes fewer errors on this small set. Capsules are for rows that do not fit in
# memory, and for the vectors themselves.
#
# Lengths
# -------
# ``transform`` returns the capsules, class by class. The capsule of the true class is the longest on average.

capsules = model.transform(x[test]).reshape(-1, 10, 4)
lengths = np.linalg.norm(capsules, axis=2)

figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.6))
shown = left.imshow([lengths[y[test] == k].mean(axis=0) for k in range(10)], cmap="Blues")
left.set(xlabel="capsule", ylabel="class of the rows", title="mean length")
left.set(xticks=range(10), yticks=range(10))
figure.colorbar(shown, ax=left, shrink=0.8)

passes = [record["pass"] for record in model.history_]
errors = [100 * record["train_error"] for record in model.history_]
right.plot(passes[:10], errors[:10], marker="o")
right.set(xlabel="epoch", ylabel="training error, %", ylim=(0, None), title="the first ten epochs")
plt.show()

assert 1 - model.score(x[test], y[test]) < 0.1
