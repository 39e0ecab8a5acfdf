"""Recipes: what a step adds is a row of C⁻¹."""

from __future__ import annotations

import numpy as np
import pytest

from noshuffle.strategies.recipe import (
    Buffered,
    FeedForward,
    Forest,
    Recipe,
    Recursive,
    Rows,
    noise_variance,
    rows,
    stream,
)

STEPS = 13
SCALE = tuple(1.0 + 0.1 * t for t in range(STEPS))
RECIPES: dict[str, Recipe] = {
    "identity": FeedForward((1.0,), scale=SCALE),
    "banded inverse": FeedForward((1.0, -0.5, 0.0, -0.1)),
    "bands": Recursive((1.0, -0.5, -0.25), scale=SCALE),
    "blt": Buffered((0.9, 0.5), (-0.2, -0.1), scale=SCALE),
    "taps": Buffered((0.9,), (-0.2,), ((0, 1.0), (2, 0.3)), draw_scale=SCALE),
    "rows": Rows(np.tril(np.random.default_rng(0).normal(size=(STEPS, STEPS)))),
}
RECIPES |= {
    f"{variant}, blocks of {block}, {completion=}": Forest(variant, STEPS, block, completion)
    for variant in ("plain", "honaker")
    for block in (0, 1, 3, 4, 5)
    for completion in (False, True)
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_variance_of_a_step_is_that_of_its_row(name: str) -> None:
    recipe = RECIPES[name]
    inverse = stream(recipe, np.eye(rows(recipe, STEPS)), steps=STEPS)
    for steps in (1, 6, STEPS):
        found = noise_variance(recipe, steps)
        np.testing.assert_allclose(found, np.square(inverse[:steps]).sum(1), rtol=1e-12)
