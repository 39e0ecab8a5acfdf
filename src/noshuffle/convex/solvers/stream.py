"""Correlated noise in numpy: row t of C⁻¹Z, one step at a time, from a strategy's recipe.

The tensor layer has its own stream; this one serves vectors of a solver, in float64. State: the
buffers, the stack of nodes or the past draws that the recipe asks for (see `strategies.recipe`).
The slow twin is `strategy.noising(n)` times a matrix of draws.

>>> from noshuffle.strategies import identity
>>> stream = NoiseStream(identity(), steps=3, size=2, scale=0.0, draws=np.random.default_rng(0))
>>> float(abs(stream.next()).max())
0.0
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from noshuffle.convex.losses import Array
from noshuffle.errors import HorizonExceeded, Unsupported, non_negative, whole
from noshuffle.strategies import Strategy
from noshuffle.strategies.recipe import (
    Buffered,
    FeedForward,
    Forest,
    Recursive,
    Rows,
    forest_blocks,
)

#: Rows of Z drawn together: one call of the generator costs as much as a thousand numbers.
_AHEAD = 64


class NoiseStream:
    """Yields scale · (row t of C⁻¹Z), t = 0, 1, …, steps − 1.

    Guarantees: every row of Z is drawn once from `draws` and enters as the recipe says; a step
    beyond the horizon is refused, because the sensitivity was computed for the horizon.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        steps: int,
        size: int,
        scale: float,
        draws: np.random.Generator,
    ) -> None:
        whole(steps=steps, size=size)
        non_negative(scale=scale)
        self.steps, self.size, self.scale, self.done = steps, size, scale, 0
        self._draws = draws
        self._ready: Iterator[Array] = iter(())
        recipe = strategy.recipe(steps)
        if isinstance(recipe, Forest):
            self._rows = self._forest(recipe)
        elif isinstance(recipe, Buffered):
            self._rows = self._buffered(recipe)
        elif isinstance(recipe, Recursive):
            self._rows = self._recursive(recipe)
        elif isinstance(recipe, FeedForward):
            self._rows = self._feed_forward(recipe)
        elif isinstance(recipe, Rows):
            self._rows = self._matrix(recipe)
        else:  # pragma: no cover - all recipes are listed
            raise Unsupported(f"no numpy stream for {type(recipe).__name__}")

    def next(self) -> Array:
        """The noise of the next step."""
        if self.done >= self.steps:
            raise HorizonExceeded(f"noise was planned for {self.steps} steps, one more was asked")
        self.done += 1
        return self.scale * next(self._rows)

    def _draw(self) -> Array:
        for row in self._ready:
            return row
        self._ready = iter(self._draws.standard_normal((_AHEAD, self.size)))
        return next(self._ready)

    def _feed_forward(self, recipe: FeedForward) -> Iterator[Array]:
        weights, past = np.asarray(recipe.weights), np.zeros((len(recipe.weights), self.size))
        for t in range(self.steps):
            past[t % len(weights)] = self._draw()
            order = (t - np.arange(len(weights))) % len(weights)
            x = weights @ past[order] if len(weights) > 1 else weights[0] * past[0]
            yield x * (recipe.scale[t] if recipe.scale else 1.0)

    def _recursive(self, recipe: Recursive) -> Iterator[Array]:
        weights = np.asarray(recipe.weights[1:])
        past = np.zeros((len(weights), self.size))  # newest first
        for t in range(self.steps):
            x = recipe.weights[0] * self._draw() + weights @ past
            if len(weights):
                past[1:] = past[:-1]
                past[0] = x
            yield x * (recipe.scale[t] if recipe.scale else 1.0)

    def _buffered(self, recipe: Buffered) -> Iterator[Array]:
        decays, scales = np.asarray(recipe.decays)[:, None], np.asarray(recipe.scales)
        state = np.zeros((len(decays), self.size))
        lags = [lag for lag, _ in recipe.taps]
        past: list[Array] = []
        for t in range(self.steps):
            z = self._draw() * (recipe.draw_scale[t] if recipe.draw_scale else 1.0)
            u = z
            if len(lags) > 1:
                past.append(z)
                taps = (w * past[t - lag] for lag, w in recipe.taps if lag <= t)
                u = sum(taps, np.zeros(self.size))
            x = u + scales @ state
            state *= decays
            state += u
            yield x * (recipe.scale[t] if recipe.scale else 1.0)

    def _forest(self, recipe: Forest) -> Iterator[Array]:
        honaker = recipe.variant == "honaker"
        for _, real, full in forest_blocks(recipe):
            stack: list[tuple[int, Array]] = []
            before = np.zeros(self.size)
            for leaf in range(full):
                height, value = 0, self._draw()
                while stack and stack[-1][0] == height:
                    _, left = stack.pop()
                    height += 1
                    fresh = self._draw()
                    value = fresh + (left + value) / 2 if honaker else fresh
                stack.append((height, value))
                if leaf < real - 1 or leaf == full - 1:
                    after = np.zeros(self.size)
                    for h, v in stack:
                        after += v / (2 - 2.0**-h) if honaker else v
                    yield after - before
                    before = after

    def _matrix(self, recipe: Rows) -> Iterator[Array]:
        past = np.zeros((recipe.matrix.shape[1], self.size))
        for t in range(self.steps):
            past[t] = self._draw()
            yield recipe.matrix[t, : t + 1] @ past[: t + 1]
