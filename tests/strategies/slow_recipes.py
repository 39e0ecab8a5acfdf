"""The slow twin of every stream: a recipe, step by step, on unit vectors."""

from __future__ import annotations

import numpy as np

from noshuffle.strategies.recipe import (
    Array,
    Buffered,
    FeedForward,
    Forest,
    Recipe,
    Recursive,
    Rows,
    rows,
    stream,
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
        return stream(recipe, draws, steps=steps)
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
