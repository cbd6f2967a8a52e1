"""
Ten minutes from install to a report
====================================

This lesson is for new users. After it you have a dataset on disk, a fitted model, predictions, and a
report. Each step shows what it printed when this page was built.
"""

# %%
# Install
# -------
# In a checkout of the repository, with Python 3.11 to 3.13::
#
#     $ python -m pip install .
#     $ scalelatent doctor
#
# ``doctor`` checks versions, memory, threads and the disk, and it compiles a small kernel. The first fit of
# each model compiles its kernels, which takes two or three seconds once per machine.
#
# The first model
# ---------------
# Ten lines fit a classifier to the digits of scikit-learn, measure it, and save it.

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import scalelatent as sl
from scalelatent.data import make_digits

folder = Path(tempfile.mkdtemp())

X, y = load_digits(return_X_y=True)
train_x, test_x, train_y, test_y = train_test_split(X, y, random_state=0)

model = sl.CapsuleRegression(random_state=0).fit(train_x, train_y)
print(f"test accuracy: {model.score(test_x, test_y):.3f}")
model.save(folder / "digits-model.zarr")

# %%
# A dataset on disk
# -----------------
# ``make_digits`` writes distorted copies of the digits of scikit-learn. The training, validation and test
# rows derive from different digits. For your own rows see :doc:`/guide/data`.

make_digits(folder / "train.zarr", 30_000, base_rows=(600, 1797))
make_digits(folder / "validation.zarr", 300, base_rows=(300, 600))
make_digits(folder / "test.zarr", 300, base_rows=(0, 300))

train = sl.open_dataset(folder / "train.zarr")
validation = sl.open_dataset(folder / "validation.zarr")
test = sl.open_dataset(folder / "test.zarr")
print(train)
print("the first labels:", train.read_y(0, 8))

figure, axes = plt.subplots(1, 8, figsize=(7.5, 1.2), subplot_kw={"xticks": [], "yticks": []})
for axis, image in zip(axes, train.read_x(0, 8), strict=True):
    axis.imshow(image.reshape(8, 8))
plt.show()

# %%
# Estimate, then fit
# ------------------
# ``plan`` estimates seconds, memory and disk before any work starts. ``fit`` streams the rows from disk in
# blocks, so the memory does not depend on the number of rows. Everything that the fit writes is in the run
# folder.

model = sl.CapsuleRegression(capsule_dim=8, n_epochs=10, random_state=0)
print("plan:", model.plan(train)["summary"])
run_dir = folder / "run"
model.fit(train, validation=validation, run_dir=run_dir)
print(f"{model.n_iter_} passes, validation error {model.best_validation_error_:.1%}")

passes = [record["pass"] for record in model.history_]
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(passes, [100 * record["validation_error"] for record in model.history_])
axes.set(xlabel="pass over the rows", ylabel="validation error, %", ylim=(0, None))
plt.show()

# %%
# Predict
# -------
# The model is a scikit-learn estimator: it has ``predict``, ``predict_proba``, ``transform`` and ``score``.
# With ``out`` a result that is larger than memory goes to a dataset on disk.

print(f"test accuracy {model.score(test):.1%}")
rows = test.read_x(0, 5)
print("predicted:", model.predict(rows), " true:", test.read_y(0, 5))
print("certainty:", np.round(model.predict_proba(rows).max(axis=1), 2))
latent = model.transform(test, out=folder / "latent.zarr")
print(latent)

# %%
# Save and load
# -------------
# A saved model is a folder of arrays and JSON. It holds no pickle, so it opens in later releases, and
# opening it runs no code.

model.save(folder / "model.zarr")
print(sl.load_model(folder / "model.zarr").predict(rows))

# %%
# The report
# ----------
# ``report`` writes one HTML page with figures, errors with their intervals, and how to load the model.

page = Path(model.report(run_dir, data=test))
print(page.relative_to(folder))
print("figures:", *sorted(file.name for file in page.parent.glob("*.png")))

# %%
# One of the figures: which classes are taken for which others.

image = plt.imread(page.parent / "confusion.png")
figure, axes = plt.subplots(figsize=(7.5, 7.5 * image.shape[0] / image.shape[1]))
axes.imshow(image)
axes.set_axis_off()
plt.show()

# %%
# The same from a terminal
# ------------------------
# A job file describes the same work. The run folder holds the settings, checkpoints, the model and the
# report.

job = folder / "job.toml"
job.write_text(f"""
[job]
name = "digits"
seed = 0
out = "{folder}/job-run"

[data]
train = "{folder}/train.zarr"
validation = "{folder}/validation.zarr"
test = "{folder}/test.zarr"

[model]
kind = "capsule"
capsule_dim = 8
n_epochs = 10
""")
done = subprocess.run(
    [sys.executable, "-m", "scalelatent", "fit", str(job)], capture_output=True, text=True, check=True
)
print("$ scalelatent fit job.toml")
print(done.stdout)

# %%
# A million images
# ----------------
# ``scalelatent demo`` writes 1,000,000 images, starts a local Dask cluster, and runs the same steps. On a
# machine with two cores it took 24 seconds, and no worker used more than 263 MiB
# (``benchmarks/results/demo.json``). The memory does not grow with the number of rows. The demo prints the
# address of the dashboard:
#
# .. image:: ../../../benchmarks/results/watch/half_way.webp
#    :alt: Page of the Dask dashboard with a job half way, its curves, and two workers
#    :class: framed
#
# :doc:`/guide/watch` shows the same page from the submission of a job to its report.
#
# Where to go next
# ----------------
# - :doc:`/models/index` helps to choose.
# - :doc:`plot_2_own_cluster` is the next lesson.
# - :doc:`/guide/data` covers arrays, tables, images and object stores.
