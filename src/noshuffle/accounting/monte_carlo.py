"""Secret positions by Monte Carlo: bounds on δ that fail with a probability that is part of δ.

With K the Gram matrix of the shifts of b positions (`bins`), in deviations of the noise, and
L = (1/b) Σ_j e^{X_j − K_jj/2}, X ~ N(0, K) under Q, the two directions are

    remove   E_P(1 − e^ε/L)₊ = E_Q(L − e^ε)₊          add   E_Q(1 − e^ε L)₊

Only X is drawn: b numbers a sample, however many rows the noise has. Periods with a fresh position
each multiply L. Importance sampling (`moved_draws`) gives values Y, 0 ≤ Y ≤ R, whose mean is δ, and
products fixed beforehand (`mean_bounds`) bound it but for a probability β.

A run calibrated so is (ε, δ)-DP with δ = bound + β, the draws of the accountant being part of its
randomness; they are independent of the data. An upper bound below the sampling-free one takes at
least R log(1/β)/δ samples, whatever they show. No state.

>>> ten = SecretPositions(np.eye(10) * 4.0, Overlaps(((1, 0.0, 4.0), (10, 0.0, 4.0))))
>>> found = ten.delta(noise_multiplier=2.0, epsilon=1.0, samples=40_000, seed=1)
>>> found.lower < 0.00278 < found.upper < 1.5 * found.lower, round(found.sampling_free, 5)
(True, 0.00278)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from noshuffle.accounting.bins import Overlaps
from noshuffle.accounting.fresh_positions import FreshPositions
from noshuffle.accounting.mean_bounds import FINE, LEAST, MeanTest, lowest
from noshuffle.accounting.moved_draws import MovedDraws, WeightedDraws, alone_of
from noshuffle.errors import InvalidInput, non_negative, open_unit, positive, whole

Array = np.ndarray

DIRECTIONS = ("remove", "add")
#: Share of δ for the failure of the confidence bound, and for the losses that are cut off.
_SHARE = 0.01
#: Numbers drawn at once.
_CHUNK = 2**21
_PILOT = 0.1


@dataclass(frozen=True)
class Interval:
    """δ at one ε, or ε at one δ: bounds of Monte Carlo beside the one that needs none.

    `upper` and `lower` each fail with probability at most `failure`; `sampling_free` never does.
    """

    lower: float
    upper: float
    sampling_free: float
    failure: float
    samples: int

    def words(self) -> str:
        return (
            f"between {self.lower:.4g} and {self.upper:.4g} by {self.samples:,} samples (each "
            f"fails with probability {self.failure:.2g}); at most {self.sampling_free:.4g} without"
        )


@dataclass(frozen=True)
class SecretPositions:
    """K in clip norms, the sampling-free bound of the same positions, and how often they are drawn.

    `bound` is asked for `delta(noise_multiplier=, epsilon=)` and `epsilon(noise_multiplier=,
    delta=)` of all periods together.
    """

    gram: Array
    bound: Overlaps | FreshPositions
    periods: int = 1

    def __post_init__(self) -> None:
        K = np.asarray(self.gram, dtype=float)
        if K.ndim != 2 or K.shape[0] != K.shape[1] or not np.all(np.isfinite(K)) or np.any(K < 0):
            raise InvalidInput(
                "gram must be a square matrix of finite inner products of non-negative shifts, "
                f"got shape {K.shape}"
            )
        whole(periods=self.periods)

    def delta(
        self,
        *,
        noise_multiplier: float,
        epsilon: float,
        samples: int = 10**6,
        failure: float = 1e-8,
        direction: str = "both",
        seed: int | None = None,
    ) -> Interval:
        """δ at ε. The bounds cover both directions, or the one that is named.

        Guarantees: each bound fails with probability at most `failure`, over its own draws.
        """
        non_negative(epsilon=epsilon)
        open_unit(failure=failure)
        free = self.bound.delta(noise_multiplier=noise_multiplier, epsilon=epsilon)
        far = self._far(noise_multiplier, free)
        sides = DIRECTIONS if direction == "both" else (direction,)
        lower, upper = 0.0, 0.0
        for side in sides:
            pilot, drawn = self._drawn(side, noise_multiplier, epsilon, samples, seed, 0)
            test = self._test(side, epsilon, free, far, pilot)
            low, high = test.bounds(drawn, failure / len(sides))
            lower, upper = max(lower, low), max(upper, high)
        return Interval(lower, min(upper, 1.0), free, failure, samples)

    def epsilon(
        self,
        *,
        noise_multiplier: float,
        delta: float,
        samples: int = 10**6,
        seed: int | None = None,
    ) -> Interval:
        """ε at δ, to half a percent. `upper` with its failure, δ/100, is inside δ.

        Guarantees: as above; never above the sampling-free bound.
        """
        open_unit(delta=delta)
        failure = _SHARE * delta
        free = self.bound.epsilon(noise_multiplier=noise_multiplier, delta=delta)
        if free == 0:
            return Interval(0.0, 0.0, 0.0, failure, samples)
        far = self._far(noise_multiplier, delta)
        near = 0.9 * free
        for stage in (1, 2):  # a rough ε to draw for, from draws that serve nothing else
            count = max(1000, samples // 20)
            rough = [
                (side, self._drawn(side, noise_multiplier, near, count, seed, stage)[1])
                for side in DIRECTIONS
            ]
            near = lowest(partial(_is_small, rough, delta), free)
        seen = [
            (side, *self._drawn(side, noise_multiplier, near, samples, seed, 0))
            for side in DIRECTIONS
        ]

        def test(epsilon: float) -> list[tuple[MeanTest, WeightedDraws]]:
            return [
                (self._test(side, epsilon, delta, far, pilot), drawn) for side, pilot, drawn in seen
            ]

        def is_within(epsilon: float) -> bool:
            level = delta - failure
            return all(one.is_below(drawn, level, failure / 4) for one, drawn in test(epsilon))

        def is_beyond(epsilon: float) -> bool:
            return any(one.is_above(drawn, delta, failure / 4) for one, drawn in test(epsilon))

        upper = lowest(is_within, free)
        below = lowest(lambda epsilon: not is_beyond(epsilon), upper)
        # where the list ended before one was beyond, nothing is known from below
        lower = below * (1 - FINE) if below > LEAST * upper else 0.0
        return Interval(lower, upper, free, failure, samples)

    def _drawn(
        self,
        side: str,
        noise: float,
        epsilon: float,
        samples: int,
        seed: int | None,
        stage: int = 0,
    ) -> tuple[WeightedDraws, WeightedDraws]:
        """A pilot that chooses how to draw, and the draws themselves, from streams of their own."""
        positive(noise_multiplier=noise)
        whole(at_least=1000, samples=samples)
        K = np.asarray(self.gram, dtype=float) / noise**2
        # larger on the diagonal, on the safe side: bounds of inner products need not be a Gram
        more = max(0.0, -float(np.linalg.eigvalsh(K)[0])) + 1e-12 * float(K.max()) + 1e-300
        K = K + np.eye(len(K)) * more
        moved = MovedDraws(side, K, np.linalg.cholesky(K), self.periods)
        keys = [(DIRECTIONS.index(side), 2 * stage + i) for i in (0, 1)]
        kinds = [np.random.SeedSequence(seed, spawn_key=key) for key in keys]
        first, second = (np.random.default_rng(kind) for kind in kinds)
        count = max(500, int(_PILOT * samples))
        alone = alone_of(side, K, self.periods, epsilon)

        def draw(tilt: float, count: int, rng: np.random.Generator) -> WeightedDraws:
            parts, size = [], max(1, _CHUNK // len(K))
            for start in range(0, count, size):
                here = min(size, count - start)
                parts.append(moved.draw(tilt, alone is None, here, rng))
            log_ratio, share = (np.concatenate(part) for part in zip(*parts, strict=True))
            return WeightedDraws(log_ratio, share, alone)

        if alone is not None:
            return draw(alone.tilt, count, first), draw(alone.tilt, samples, second)

        top = float(K.diagonal().max())
        if side == "remove":
            far = max(2.0, 1.5 * (epsilon + math.log(len(K)) + top / 2) / top)
            tilts = [1.0, *(1 + (min(far, 50.0) - 1) * x for x in (0.1, 0.25, 0.5, 1.0))]
        else:
            spread = float(K.mean())
            far = 3.0 * epsilon / (spread * self.periods) + 1.0
            tilts = [0.0, *(-far * x for x in (0.1, 0.25, 0.5, 1.0))]
        pilots = {tilt: draw(tilt, max(500, count // len(tilts)), first) for tilt in tilts}

        def second_moment(tilt: float) -> float:
            value = pilots[tilt].values(side, epsilon)
            return float(np.mean(value**2)) if value.any() else math.inf

        best = min(tilts, key=second_moment)
        return pilots[best], draw(best, samples, second)

    def _far(self, noise: float, delta: float) -> float:
        """log Γ′: with Γ = 1.1 Γ′, P(L ≥ Γ) is at most eleven times δ there."""
        return self.bound.epsilon(noise_multiplier=noise, delta=min(_SHARE * delta / 11, 0.5))

    def _test(
        self, side: str, epsilon: float, delta: float, far: float, pilot: WeightedDraws
    ) -> MeanTest:
        """The cut Γ = 1.1 e^far, what it is charged with, the range of Y, and λ by the pilot."""
        top, reach, charge = math.inf, 2.0, 0.0
        if pilot.alone is not None:
            reach = pilot.alone.reach(epsilon)
        elif side == "remove":
            top = max(far, epsilon + 0.01) + math.log(1.1)
            reach, charge = -2 * math.expm1(epsilon - top), _SHARE * delta
        spread = float(np.mean(pilot.values(side, epsilon, top) ** 2))
        return MeanTest(side, epsilon, top, reach, charge, spread)


def _is_small(seen: Sequence[tuple[str, WeightedDraws]], delta: float, epsilon: float) -> bool:
    """Whether the means of both directions are at most δ."""
    return all(float(drawn.values(side, epsilon).mean()) <= delta for side, drawn in seen)
