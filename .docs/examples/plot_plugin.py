"""
Your own model as a plug-in
===========================

This example is for readers who have a model of their own: k-means here. A package with three short files
brings it into scalelatent. After that the model streams rows from disk, runs on Dask, resumes, and appears
in job files and reports.
"""

# %%
# The mathematics
# ---------------
# A *reduction* sums statistics of blocks of rows: ``accumulate`` is called for each block. A *learner*
# turns the sums into new parameters: ``update`` is called after each pass. The file needs neither Dask nor
# zarr.

from pathlib import Path

toy = Path.cwd().parents[1] / "tests" / "toy"
for name in ("model.py", "estimator.py", "__init__.py"):
    text = (toy / "kmeans_toy" / name).read_text()
    print(f"# {name}: {len([line for line in text.splitlines() if line.strip()])} lines")

# %%
# .. literalinclude:: ../../tests/toy/kmeans_toy/model.py

# %%
# The estimator
# -------------
# The estimator names the steps of a fit: begin, remember the first centroids, learn. ``_plan`` estimates
# time and memory.
#
# .. literalinclude:: ../../tests/toy/kmeans_toy/estimator.py
#

# %%
# The kind and its entry point
# ----------------------------
# ``Kind`` gives the model its name in job files, and lists its parameters and kernels:
#
# .. literalinclude:: ../../tests/toy/kmeans_toy/__init__.py
#
# The package names the kind as an entry point, in the group ``scalelatent.models`` of its ``pyproject.toml``:
#
# .. literalinclude:: ../../tests/toy/kmeans_toy-1.0.dist-info/entry_points.txt
#

# %%
# Use it
# ------
# The model is found by its kind, as a job file finds it. Its centroids agree with those of scikit-learn.

import sys

import matplotlib.pyplot as plt
import numpy as np
from sklearn.cluster import KMeans

import scalelatent as sl
from scalelatent.contract.kinds import find_kind, load_all_kinds

sys.path.insert(0, str(toy))  # in place of an installation with pip
load_all_kinds.cache_clear()  # this process has looked for kinds before the path was extended
rng = np.random.default_rng(0)
x = np.array([[0, 0], [4, 0], [0, 4]])[np.arange(3000) % 3] + rng.normal(size=(3000, 2))
rows = sl.Dataset.from_arrays(x.astype("float32")).save("memory://plugin", overwrite=True)
model = find_kind("kmeans").estimator_class()(n_clusters=3, random_state=0).fit(rows)
rival = KMeans(3, n_init=10, random_state=0).fit(x)
print(f"inertia {model.history_[-1]['objective'] * len(x):.1f} after {model.n_iter_} passes")
print(f"inertia {rival.inertia_:.1f} by scikit-learn")

figure, axes = plt.subplots(figsize=(5, 3.6))
axes.plot(*x[:1000].T, ".", color="#94a4a2", markersize=3)
axes.plot(*model.centroids_.T, "o", color="#bd1f01", markersize=10, label="plug-in")
axes.plot(*rival.cluster_centers_.T, "x", color="black", markersize=10, label="scikit-learn")
axes.legend()
axes.set(xlabel="feature 0", ylabel="feature 1")
plt.show()
