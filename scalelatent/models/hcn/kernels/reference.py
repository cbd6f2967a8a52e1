"""Max-product belief propagation of AND, OR and POOL factors in numpy: the definition of all kernels.

The factors are those of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016). A
message m about a binary variable is one number, log m(1) - log m(0). The reconstruction of an image, R =
min(1, conv(S, W)), has one AND-OR tree per pixel. The tree is an OR over pairs, and a pair is the AND of a
feature position (S) and a weight (W). Messages "up" lead from the pixel to the positions and weights, and
messages "down" lead to the pixel. Arrays are S (image, HS, WS, F) and W (channel, h, w, F), with F features
of h x w pixels. The axes h and w of W are reversed, so that the pairs of a pixel are the elements of a window
of S and of a window of W in the same order.
"""

from __future__ import annotations

import numpy as np

from .units import FIXED_WEIGHT, OFF_IMAGE, POOL_FLOOR
from .windows import find_window, list_shifts, message_starts


def pass_and_up(other: np.ndarray, below: np.ndarray | float) -> np.ndarray:
    """Return the belief-propagation message to one input of an AND, from ``other`` and output ``below``."""
    return np.maximum(other + below, 0) - np.maximum(other, 0)


def pass_and_down(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the belief-propagation message to the output of an AND, from its inputs ``a`` and ``b``."""
    return np.minimum(a + b, np.minimum(a, b))


def pass_or_up(t: np.ndarray, below: float) -> np.ndarray:
    """Return belief-propagation messages to the inputs of an OR, from inputs ``t`` and output ``below``."""
    t = np.asarray(t, float)
    positive, top = np.maximum(t, 0), int(t.argmax())
    best = np.full(len(t), t[top])
    best[top] = np.delete(t, top).max(initial=-np.inf)
    return np.minimum(below + positive.sum() - positive, np.maximum(0, -best))


def pass_or_down(t: np.ndarray) -> float:
    """Return the belief-propagation message to the output of an OR, from the messages ``t`` of the inputs."""
    top = int(t.argmax())
    return float(t[top] + np.maximum(np.delete(t, top), 0).sum())


def pass_tree_up(s: np.ndarray, w: np.ndarray, below: float) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays (M,): the messages of a pixel to the positions and to the weights of its M pairs.

    Messages are those of belief propagation. A pair is a feature position and a weight that together turn on
    the pixel. ``s`` (M,), ``w`` (M,) and ``below`` are the log odds of these positions, of these weights, and
    of the pixel.
    """
    g = pass_or_up(pass_and_down(s, w), below)
    return pass_and_up(w, g), pass_and_up(s, g)


def find_pairs(
    index: int, evidence: np.ndarray, s: np.ndarray, w: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the log odds of a pixel, and views of the log odds of positions and weights of its pairs.

    A pair is a feature position and a weight that together turn on the pixel. ``index`` is the index of the
    pixel in the flattened ``evidence``; ``s`` and ``w`` are the log odds of all positions and weights.
    """
    image, channel, y, x = np.unravel_index(index, evidence.shape)
    of_s, of_w = zip(
        find_window(int(y), w.shape[1], s.shape[1]), find_window(int(x), w.shape[2], s.shape[2]), strict=True
    )
    return evidence[image, channel, y, x], s[(image, *of_s)], w[(channel, *of_w)]


def sweep(evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray) -> None:
    """Update the belief-propagation messages of each pixel once, in the given order, without storing them.

    Parameters
    ----------
    evidence : array of int32, shape (chains, images, channels, height, width)
        Log odds of each pixel in units of 1/256 nat; 0 for an unknown pixel. A chain is a sequence of
        minibatches that one task learns; the images are one minibatch of each chain.
    order : ndarray of int32, shape (chains, pixels)
        Order in which a chain updates its pixels: indices into the flattened evidence of the chain.
    s : array of int32, shape (chains, images, HS, WS, F)
    w : array of int32, shape (chains, channels, h, w, F)
        Log odds of positions and weights in units of 1/256 nat, changed in place. The axes h and w are
        reversed. HS and WS are the numbers of positions along the height and the width, and F is the number
        of features of h x w pixels.
    """
    for k in range(len(order)):
        for index in order[k]:
            below, of_s, of_w = find_pairs(index, evidence[k], s[k], w[k])
            if below:
                to_s, to_w = pass_tree_up(of_s.ravel(), of_w.ravel(), below)
                of_s[...] = of_s + to_s.reshape(of_s.shape)
                of_w[...] = of_w + to_w.reshape(of_w.shape)


def sweep_messages(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray,
    held: np.ndarray, damping: float,
) -> np.ndarray:  # fmt: skip
    """Update the stored belief-propagation messages of each pixel once, in the given order.

    Parameters
    ----------
    evidence, order, s, w
        Log odds of pixels, orders of pixels, and log odds of positions and of weights: the arrays that
        :func:`sweep` describes. A chain is a sequence of images that one task learns.
    to_s, to_w : ndarray of int16 or int32, shape (chains, images, channels, messages)
        Messages of pixels to positions and to weights in units of 1/256 nat, changed in place. The messages
        of a pixel are contiguous and start at the index that :func:`~.windows.message_starts` returns.
    held : ndarray of uint8, shape (chains, images, channels, height * width, h)
        Flags of the h rows of a feature whose weights can turn on a pixel: 1 for a row with a nonzero message
        of the pixel in ``to_w``, else 0; changed in place. Few rows have such a message, and kernels skip the
        other rows.
    damping : float
        Weight of a new message in the average of the new and the old message.

    Returns
    -------
    ndarray of int64, shape (chains,)
        Number of pixels with a changed message.
    """
    n_chains, _, n_channels, height, width = evidence.shape
    image = height, width
    begins = message_starts(image, w.shape[2:4], w.shape[4])
    moved = np.zeros(n_chains, np.int64)
    for k in range(n_chains):
        for index in order[k]:
            below, of_s, of_w = find_pairs(index, evidence[k], s[k], w[k])
            pixel = index % (image[0] * image[1])
            run = slice(begins[pixel], begins[pixel + 1])
            n, a = np.divmod(index // (image[0] * image[1]), n_channels)
            olds = [m[k, n, a, run] for m in (to_s, to_w)]
            beliefs = [of_s, of_w]
            without = [b - old.reshape(b.shape) for b, old in zip(beliefs, olds, strict=True)]
            news = (
                pass_tree_up(without[0].ravel(), without[1].ravel(), below) if below else (0 * olds[0],) * 2
            )
            changed = False
            for belief, rest, old, new in zip(beliefs, without, olds, news, strict=True):
                new = damp(old, new, damping)
                changed |= bool((new != old).any())
                old[...] = new
                belief[...] = rest + new.reshape(rest.shape)
            n_rows = len(of_s)
            held[k, n, a, pixel, :n_rows] = (olds[1].reshape(n_rows, -1) != 0).any(axis=1)
            moved[k] += changed
    return moved


def damp(old: np.ndarray, new: np.ndarray, damping: float) -> np.ndarray:
    """Return damped messages: ``old`` + ``damping`` (``new`` - ``old``), with a rounded float32 product."""
    step = np.float32(damping) * (new - old).astype(np.float32)
    return old + np.rint(step).astype(np.float64)


def decode_images(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, n_sweeps: int
) -> np.ndarray:
    """Add the messages of all pixels to the log odds of feature positions, for fixed weights.

    Parameters
    ----------
    evidence : array of int32, shape (rows, channels, height, width)
        Log odds of each pixel in units of 1/256 nat.
    order : ndarray of int32, shape (rows, pixels)
        Order in which each sweep updates the pixels of a row: indices into the flattened row.
    s : array of int32, shape (rows, HS, WS, F)
        Prior log odds of F features at HS x WS positions in units of 1/256 nat, to which the messages are
        added in place.
    w : ndarray of bool, shape (channels, h, w, F)
        Weights of F features of h x w pixels; the axes h and w are reversed.
    n_sweeps : int
        Upper bound of the number of sweeps (updates of all messages); they end if no message changes.

    Returns
    -------
    ndarray of int64, shape (rows,)
        Number of pixels with a changed message in the last sweep.
    """
    moved = np.zeros(len(evidence), np.int64)
    hard = np.where(w, FIXED_WEIGHT, -FIXED_WEIGHT)
    for n in range(len(evidence)):
        messages: dict[int, np.ndarray] = {}
        for _ in range(n_sweeps):
            moved[n] = 0
            for index in order[n]:
                below, of_s, of_w = find_pairs(index, evidence[None, n], s[n : n + 1], hard)
                if below:
                    old = messages.get(int(index), np.zeros(of_s.shape))
                    new = pass_tree_up((of_s - old).ravel(), of_w.ravel(), below)[0].reshape(of_s.shape)
                    of_s[...] = of_s + (new - old)
                    messages[int(index)] = new
                    moved[n] += bool((new != old).any())
            if not moved[n]:
                break
    return moved


def cover(s: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the number of features that cover each pixel, int32 (rows, channels, height, width).

    ``s`` is uint8 (rows, HS, WS, F), 1 if one of F features is at one of HS x WS positions, else 0. ``w`` are
    the weights of features of h x w pixels, bool (channels, h, w, F); the axes h and w are reversed.
    """
    rows, high, wide, _ = s.shape
    n_channels, h, width, _ = w.shape
    out = np.zeros((rows, n_channels, high + h - 1, wide + width - 1), np.int32)
    for n, r, c, f in np.argwhere(s):
        out[n, :, r : r + h, c : c + width] += w[:, ::-1, ::-1, f]
    return out


def improve(evidence: np.ndarray, s: np.ndarray, w: np.ndarray, cost: float) -> np.ndarray:
    """Add or remove the feature with the largest gain until no gain is positive; return the positions.

    The gain of adding a feature is the sum of the log odds of the pixels that only this feature covers, minus
    the cost. The gain of a removal is minus this number. Among equal gains, removals come before additions,
    and then the first position of the array comes first.

    Parameters
    ----------
    evidence : array of int32, shape (rows, channels, height, width)
        Log odds of each pixel in whole units of 1/256 nat.
    s, w
        Positions at the start, and weights, both described in :func:`cover`; ``s`` itself does not change.
    cost : float
        Cost of a feature at a position in units of 1/256 nat: minus the prior log odds.
    """
    out, (_, h, width, _) = s.copy(), w.shape
    for n in range(len(s)):
        while True:
            layers = cover(out[n : n + 1], w)[0]
            gains = np.zeros(out[n].shape)
            for r, c, f in np.ndindex(gains.shape):
                part, placed = (slice(None), slice(r, r + h), slice(c, c + width)), out[n, r, c, f]
                alone = w[:, ::-1, ::-1, f] & (layers[part] == placed)
                gain = evidence[n][part][alone].sum(dtype=np.float64) - cost
                gains[r, c, f] = -gain if placed else gain
            best = gains.max()
            if best <= 0:
                break
            first = np.argwhere((gains == best) & (out[n] == 1))
            at = tuple((first if len(first) else np.argwhere(gains == best))[0])
            out[n][at] ^= 1
    return out


def move_to_targets(messages: np.ndarray) -> np.ndarray:
    """Move the messages of pools, one for each shift, to the indices of the pixels into which they shift.

    Each of H x W pixels has a pool, which can shift the pixel. ``messages`` and the result have the shape (…,
    shifts, H, W). A pixel that no pool reaches by a shift gets the value ``OFF_IMAGE``.
    """
    out, (height, width) = np.full(messages.shape, OFF_IMAGE, np.int64), messages.shape[-2:]
    for d, (dy, dx) in enumerate(list_shifts(messages.shape[-3])):
        to, of = (
            (slice(max(0, y), height + min(0, y)), slice(max(0, x), width + min(0, x)))
            for y, x in ((dy, dx), (-dy, -dx))
        )
        out[(..., d, *to)] = messages[(..., d, *of)]
    return out


def move_to_sources(messages: np.ndarray) -> np.ndarray:
    """Move the messages at the indices of shifted pixels back to the indices of the pools that shift them."""
    return move_to_targets(messages[..., ::-1, :, :])[..., ::-1, :, :]


def pass_ors_up(down: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return belief-propagation messages from the OR of each pixel up to pools that can shift into it.

    The result is int64 (…, shifts, H, W), a message for each shift of each pool; the message is ``OFF_IMAGE``
    for a shift that leaves the image. ``down`` are the messages of the pools to the ORs, and ``below`` (…, H,
    W) are the log odds of H x W pixels.
    """
    t = move_to_targets(down)
    below = np.clip(below, -POOL_FLOOR, POOL_FLOOR)[..., None, :, :]
    positive, up = np.maximum(t, 0), np.empty_like(t)
    total = positive.sum(axis=-3, keepdims=True)
    for d in range(t.shape[-3]):
        best = np.delete(t, d, axis=-3).max(axis=-3, initial=OFF_IMAGE)
        alone = np.maximum(0, -best)
        up[..., d, :, :] = np.minimum((below + total - positive)[..., d, :, :], alone)
    return move_to_sources(np.clip(up, -POOL_FLOOR, POOL_FLOOR))


def pass_pools_up(
    below: np.ndarray, prior: np.ndarray, down: np.ndarray, evidence: np.ndarray, damping: float
) -> None:
    """Pass belief-propagation messages from shifted pixels up through pools to the pixels of features.

    Parameters
    ----------
    below : ndarray of int32, shape (images, channels, H, W)
        Log odds of H x W shifted pixels, in units of 1/256 nat: the pixels of the image, or the messages to
        the positions of the layer below.
    prior : ndarray of int32, shape (shifts, H, W)
        Log prior of each shift in units of 1/256 nat; OFF_IMAGE for a shift that leaves the image.
    down : ndarray of int32, shape (images, channels, shifts, H, W)
        Messages of pools to the ORs of shifted pixels.
    evidence : array of int32, shape (images, channels, H, W)
        Messages of pools to the pixels of features, changed in place.
    damping : float
        Weight of the new message in the average of the new and the old message.
    """
    up = pass_ors_up(down, below)
    new = np.where(prior == OFF_IMAGE, OFF_IMAGE, up + prior).max(axis=-3)
    evidence[...] = damp(evidence, np.clip(new, -POOL_FLOOR, POOL_FLOOR), damping)


def pass_pools_down(
    below: np.ndarray, prior: np.ndarray, above: np.ndarray, down: np.ndarray, rounds: int
) -> np.ndarray:
    """Pass belief-propagation messages from pixels of features down through pools to shifted pixels.

    Pools and the ORs of shifted pixels exchange messages ``rounds`` times after the first messages of the
    pools; then the ORs send messages to the shifted pixels.

    Parameters
    ----------
    below, prior
        Log odds of H x W shifted pixels, and log priors of shifts: see :func:`pass_pools_up`.
    above : ndarray of int32, shape (images, channels, H, W)
        Messages of features to the pixels that they cover.
    down : array of int32, shape (images, channels, shifts, H, W)
        Messages of pools to ORs, changed in place.
    rounds : int
        Number of further exchanges of messages between pools and ORs.

    Returns
    -------
    ndarray of int32, shape (images, channels, H, W)
        Messages of ORs to the shifted pixels.
    """
    for _ in range(rounds + 1):
        up = pass_ors_up(down, below)
        b = np.where(prior == OFF_IMAGE, OFF_IMAGE, up + prior)
        for d in range(b.shape[-3]):
            best = np.delete(b, d, axis=-3).max(axis=-3, initial=OFF_IMAGE)
            new = prior[d] + np.minimum(above, -best)
            new = np.clip(new, -POOL_FLOOR, POOL_FLOOR)
            down[..., d, :, :] = np.where(prior[d] == OFF_IMAGE, -POOL_FLOOR, new)
    t = move_to_targets(down)
    first = t.max(axis=-3)
    made = first + np.maximum(t, 0).sum(axis=-3) - np.maximum(first, 0)
    return np.clip(made, -POOL_FLOOR, POOL_FLOOR).astype(np.int32)


def pass_trees_down(s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray) -> np.ndarray:
    """Return belief-propagation messages of features down to pixels, for weights that a fit still learns.

    Parameters
    ----------
    s : ndarray of int32, shape (images, HS, WS, F)
    w : ndarray of int32, shape (channels, h, w, F)
        Log odds of HS x WS positions and of weights of F features of h x w pixels, in units of 1/256 nat; the
        axes h and w are reversed.
    to_s, to_w : ndarray of int32, shape (images, channels, messages)
        Messages of the pixels to positions and to weights, in units of 1/256 nat.

    Returns
    -------
    ndarray of int32, shape (images, channels, H, W)
        Messages to H x W pixels, in units of 1/256 nat.
    """
    n_channels, h, width, n_features = w.shape
    image = s.shape[1] + h - 1, s.shape[2] + width - 1
    begins = message_starts(image, (h, width), n_features)
    out = np.empty((len(s), n_channels, *image), np.int32)
    for index in np.ndindex(out.shape):
        n, a, y, x = index
        of_s, of_w = find_window(y, h, s.shape[1]), find_window(x, width, s.shape[2])
        run = slice(begins[y * image[1] + x], begins[y * image[1] + x + 1])
        places, weights = s[(n, of_s[0], of_w[0])], w[(a, of_s[1], of_w[1])]
        t = pass_and_down(places.ravel() - to_s[n, a, run], weights.ravel() - to_w[n, a, run])
        out[index] = np.clip(pass_or_down(t), -POOL_FLOOR, POOL_FLOOR)
    return out


def pass_features_down(s: np.ndarray, w: np.ndarray, evidence: np.ndarray) -> np.ndarray:
    """Return belief-propagation messages of features down to pixels, for fixed weights after one pass up.

    In a pass up, a pixel sends its log odds to each feature position whose weight at this pixel is on. The
    pixel sends 0 to the other feature positions.

    Parameters
    ----------
    s : ndarray of int32, shape (images, F, HS, WS)
        Log odds of F features at HS x WS positions, in units of 1/256 nat.
    w : ndarray of bool, shape (channels, h, w, F)
        Weights of F features of h x w pixels; the axes h and w are reversed.
    evidence : ndarray of int32, shape (images, channels, H, W)
        Log odds of the pixels in the pass up, in units of 1/256 nat.

    Returns
    -------
    ndarray of int32, shape (images, channels, H, W)
        Messages to H x W pixels, in units of 1/256 nat.
    """
    first = np.full(evidence.shape, OFF_IMAGE, np.int64)
    total = np.zeros(evidence.shape, np.int64)
    high, wide = s.shape[2:]
    for a, i, j, f in np.argwhere(w[:, ::-1, ::-1]):
        part = np.s_[:, a, i : i + high, j : j + wide]
        t = s[:, f].astype(np.int64) - evidence[part]
        total[part] += np.clip(t, 0, POOL_FLOOR)
        first[part] = np.maximum(first[part], t)
    made = np.where(total > 0, total, first)
    return np.clip(made, -POOL_FLOOR, POOL_FLOOR).astype(np.int32)


def oriented_edges(images: np.ndarray, weights: np.ndarray, min_response: int, out: np.ndarray) -> None:
    """Mark in ``out`` the filter that is on at each pixel, which is the filter with the largest response.

    Parameters
    ----------
    images : ndarray of uint8, shape (images, H, W)
        Grey images; pixels outside of an image count as 0.
    weights : ndarray of int32, shape (filters / 2, side, side)
        Filters of the first half of the directions. The filter of the opposite direction has the
        same weights with the opposite sign.
    min_response : int
        Smallest response, a sum of weights times grey levels, that turns a filter on.
    out : ndarray of uint8, shape (images, filters, H, W)
        Result: 1 for the filter that is on, else 0. Among equal responses the first filter is on.
    """
    half, side, _ = weights.shape
    wide = np.pad(images.astype(np.int64), ((0, 0), (side // 2,) * 2, (side // 2,) * 2))
    views = np.lib.stride_tricks.sliding_window_view(wide, (side, side), axis=(1, 2))
    answers = np.einsum("nyxij,kij->nkyx", views, weights.astype(np.int64))
    best = np.abs(answers).argmax(axis=1)[:, None]
    answer = np.take_along_axis(answers, best, axis=1)
    on = np.where(answer > 0, best, best + half)
    out[...] = (np.arange(2 * half)[:, None, None] == on) & (np.abs(answer) >= min_response)
