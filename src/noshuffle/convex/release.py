"""Release: float64 sums plus correlated noise, one row a step.

    released = grid(sum + z·clip·(C⁻¹Z)_t)

The noise stream draws float32, and rounds the float64 sum with its noise at random to a public grid
of about 2⁻¹⁰ z·clip, so that the low bits of the raw sum do not shine through (`noise.grid`).

State kept: the noise stream. Without noise (ε = ∞) the sum passes unchanged.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from noshuffle.noise import NoiseStream, Source
from noshuffle.plan import Plan


class Release:
    """Noise for one phase of a stream: call it with the raw sum of a step, once per step.

    Guarantees: the answer is a function of the sum plus row t of z·clip·C⁻¹Z (and of independent
    coins), so the plan's statement covers it. Every call moves on by one row of noise; a call that
    fails half-way leaves a stream that refuses to go on.
    """

    def __init__(
        self, plan: Plan, source: Source, *, name: str, size: int, clip_norm: float
    ) -> None:
        self._name = name
        self._noise = NoiseStream(
            plan.strategy.recipe(plan.steps),
            source,
            {name: (size,)},
            scale=plan.noise_multiplier * clip_norm,
            steps=plan.steps,
        )

    def __call__(self, total: Tensor) -> Tensor:
        """The released sum of the next step; `total` itself is overwritten."""
        self._noise.add_({self._name: total})
        return total

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, without the key."""
        return self._noise.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the stream that wrote `state` stood; refuses another stream's."""
        self._noise.load_state_dict(state)
