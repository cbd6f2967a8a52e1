"""
Microscopy tiles in a Dask array, end to end
============================================

This example is for readers whose images come as a lazy Dask array, for example from a microscope. It fits
two models to the tiles, block by block. All tiles together never need to fit in memory.
"""

# %%
# Tiles
# -----
# Each tile of 24 x 24 pixels shows a synthetic cell: round, elongated, or dividing. Position, angle, size
# and brightness vary. The array is lazy: a worker makes a block of tiles when it needs them, as it would
# read a file of your lab.

import dask.array as da
import matplotlib.pyplot as plt
import numpy as np
from sklearn.cluster import KMeans

import scalelatent as sl
from scalelatent.evaluation import nmi

SIDE, N_TILES, BLOCK = 24, 3_000, 1_000
KINDS = ("round", "elongated", "dividing")


def kinds_of(start, stop):
    return np.random.default_rng(0).integers(3, size=N_TILES)[start:stop]


def make_block(block_info=None):
    start, stop = block_info[None]["array-location"][0]
    rng, kind = np.random.default_rng([1, start]), kinds_of(start, stop)[:, None, None]
    size = (stop - start, 1, 1)
    grid = np.arange(SIDE) - (SIDE - 1) / 2
    dx, dy = grid[None, None, :] - rng.normal(0, 1.5, size), grid[None, :, None] - rng.normal(0, 1.5, size)
    angle = rng.uniform(0, np.pi, size)
    along, across = np.cos(angle) * dx + np.sin(angle) * dy, np.cos(angle) * dy - np.sin(angle) * dx
    radius = rng.normal(3.2, 0.25, size)
    length = np.where(kind == 1, 2.2, 1.0) * radius
    apart = np.where(kind == 2, 1.4, 0.0) * radius
    cells = sum(
        np.exp(-((((along + sign * apart) / length) ** 2 + (across / radius) ** 2) ** 2)) for sign in (-1, 1)
    )
    light = (
        rng.uniform(120, 200, size) * np.minimum(cells, 1) + 25 + rng.normal(0, 8, (stop - start, SIDE, SIDE))
    )
    return np.clip(light, 0, 255).astype("uint8")


tiles = da.map_blocks(make_block, chunks=((BLOCK,) * (N_TILES // BLOCK), SIDE, SIDE), dtype="uint8")
print(tiles)

# %%
# Fit
# ---
# Each pass computes the blocks of tiles that it needs. For a cluster, put the two fits below ``with
# sl.cluster("local"):``, or give ``client=`` a client of your own cluster. Then the tasks of the array
# write its rows to a shared folder once.

density = sl.LinearMixture(n_components=10, n_dims=6, random_state=0).fit(tiles)
network = sl.MultilayerBootstrapNetwork(
    n_clusterings=100, k1=100, n_classes=3, n_components=4, random_state=0
)
network.fit(tiles)
components = network.transform(tiles)
print("the result is lazy again:", components)
components = components.compute()

# %%
# Find the kinds of cells
# -----------------------
# Clusters of the components are compared with the true kinds, and with k-means on the pixels.

truth = kinds_of(0, N_TILES)
pixels = np.asarray(tiles).reshape(N_TILES, -1)
print("NMI of clusters and true kinds")
for name, rows in (("bootstrap network", components), ("pixels", pixels)):
    clusters = KMeans(3, n_init=10, random_state=0).fit_predict(rows)
    print(f"k-means on {name:18} {nmi(truth, clusters):.2f}")

# %%
# See
# ---
# The upper rows show tiles, the lower row shows means of the mixture.

figure, axes = plt.subplots(4, 8, figsize=(7.5, 4), subplot_kw={"xticks": [], "yticks": []})
for line, name in enumerate(KINDS):
    for axis, tile in zip(axes[line], pixels[truth == line], strict=False):
        axis.imshow(tile.reshape(SIDE, SIDE), cmap="gray", vmin=0, vmax=255)
    axes[line, 0].set_ylabel(name)
for axis, mean in zip(axes[3], density.means_[np.argsort(-density.weights_)], strict=False):
    axis.imshow(mean.reshape(SIDE, SIDE), cmap="gray", vmin=0, vmax=255)
axes[3, 0].set_ylabel("means")
plt.show()
