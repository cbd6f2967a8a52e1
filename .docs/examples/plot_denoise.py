"""
Denoising scans with a conditional RBM
======================================

This example is for readers who have pairs of damaged and clean images. A
:class:`~scalelatent.ConditionalRBM` learns how clean images look given damaged ones, and is compared with a
median filter and with logistic regression.
"""

# %%
# Corrupt
# -------
# The infinite digits are smooth distortions of scikit-learn's 1,797 digits. ``make_corrupted`` flips 10 %
# of the pixels of each binary image, and writes the damaged and the clean rows as two datasets. Test images
# derive from other digits than training images.

import time

import matplotlib.pyplot as plt
from scipy.ndimage import median_filter

import scalelatent as sl
from scalelatent.data import make_corrupted, make_digits

pairs = {}
for part, base_rows, rows in (("train", (0, 1400), 6_000), ("test", (1400, 1797), 1_000)):
    clean = make_digits(f"memory://denoise-{part}", rows, base_rows=base_rows, seed=1, overwrite=True)
    pairs[part] = make_corrupted(
        f"memory://denoise-{part}-noisy", "noisy-digits", base=clean.url, share=0.1, overwrite=True
    )
noisy, clean = pairs["train"]
test_noisy, test_clean = pairs["test"]
print(f"{len(noisy):,} pairs of {noisy.feature_shape} pixels")

# %%
# Fit and compare
# ---------------
# The pairs are given to ``fit`` as two datasets. The numbers are the share of wrong pixels, over all pixels
# and over those that the noise has flipped. ``learner="logistic"`` is the same model without hidden units.


def wrong_pixels(restored):
    truth = test_clean.read_x(0, len(test_clean))
    flipped = truth != test_noisy.read_x(0, len(test_noisy))
    wrong = restored.reshape(truth.shape) != truth
    return wrong.mean(), wrong[flipped].mean()


scans = test_noisy.read_x(0, len(test_noisy)).reshape(-1, 8, 8)
restored = {"damaged": scans, "median filter": median_filter(scans, size=(1, 3, 3))}
for name, learner in (("logistic regression", "logistic"), ("conditional RBM", "mle-bp")):
    start = time.perf_counter()
    model = sl.ConditionalRBM(n_hidden=64, learner=learner, n_epochs=10, random_state=0).fit(noisy, clean)
    restored[name] = model.predict(test_noisy).reshape(scans.shape)
    print(f"{name}: fitted in {time.perf_counter() - start:.1f} s")

print("\nwrong pixels            all   among flipped")
for name, images in restored.items():
    total, flipped = wrong_pixels(images)
    print(f"{name:20} {total:6.1%} {flipped:15.1%}")

# %%
# A median filter needs no training, but it erases thin strokes of small images. On images of 8 x 8 pixels the
# hidden units gain little over logistic regression. On larger images they gain more, see
# :doc:`benchmarks </how/benchmarks>`.

lines = {"clean": test_clean.read_x(0, 12), **{name: images[:12] for name, images in restored.items()}}
figure, axes = plt.subplots(len(lines), 12, figsize=(7.5, 3.3), subplot_kw={"xticks": [], "yticks": []})
for line, (name, images) in zip(axes, lines.items(), strict=True):
    line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    for axis, image in zip(line, images, strict=True):
        axis.imshow(image.reshape(8, 8))
plt.show()

assert wrong_pixels(restored["conditional RBM"])[0] < wrong_pixels(restored["median filter"])[0]
