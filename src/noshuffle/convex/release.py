"""Release: float64 sums plus correlated noise, without the raw sum shining through its low bits.

    released = grid · round((sum + z·clip·(C⁻¹Z)_t + 2⁻¹⁶·z·clip·N_t) / grid),    grid ≈ 2⁻²⁸·z·clip

The noise stream draws float32. Alone on a float64 sum it would protect nothing: noise of size one
is a multiple of 2⁻²³, so the last 29 bits of the answer are those of the raw sum, and whoever
guesses a data set can check the guess (released − guessed sum is a float32, or it is not). Two
steps of post-processing close that. An independent normal N_t a factor 2¹⁶ below fills the bits
under the first draw's grid: its deviation is 2³ to 2⁷ steps of that grid, where the ripple that a
grid leaves in the smoothed density, 2·exp(−2π²·64), is far below anything measurable. Then the
answer is rounded to a grid on which each cell holds about 2²⁰ values of the noise. What is left is
the rounding of any floating-point mechanism, which the statement names as not analysed. The extra
variance is 2⁻³² of the noise.

State kept: the two noise streams. Without noise (ε = ∞) the sum passes unchanged.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from noshuffle.noise import NoiseStream, Source
from noshuffle.plan import Plan
from noshuffle.strategies import identity

#: The second draw, and the grid of what is released, as powers of two below the noise.
_SECOND, _GRID = 16, 28


class Release:
    """Noise for one phase of a stream: call it with the raw sum of a step, once per step.

    Guarantees: the answer is a function of the sum plus row t of z·clip·C⁻¹Z (and of independent
    noise), so the plan's statement covers it. Every call moves on by one row of noise; a call that
    fails half-way leaves a stream that refuses to go on.
    """

    def __init__(
        self, plan: Plan, source: Source, *, name: str, size: int, clip_norm: float
    ) -> None:
        scale = plan.noise_multiplier * clip_norm
        steps, shape = plan.steps, (size,)
        self._name, self._low_name = name, f"{name}, low bits"
        self._first = NoiseStream(
            plan.strategy.recipe(steps), source, {name: shape}, scale=scale, steps=steps
        )
        self._second: NoiseStream | None = None
        if scale > 0:
            self._grid = 2.0 ** (math.floor(math.log2(scale)) - _GRID)
            self._second = NoiseStream(
                identity().recipe(steps),
                source,
                {self._low_name: shape},
                scale=scale * 2.0**-_SECOND,
                steps=steps,
            )

    def __call__(self, total: Tensor) -> Tensor:
        """The released sum of the next step; `total` itself is overwritten."""
        self._first.add_({self._name: total})
        if self._second is None:
            return total
        self._second.add_({self._low_name: total})
        return torch.round(total / self._grid).mul_(self._grid)

    def state_dict(self) -> dict[str, Any]:
        """Where both streams stand, without the key."""
        second = None if self._second is None else self._second.state_dict()
        return {"first": self._first.state_dict(), "second": second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the streams that wrote `state` stood; refuses another stream's."""
        self._first.load_state_dict(state["first"])
        if self._second is not None:
            self._second.load_state_dict(state["second"])
