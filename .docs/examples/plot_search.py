"""
A search whose candidates share passes
======================================

This example is for readers who tune parameters on large data. :class:`~scalelatent.Search` reads each block
of rows once and gives it to all candidates. The result of each candidate is identical to a fit alone.
"""

# %%
# Search
# ------

import time

import matplotlib.pyplot as plt
import numpy as np

import scalelatent as sl
from scalelatent.data import make_digits

train = make_digits("memory://search-train", 20_000, base_rows=(0, 1200), overwrite=True)
held = make_digits("memory://search-held", 597, base_rows=(1200, 1797), overwrite=True)
grid = {"capsule_dim": [1, 2, 4, 8], "momentum": [0.0, 0.5, 0.9]}
base = sl.CapsuleRegression(algorithm="em", nu_schedule=None, max_iter=20, random_state=0)

start = time.perf_counter()
search = sl.Search(base, grid).fit(train, validation=held)
together = time.perf_counter() - start
single_passes = int(np.sum(search.cv_results_["n_passes"]))
print(f"best: {search.best_params_}, validation accuracy {search.best_score_:.1%}")
print(f"{search.n_passes_} passes over the rows in {together:.1f} s; one by one: {single_passes} passes")

# %%
# Check one candidate
# -------------------
# The best candidate is fitted once more, alone. Its weights are identical, bit by bit.

alone = sl.CapsuleRegression(**{**base.get_params(), **search.best_params_}).fit(train, validation=held)
print("identical weights:", bool((alone.W_ == search.best_estimator_.W_).all()))

# %%
# See
# ---

scores = np.reshape(search.cv_results_["mean_test_score"], (4, 3))
figure, axes = plt.subplots(figsize=(4.5, 3.4))
axes.imshow(100 * scores, cmap="Blues", aspect="auto")
for row in range(4):
    for column in range(3):
        dark = scores[row, column] > scores.mean()
        text = f"{scores[row, column]:.1%}"
        axes.text(column, row, text, ha="center", va="center", color="white" if dark else "black")
axes.set(
    xticks=range(3), xticklabels=grid["momentum"], yticks=range(4), yticklabels=grid["capsule_dim"],
    xlabel="momentum", ylabel="capsule_dim", title="validation accuracy",
)  # fmt: skip
plt.show()

assert (alone.W_ == search.best_estimator_.W_).all()
