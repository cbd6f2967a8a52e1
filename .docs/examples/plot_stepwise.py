"""
Stepwise EM against passes
==========================

This example is for readers whose passes over the data are slow. Batch EM updates a model once per pass.
Stepwise EM updates it after each batch of rows, so it needs fewer passes.
"""

# %%

import time

import matplotlib.pyplot as plt

import scalelatent as sl
from scalelatent.data import make_digits

n_rows = 20_000
train = make_digits("memory://stepwise", n_rows, base_rows=(0, 1200), overwrite=True)
test = make_digits("memory://stepwise-test", 597, base_rows=(1200, 1797), overwrite=True)

# %%
# Both fits have the same model, one for all classes, which records the training error. The plain schedule of
# batch EM makes the two curves comparable.

figure, axes = plt.subplots()
for name, parameters in (
    ("batch EM", {"algorithm": "em", "nu_schedule": None, "max_iter": 60}),
    ("stepwise EM", {"algorithm": "stepwise", "nu_schedule": None, "n_epochs": 10}),
):
    start = time.perf_counter()
    model = sl.CapsuleRegression(architecture="multiclass", random_state=0, **parameters).fit(train)
    seconds = time.perf_counter() - start
    print(f"{name:12} {model.n_iter_:3} passes in {seconds:4.1f} s, test error {1 - model.score(test):.1%}")
    rows = [n_rows * record["pass"] / 1000 for record in model.history_]
    axes.plot(rows, [100 * record["train_error"] for record in model.history_], marker=".", label=name)
axes.set(xscale="log", xlabel="rows read, thousands", ylabel="training error, %", ylim=(0, None))
axes.legend()
plt.show()

# %%
# Stepwise EM is near its final error after two passes, batch EM after eight. The final errors are about the
# same, so the gain is in passes, not in quality.
