"""
Inpainting: fill hidden pixels
==============================

This example is for readers whose images have gaps. A network of parts fills the hidden half of an image
with the parts that begin in the visible half. A nearest neighbour and the most frequent value of each pixel
are the rivals.
"""

# %%
# Hide the lower half
# -------------------

import matplotlib.pyplot as plt
import numpy as np

import scalelatent as sl
from scalelatent.data import make_images

letters = make_images("memory://inpaint", "letters", 1200, alphabet="AKSTX", noise=0.0, overwrite=True)
train, test = letters[:1000], letters[1000:]
x_train, x = (part.read_x(0, len(part)).reshape(-1, 24, 24) for part in (train, test))
known = np.ones(x.shape, bool)
known[:, 12:, :] = False

# %%
# Fill
# ----
# ``inpaint`` infers the parts from the known pixels and draws them over the unknown ones.

model = sl.HierarchicalCompositionalNetwork([(6, (8, 6))], random_state=0).fit(train)
distance = (x_train[None, :, :12] != x[:, None, :12]).sum(axis=(2, 3))
filled = {
    "network of parts": model.inpaint(x, known)[:, 0],
    "nearest neighbour": x_train[distance.argmin(axis=1)],
    "most frequent value": np.broadcast_to(x_train.mean(axis=0) > 0.5, x.shape),
}
near = np.zeros(x.shape, bool)
near[:, 12:16, :] = True
print("wrong hidden pixels      first 4 rows   all 12 rows")
for name, images in filled.items():
    wrong = images != x
    print(f"{name:24} {wrong[near].mean():12.1%} {wrong[~known].mean():13.1%}")

# %%
# The network continues the letters that the border cuts. It cannot know letters that are hidden
# entirely, and no rival can.

lines = {"true": x, "given": np.where(known, x, 0.3), **filled}
figure, axes = plt.subplots(len(lines), 8, figsize=(7.5, 4.6), subplot_kw={"xticks": [], "yticks": []})
for line, (name, images) in zip(axes, lines.items(), strict=True):
    line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    for axis, image in zip(line, images, strict=False):
        axis.imshow(image, vmin=0, vmax=1)
        axis.axhline(11.5, color="#bd1f01", linewidth=1)
plt.show()

assert (filled["network of parts"] != x)[near].mean() < (filled["nearest neighbour"] != x)[near].mean()
