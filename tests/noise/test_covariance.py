"""Over 20,000 coordinates, the streamed noise has the covariance of the explicit matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.noise.laws import check_covariance
from tests.strategies.slow_recipes import materialize

from noshuffle.noise import NoiseStream, test_source
from noshuffle.strategies.recipe import (
    Buffered,
    FeedForward,
    Forest,
    Recipe,
    Recursive,
    Rows,
)

N, SIZE, SCALE = 13, 20_000, 1.7
GAINS = tuple(1.0 / (1 + 0.1 * t) for t in range(N))

RECIPES: dict[str, Recipe] = {
    "identity": FeedForward((1.0,)),
    "sums": FeedForward((1.0, -1.0)),
    "bisr": FeedForward((1.0, -0.5, -0.125, -0.0625)),
    "bisr with gains": FeedForward((1.0, -0.5, -0.125), scale=GAINS),
    "banded": Recursive((1.0, -0.5, -0.375)),
    "blt": Buffered((0.95, 0.6), (-0.1, -0.3)),
    "blt with taps and gains": Buffered((0.9, 0.5), (-0.1, -0.3), ((0, 1.0), (4, 0.3)), GAINS),
    "blt with gains on both sides": Buffered(
        (0.9, 0.5), (-0.1, -0.3), ((0, 1.0), (4, 0.3)), GAINS, GAINS[::-1]
    ),
    "dense": Rows(np.tril(np.random.default_rng(1).standard_normal((N, N)))),
    "plain": Forest("plain", N),
    "plain restart": Forest("plain", N, 5),
    "plain restart completed": Forest("plain", N, 5, completion=True),
    "honaker": Forest("honaker", N),
    "honaker restart": Forest("honaker", N, 5),
    "honaker restart completed": Forest("honaker", N, 5, completion=True),
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_covariance(name: str, kind: str) -> None:
    recipe = RECIPES[name]
    source = test_source(seed="covariance", kind=kind)
    shapes = {"w": (SIZE // 2,), "b": (SIZE // 4,), "v": (SIZE // 4,)}
    stream = NoiseStream(recipe, source, shapes, scale=SCALE, steps=N)
    released = []
    for _ in range(N):
        values = {key: torch.zeros(shape) for key, shape in shapes.items()}
        stream.add_(values)
        released.append(torch.cat(list(values.values())).double().numpy())
    sample = np.array(released)
    matrix = materialize(recipe, N)
    covariance = SCALE**2 * matrix @ matrix.T
    check_covariance(sample, covariance)
    assert np.abs(sample.mean(axis=1) / np.sqrt(np.diag(covariance) / SIZE)).max() < 5
