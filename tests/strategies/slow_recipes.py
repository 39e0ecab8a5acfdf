"""The slow twin of every stream: a recipe, step by step, on unit vectors."""

from __future__ import annotations

import numpy as np
from scipy.linalg import block_diag

from noshuffle.strategies.recipe import (
    Array,
    Buffered,
    FeedForward,
    Forest,
    Recipe,
    Recursive,
    Rows,
    forest_blocks,
    forest_rows,
    rows,
)


def materialize(recipe: Recipe, steps: int) -> Array:
    """C⁻¹ as an explicit steps × rows matrix, by running the recipe on unit vectors."""
    m = rows(recipe, steps)
    draws = np.eye(m)
    zero = np.zeros(m)
    out = np.zeros((steps, m))
    if isinstance(recipe, Rows):
        return np.array(recipe.matrix[:steps, :steps])
    if isinstance(recipe, Forest):
        blocks = forest_blocks(recipe)
        trees = [tree_matrix(real, full, recipe.variant) for _, real, full in blocks]
        return np.asarray(block_diag(*trees)[:steps])
    if isinstance(recipe, Buffered) and recipe.draw_scale:
        draws *= np.asarray(recipe.draw_scale)[:m, None]
    past: list[Array] = []
    state = np.zeros((len(recipe.decays), m)) if isinstance(recipe, Buffered) else zero
    for t in range(steps):
        if isinstance(recipe, FeedForward):
            x = sum((w * draws[t - i] for i, w in enumerate(recipe.weights) if i <= t), zero)
        elif isinstance(recipe, Recursive):
            x = recipe.weights[0] * draws[t]
            x = x + sum((w * past[t - i] for i, w in enumerate(recipe.weights) if 0 < i <= t), zero)
            past.append(x)
        else:
            u = sum((w * draws[t - lag] for lag, w in recipe.taps if lag <= t), zero)
            x = u + np.asarray(recipe.scales) @ state
            state = np.asarray(recipe.decays)[:, None] * state + u
        out[t] = x * (recipe.scale[t] if recipe.scale else 1.0)
    return out


def tree_matrix(real: int, full: int, variant: str) -> Array:
    """Increments of the noise on the prefix, as weights of the nodes in order of completion.

    The rows of a subtree follow each other, so the noise on t leaves is one weight vector per
    set bit of t, laid end to end. Honaker: a node d levels below its stack entry of height h has
    weight 2^{−d} / (2 − 2^{−h}).
    """
    subtree = np.ones(1)
    weights = [subtree]
    for height in range(1, full.bit_length()):
        halves = subtree / 2 if variant == "honaker" else np.zeros_like(subtree)
        subtree = np.concatenate([halves, halves, np.ones(1)])
        weights.append(subtree * (1 / (2 - 2.0**-height) if variant == "honaker" else 1.0))
    prefix = np.zeros((real, forest_rows(full)))
    for t in range(1, real + 1):
        leaves = t if t < real else full
        stack = [weights[h] for h in reversed(range(leaves.bit_length())) if leaves >> h & 1]
        prefix[t - 1, : forest_rows(leaves)] = np.concatenate(stack)
    return np.diff(prefix, axis=0, prepend=0.0)
