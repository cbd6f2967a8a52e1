"""
Parts of letters, found without labels
======================================

This example is for readers whose binary images are made of parts. A
:class:`~scalelatent.HierarchicalCompositionalNetwork` finds the parts. No image shows a part alone, and
nothing states where a part is.
"""

# %%
# Images
# ------
# Each image has five letters at random places, some of them over others. The noise flips 3 % of the pixels.

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb

import scalelatent as sl
from scalelatent.data import make_images

letters = make_images("memory://letters", "letters", 1100, alphabet="AKSTX", overwrite=True)
train, test = letters[:1000], letters[1000:]
images = test.read_x(0, 8).reshape(8, 24, 24)

figure, axes = plt.subplots(1, 8, figsize=(7.5, 1.1), subplot_kw={"xticks": [], "yticks": []})
for axis, image in zip(axes, images, strict=True):
    axis.imshow(image)
plt.show()

# %%
# Fit
# ---
# The network may use six features of 8 x 6 pixels, one more than there are letters. A spare
# feature stays unused or shares a letter with another one.

model = sl.HierarchicalCompositionalNetwork([(6, (8, 6))], random_state=0).fit(train)
print(f"{model.used_[0].sum()} of 6 features are used after {model.n_iter_} epochs")
print(f"new images need {1 - model.score(test):.0%} of their bits when features describe them")

figure, axes = plt.subplots(1, 6, figsize=(7.5, 1.9), subplot_kw={"xticks": [], "yticks": []})
for number, (feature, axis) in enumerate(zip(model.weights_[0], axes, strict=True)):
    axis.imshow(feature[0], vmin=0, vmax=1)
    axis.set_title(f"feature {number}" + ("" if model.used_[0][number] else "\n(unused)"))
plt.show()

# %%
# Places
# ------
# ``transform`` returns the places of each feature. Each colour below is one feature, drawn at the places
# that the network inferred.

places = model.transform(images)
print(f"{places.sum() / len(images):.1f} features per image; the truth is 5")

colors = [to_rgb(color) for color in plt.rcParams["axes.prop_cycle"].by_key()["color"]]
figure, axes = plt.subplots(2, 8, figsize=(7.5, 2.2), subplot_kw={"xticks": [], "yticks": []})
for column, image in enumerate(images):
    drawn = np.ones((24, 24, 3))
    for top, left, number in np.argwhere(places[column]):
        feature = model.weights_[0][number, 0]
        drawn[top : top + 8, left : left + 6][feature] = colors[number]
    axes[0, column].imshow(image)
    axes[1, column].imshow(drawn)
axes[0, 0].set_ylabel("image")
axes[1, 0].set_ylabel("parts")
plt.show()

assert model.used_[0].sum() >= 5
