"""
Clusters of digits, next to spectral clustering
===============================================

This example is for readers who have no labels. A :class:`~scalelatent.MultilayerBootstrapNetwork` maps rows
to a few components in which clusters are easy to find. The rivals are k-means and spectral clustering.
"""

# %%
# Compare
# -------
# NMI is the normalised mutual information of clusters and true classes, 1 at best. Accuracy counts the rows
# whose cluster has their class. The labels are used for these two numbers alone.

import time

import matplotlib.pyplot as plt
from sklearn.cluster import KMeans, SpectralClustering
from sklearn.datasets import load_digits

import scalelatent as sl
from scalelatent.evaluation import clustering_accuracy, nmi

x, y = load_digits(return_X_y=True)
x = x.astype("float32")


def find_with_network():
    network = sl.MultilayerBootstrapNetwork(
        n_clusterings=200, k1=300, n_classes=10, n_components=10, random_state=0
    )
    components = network.fit_transform(x)
    return KMeans(10, n_init=10, random_state=0).fit_predict(components), components


def find_spectral():
    spectral = SpectralClustering(10, affinity="nearest_neighbors", n_neighbors=10, random_state=0)
    return spectral.fit_predict(x), None


def find_by_kmeans():
    return KMeans(10, n_init=10, random_state=0).fit_predict(x), None


found = {}
print("                       NMI   accuracy   seconds")
for name, find in (
    ("bootstrap network", find_with_network),
    ("spectral clustering", find_spectral),
    ("k-means", find_by_kmeans),
):
    start = time.perf_counter()
    clusters, components = find()
    seconds = time.perf_counter() - start
    found[name] = clusters, components
    print(f"{name:20} {nmi(y, clusters):6.2f} {clustering_accuracy(y, clusters):10.2f} {seconds:9.1f}")

# %%
# The seconds of the network include the compilation of its kernels, which happens once per machine. It is
# slower than both rivals on this small set. Spectral clustering needs a graph of all rows in memory. The
# network reads rows from disk, and it maps new rows.
#
# See
# ---

components = found["bootstrap network"][1]
figure, axes = plt.subplots(figsize=(6, 4.6))
for digit in range(10):
    rows = components[y == digit]
    axes.plot(rows[:, 0], rows[:, 1], "o^sDv"[digit % 5], markersize=3, linestyle="", label=digit)
axes.set(xlabel="component 1", ylabel="component 2")
axes.legend(title="digit", markerscale=2, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

assert nmi(y, found["bootstrap network"][0]) > nmi(y, found["k-means"][0])
