"""Recipes: how a tensor layer makes the noise of step t without ever seeing a matrix.

Row t of C⁻¹Z is what training adds to the gradient of step t. Z has independent standard normal
rows z_0, z_1, …, each of which can be drawn again from its index; z_r with r < 0 is zero. A recipe
is plain data, one of

    FeedForward   y_t = a_t Σ_i w_i z_{t−i}                                (past draws come again)
    Recursive     x_t = w_0 z_t + Σ_{i≥1} w_i x_{t−i},   y_t = a_t x_t     (keeps p−1 past x)
    Buffered      u_t = Σ_(lag,w) w d_{t−lag} z_{t−lag},  x_t = u_t + Σ_j ω_j S_j,
                  S_j ← θ_j S_j + u_t,  y_t = a_t x_t                      (keeps S; draws again)
    Forest        trees over blocks of steps; see `Forest`                 (keeps one stack)
    Rows          y_t = Σ_{r≤t} M[t, r] z_r                                (past draws come again)

with a per-step scale a_t = 1 / gain_t (all ones when `scale` is empty) and, in Buffered, a scale of
every draw wherever it enters, d_r (all ones when `draw_scale` is empty). `stream` runs a recipe on
given draws, all steps at once; on unit vectors it returns C⁻¹ itself. `noise_variance` is what one
step adds to one entry of its gradient, in units of (z·ζ)².

>>> stream(FeedForward(weights=(1.0, -1.0)), np.eye(3), steps=3)
array([[ 1.,  0.,  0.],
       [-1.,  1.,  0.],
       [ 0., -1.,  1.]])
>>> noise_variance(FeedForward(weights=(1.0, -1.0)), steps=3)
array([1., 2., 2.])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FeedForward:
    """y_t = a_t Σ_i weights[i]·z_{t−i}: nothing is stored, past draws are made again."""

    weights: tuple[float, ...]
    scale: tuple[float, ...] = ()


@dataclass(frozen=True)
class Recursive:
    """x_t = weights[0]·z_t + Σ_{i≥1} weights[i]·x_{t−i}; y_t = a_t x_t. Stores the past x."""

    weights: tuple[float, ...]
    scale: tuple[float, ...] = ()


@dataclass(frozen=True)
class Buffered:
    """Forward form of a buffered linear Toeplitz filter, fed with tapped draws.

    `taps` lists (lag, weight) pairs and always starts with (0, 1.0). With a `draw_scale`,
    draw_scale[r]·z_r takes the place of z_r, when it is new and when a tap draws it again.
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]
    taps: tuple[tuple[int, float], ...] = ((0, 1.0),)
    scale: tuple[float, ...] = ()
    draw_scale: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.decays) != len(self.scales):
            raise InvalidInput("a Buffered recipe needs as many scales as decays")


@dataclass(frozen=True)
class Forest:
    """Binary trees over consecutive blocks of `block` steps (0: one tree for the whole run).

    Inside a block, step s (from 0) pushes a leaf; equal heights at the top of the stack merge.
    Every node of the forest has one fresh draw. A stack entry of height h holds

        plain     V = fresh                                   and counts V
        Honaker   V = fresh + (V_left + V_right) / 2          and counts V / (2 − 2^{−h})

    The noise on the prefix sum is the count of the whole stack, plus what finished blocks left
    behind; y_t is its increase at step t. With `completion`, the last step of every block but the
    run's last goes on with virtual empty leaves up to a power of two, so that one root is left.
    `steps` is the horizon, needed to know which block is the last.

    Draws are numbered in order of completion: the node of height h that step s of a block
    completes has row  block_index·rows_per_block + 2s − popcount(s) + h.
    """

    variant: str
    steps: int
    block: int = 0
    completion: bool = False


@dataclass(frozen=True, eq=False)
class Rows:
    """y_t = Σ_{r≤t} matrix[t, r]·z_r for an explicit lower-triangular matrix."""

    matrix: Array


Recipe = FeedForward | Recursive | Buffered | Forest | Rows


def forest_rows(leaves: int) -> int:
    """Number of complete dyadic nodes over `leaves` leaves: 2n − popcount(n)."""
    return 2 * leaves - leaves.bit_count()


def node_weight(variant: str, height: int) -> float:
    """What a node counts, and the variance of its estimate from itself or its whole subtree."""
    return 1 / (2 - 2.0**-height) if variant == "honaker" else 1.0


def forest_blocks(recipe: Forest) -> Iterator[tuple[int, int, int]]:
    """(first step, real leaves, leaves with virtual ones) of every block, in order."""
    length = recipe.block or recipe.steps
    for start in range(0, recipe.steps, length):
        real = min(length, recipe.steps - start)
        is_last = start + real >= recipe.steps
        full = real
        if recipe.completion and not is_last:
            full = 1 << (real - 1).bit_length()
        yield start, real, full


def rows(recipe: Recipe, steps: int) -> int:
    """How many rows of Z the first `steps` steps read (m in the shape of C: m × n)."""
    if isinstance(recipe, Forest):
        return sum(forest_rows(full) for _, _, full in forest_blocks(recipe))
    return steps


def stream(recipe: Recipe, draws: Array, *, steps: int) -> Array:
    """The noise of the first `steps` steps from the rows of Z, by linear filters."""
    from scipy.signal import lfilter  # a second to import: not for questions to a plan

    if isinstance(recipe, Rows):
        return np.asarray(recipe.matrix[:steps, :steps] @ draws[:steps])
    if isinstance(recipe, Forest):
        return _stream_forest(recipe, steps, draws)
    z = draws[:steps]
    if isinstance(recipe, FeedForward):
        x = lfilter(recipe.weights, [1.0], z, axis=0)
    elif isinstance(recipe, Recursive):
        back = np.append(1.0, -np.asarray(recipe.weights[1:]))
        x = lfilter(recipe.weights[:1], back, z, axis=0)
    else:
        if recipe.draw_scale:
            z = z * np.asarray(recipe.draw_scale)[:steps, None]
        u = np.zeros_like(z)
        for lag, w in recipe.taps:
            u[lag:] += w * z[: steps - lag] if lag < steps else 0.0
        x = u.copy()
        for decay, scale in zip(recipe.decays, recipe.scales):
            x += scale * lfilter([0.0, 1.0], [1.0, -decay], u, axis=0)
    return np.asarray(x * np.asarray(recipe.scale)[:steps, None] if recipe.scale else x)


def _stream_forest(recipe: Forest, steps: int, draws: Array) -> Array:
    out = np.zeros((steps, draws.shape[1]))
    row = 0
    for start, real, full in forest_blocks(recipe):
        stack: list[tuple[int, Array]] = []
        before = np.zeros(draws.shape[1])
        for leaf in range(full):
            height, value = 0, draws[row]
            row += 1
            while stack and stack[-1][0] == height:
                _, left = stack.pop()
                height += 1
                carried = (left + value) / 2 if recipe.variant == "honaker" else 0.0
                value = draws[row] + carried
                row += 1
            stack.append((height, value))
            if leaf < real - 1 or leaf == full - 1:
                counts = (node_weight(recipe.variant, h) * v for h, v in stack)
                after = sum(counts, np.zeros_like(before))
                step = start + min(leaf, real - 1)
                if step < steps:
                    out[step] = after - before
                before = after
    return out


def noise_variance(recipe: Recipe, steps: int) -> Array:
    """Variance of an entry of (C⁻¹Z)_t for the first `steps` steps: the square of row t of C⁻¹."""
    if isinstance(recipe, Rows):
        return np.asarray(np.square(recipe.matrix[:steps, :steps]).sum(1))
    if isinstance(recipe, Forest):
        return _forest_variance(recipe)[:steps]
    draws = np.zeros((steps, 1))
    draws[:1] = 1.0
    bare = replace(recipe, scale=())
    if isinstance(bare, Buffered):
        bare = replace(bare, draw_scale=())
    squares = np.square(stream(bare, draws, steps=steps)[:, 0])
    if isinstance(recipe, Buffered) and recipe.draw_scale:
        weights = np.square(recipe.draw_scale[:steps])
        variance = np.convolve(weights, squares)[:steps]
    else:
        variance = np.cumsum(squares)
    return np.asarray(variance * np.square(recipe.scale[:steps]) if recipe.scale else variance)


def _forest_variance(recipe: Forest) -> Array:
    """Step s replaces finished nodes S_h of heights H by one node V of height k, all independent:

        y = w_k V − Σ_H w_h S_h,   V = Σ_fresh r^{k−h} z + Σ_H r^{k−h} S_h,   var S_h = 1/w_h

    with r = ½ for Honaker's estimate and r = 0 for the plain one, whose V is its own draw.
    """
    ratio, out = 0.5 if recipe.variant == "honaker" else 0.0, []
    for _, real, full in forest_blocks(recipe):
        for s in range(real):
            if s == real - 1 and full > real:  # goes on with virtual leaves, up to one root
                leaves, merged = range(s, full), [h for h in range(s.bit_length()) if s >> h & 1]
                top = full.bit_length() - 1
            else:
                top = (~s & (s + 1)).bit_length() - 1
                leaves, merged = range(s, s + 1), list(range(top))
            heights = [h for n in leaves for h in range((~n & (n + 1)).bit_length())]
            weight = node_weight(recipe.variant, top)
            fresh = weight**2 * sum(ratio ** (2 * (top - h)) for h in heights)
            held = [(node_weight(recipe.variant, h), ratio ** (top - h)) for h in merged]
            out.append(fresh + sum((weight * r - w) ** 2 / w for w, r in held))
    return np.array(out)
