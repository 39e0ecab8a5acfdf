"""Secret positions by Monte Carlo: bounds on δ that fail with a probability that is part of δ.

With K the Gram matrix of the shifts of b positions (`bins`), in deviations of the noise, and
L = (1/b) Σ_j e^{X_j − K_jj/2}, X ~ N(0, K) under Q, the two directions are

    remove   E_P(1 − e^ε/L)₊ = E_Q(L − e^ε)₊          add   E_Q(1 − e^ε L)₊

Only X is drawn: b numbers a sample, however many rows the noise has. Periods with a fresh position
each multiply L. Importance sampling draws from

    remove   position j shifted s times as far, whose density over Q is L_s
    add      Q moved by −c K·1/b, away from all positions, with density M_c

and what is averaged is Y = value · density / density of the draws, 0 ≤ Y ≤ R. Two ways:

    alone    With κ = max K_jj, κ̄ and K̄ the means of K_jj and of K_ij (times the periods), the mean
             of e^{s·…} is at least the power s ≥ 1 of the mean, and log L at least its mean
             exponent: L_s ≥ L^s e^{−s(s−1)κ/2}, and M_c ≥ e^{c(ε − κ̄/2) − c²K̄/2} where L ≤ e^{−ε}.
             So R = (1/s)(1 − 1/s)^{s−1} e^{−(s−1)(ε − sκ/2)}, and e^{−c(ε − κ̄/2) + c²K̄/2}: least
             at s = ε/κ + ½ and c = (ε − κ̄/2)/K̄, and near δ itself unless amplification is strong.
    mixed    Half of the draws from P (or Q), s or c from a pilot: Y is at most twice the value.
             Losses above log Γ, where the sampling-free bound leaves at most a hundredth of δ, are
             cut off and charged with it: P(L ≥ Γ) ≤ Γ/(Γ − Γ′) · E_Q(L − Γ′)₊, R = 2(1 − e^ε/Γ).

Alone where that R is below a tenth.

Confidence: for λ ≤ 1/R fixed beforehand (by the pilot), Π(1 + λ(m − Y_i)) has mean at most 1 if the
mean of Y is m or more, so by Markov's inequality it exceeds 1/β with probability at most β
(Waudby-Smith and Ramdas 2024). Solved for m that is an upper bound; the mirrored product is a lower
one. For ε at δ a fixed list of falling ε is tested until the first failure, which needs no
correction: the first wrong one has to pass. The list is coarse, then fine within the last coarse
step, each with half of β. A run calibrated so is (ε, δ)-DP with δ = bound + β, the draws of the
accountant being part of its randomness; they are independent of the data. An upper bound below the
sampling-free one takes at least R log(1/β)/δ samples, whatever they show. No state.

>>> ten = SecretPositions(np.eye(10) * 4.0, Overlaps(((1, 0.0, 4.0), (10, 0.0, 4.0))))
>>> found = ten.delta(noise_multiplier=2.0, epsilon=1.0, samples=40_000, seed=1)
>>> found.lower < 0.00278 < found.upper < 1.5 * found.lower, round(found.sampling_free, 5)
(True, 0.00278)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from noshuffle.accounting.bins import Overlaps
from noshuffle.accounting.fresh_positions import FreshPositions
from noshuffle.errors import InvalidInput, non_negative, open_unit, positive, whole

Array = np.ndarray

DIRECTIONS = ("remove", "add")
#: Share of δ for the failure of the confidence bound, and for the losses that are cut off.
_SHARE = 0.01
#: Numbers drawn at once.
_CHUNK = 2**21
_PILOT = 0.1
#: Relative steps of the ε that are tested.
_COARSE, _FINE = 0.04, 0.005
#: Part of the first ε at which the list ends.
_LEAST = 0.02


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
            pilot, drawn = self._drawn(side, noise_multiplier, epsilon, samples, seed)
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
            near = self._rough(noise_multiplier, delta, near, samples // 20, seed, stage, free)
        seen = [
            (side, *self._drawn(side, noise_multiplier, near, samples, seed)) for side in DIRECTIONS
        ]

        def test(epsilon: float) -> list[tuple[_Test, _Draws]]:
            return [
                (self._test(side, epsilon, delta, far, pilot), drawn) for side, pilot, drawn in seen
            ]

        def is_within(epsilon: float) -> bool:
            level = delta - failure
            return all(one.is_below(drawn, level, failure / 4) for one, drawn in test(epsilon))

        def is_beyond(epsilon: float) -> bool:
            return any(one.is_above(drawn, delta, failure / 4) for one, drawn in test(epsilon))

        upper = _lowest(is_within, free)
        below = _lowest(lambda epsilon: not is_beyond(epsilon), upper)
        # where the list ended before one was beyond, nothing is known from below
        lower = below * (1 - _FINE) if below > _LEAST * upper else 0.0
        return Interval(lower, upper, free, failure, samples)

    def _rough(
        self,
        noise: float,
        delta: float,
        near: float,
        samples: int,
        seed: int | None,
        stage: int,
        most: float,
    ) -> float:
        """About the ε that has δ, from draws for another one."""
        count = max(1000, samples)
        seen = [(s, self._drawn(s, noise, near, count, seed, stage)[1]) for s in DIRECTIONS]

        def is_small(epsilon: float) -> bool:
            return all(float(drawn.values(side, epsilon).mean()) <= delta for side, drawn in seen)

        return _lowest(is_small, most)

    def _drawn(
        self,
        side: str,
        noise: float,
        epsilon: float,
        samples: int,
        seed: int | None,
        stage: int = 0,
    ) -> tuple[_Draws, _Draws]:
        """A pilot that chooses how to draw, and the draws themselves, from streams of their own."""
        positive(noise_multiplier=noise)
        whole(at_least=1000, samples=samples)
        K = np.asarray(self.gram, dtype=float) / noise**2
        # larger on the diagonal, on the safe side: bounds of inner products need not be a Gram
        more = max(0.0, -float(np.linalg.eigvalsh(K)[0])) + 1e-12 * float(K.max()) + 1e-300
        K = K + np.eye(len(K)) * more
        root = np.linalg.cholesky(K)
        keys = [(DIRECTIONS.index(side), 2 * stage + i) for i in (0, 1)]
        kinds = [np.random.SeedSequence(seed, spawn_key=key) for key in keys]
        first, second = (np.random.default_rng(kind) for kind in kinds)
        sample = _remove if side == "remove" else _add
        count = max(500, int(_PILOT * samples))
        alone = _alone(side, K, self.periods, epsilon)

        def draw(tilt: float, count: int, rng: np.random.Generator) -> _Draws:
            parts, size = [], max(1, _CHUNK // len(K))
            for start in range(0, count, size):
                here = min(size, count - start)
                parts.append(sample(K, root, tilt, alone is None, self.periods, here, rng))
            log_ratio, share = (np.concatenate(part) for part in zip(*parts, strict=True))
            return _Draws(log_ratio, share, alone)

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

    def _test(self, side: str, epsilon: float, delta: float, far: float, pilot: _Draws) -> _Test:
        """The cut Γ = 1.1 e^far, what it is charged with, the range of Y, and λ by the pilot."""
        top, reach, charge = math.inf, 2.0, 0.0
        if pilot.alone is not None:
            reach = pilot.alone.reach(epsilon)
        elif side == "remove":
            top = max(far, epsilon + 0.01) + math.log(1.1)
            reach, charge = -2 * math.expm1(epsilon - top), _SHARE * delta
        spread = float(np.mean(pilot.values(side, epsilon, top) ** 2))
        return _Test(side, epsilon, top, reach, charge, spread)


@dataclass(frozen=True)
class _Alone:
    """Draws from the moved density only: s or −c, and what bounds Y (the head of this file)."""

    tilt: float
    norm: float
    spread: float

    def reach(self, epsilon: float) -> float:
        """R at this ε; not below 1e-30, on the safe side."""
        s = self.tilt
        if s < 0:
            log_reach = s * (epsilon - self.norm / 2) + s * s * self.spread / 2
        else:
            most = (s - 1) * math.log1p(-1 / s) - math.log(s)
            log_reach = most - (s - 1) * (epsilon - s * self.norm / 2)
        return max(1e-30, math.exp(min(700.0, log_reach)))


def _alone(side: str, K: Array, periods: int, epsilon: float) -> _Alone | None:
    """The best of them, or None where Y could be as large as a tenth."""
    norm = periods * float(K.diagonal().max() if side == "remove" else K.diagonal().mean())
    spread = periods * float(K.mean())
    tilt = epsilon / norm + 0.5 if side == "remove" else (norm / 2 - epsilon) / spread
    found = _Alone(tilt, norm, spread)
    is_right = tilt > 1 if side == "remove" else tilt < 0
    return found if is_right and found.reach(epsilon) < 0.1 else None


@dataclass(frozen=True)
class _Draws:
    """log L, and the density of P (Q) over that of the draws, of every sample."""

    log_ratio: Array
    share: Array
    alone: _Alone | None = None

    def values(self, side: str, epsilon: float, top: float = math.inf) -> Array:
        gain = epsilon - self.log_ratio if side == "remove" else epsilon + self.log_ratio
        out = -np.expm1(np.minimum(gain, 0.0)) * self.share
        return np.where(self.log_ratio < top, out, 0.0)


@dataclass(frozen=True)
class _Test:
    """One-sided bounds of a mean of values in [0, reach], by products fixed beforehand."""

    side: str
    epsilon: float
    top: float
    reach: float
    charge: float
    second_moment: float

    def is_below(self, drawn: _Draws, mean: float, failure: float) -> bool:
        """Whether the true mean is surely below this one."""
        if mean <= self.charge:
            return False
        bet = min(self._rate(drawn, failure), (1 - 1e-9) / max(self.reach, 1e-300))
        return self._wealth(drawn, bet, mean - self.charge) > -math.log(failure)

    def is_above(self, drawn: _Draws, mean: float, failure: float) -> bool:
        """Whether the true mean is surely above this one."""
        bet = min(self._rate(drawn, failure), 1 / mean)
        return self._wealth(drawn, -bet, mean) > -math.log(failure)

    def bounds(self, drawn: _Draws, failure: float) -> tuple[float, float]:
        upper = _rising(lambda mean: self.is_below(drawn, mean, failure))
        lower = _rising(lambda mean: not self.is_above(drawn, mean, failure))
        return lower * (1 - 1e-5), upper

    def _rate(self, drawn: _Draws, failure: float) -> float:
        square = len(drawn.share) * max(self.second_moment, 1e-300)
        return math.sqrt(-2 * math.log(failure) / square)

    def _wealth(self, drawn: _Draws, bet: float, mean: float) -> float:
        values = drawn.values(self.side, self.epsilon, self.top)
        seen = values[values > 0]
        zeros = len(values) - len(seen)
        one = 1 + bet * mean
        if one <= 0 and zeros:
            return -math.inf
        return zeros * math.log(one) + float(np.log1p(bet * (mean - seen)).sum())


def _rising(is_reached: Callable[[float], bool]) -> float:
    """Where a statement becomes true, to 1e-5, relative, on its far side; 1 where it never does."""
    low, high = 1e-18, 1.0
    while high > low * (1 + 1e-5):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return high


def _lowest(holds: Callable[[float], bool], start: float) -> float:
    """The last of a falling list, in coarse and then in fine steps, before the first failure.

    Fine steps end within the coarse one that failed: beyond it the list would follow from the
    draws, and its first wrong entry would not be one that was fixed beforehand.
    """
    found = start
    while found > _LEAST * start and holds(found * (1 - _COARSE)):
        found *= 1 - _COARSE
    for _ in range(int(math.log1p(-_COARSE) / math.log1p(-_FINE))):
        if not holds(found * (1 - _FINE)):
            break
        found *= 1 - _FINE
    return found


def _log_means(exponents: Array) -> Array:
    """log of the mean of e^{…} over positions."""
    top = exponents.max(axis=1, keepdims=True)
    mean = np.exp(exponents - top).mean(axis=1)
    return np.asarray(top[:, 0] + np.log(mean))


def _remove(
    K: Array,
    root: Array,
    tilt: float,
    is_mixed: bool,
    periods: int,
    count: int,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """Shifts `tilt` times as long, of half or all draws: log L, and L over the draws' density."""
    half = K.diagonal() / 2
    scale = np.where(rng.random(count) < 0.5, 1.0, tilt) if is_mixed else np.full(count, tilt)
    plain, tilted = np.zeros(count), np.zeros(count)
    for _ in range(periods):
        X = rng.standard_normal((count, len(K))) @ root.T
        X += scale[:, None] * K[rng.integers(len(K), size=count)]
        plain += _log_means(X - half)
        if tilt != 1:
            tilted += _log_means(tilt * X - tilt**2 * half)
    if tilt == 1:
        return plain, np.ones(count)
    return plain, _share(tilted - plain, is_mixed)


def _add(
    K: Array,
    root: Array,
    tilt: float,
    is_mixed: bool,
    periods: int,
    count: int,
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """Q moved by `tilt` (negative: away) along the mean of all positions, half or all draws."""
    half, along = K.diagonal() / 2, K.mean(axis=1)
    moved = np.where(rng.random(count) < 0.5, 0.0, tilt) if is_mixed else np.full(count, tilt)
    plain, tilted = np.zeros(count), np.zeros(count)
    for _ in range(periods):
        X = rng.standard_normal((count, len(K))) @ root.T + moved[:, None] * along
        plain += _log_means(X - half)
        tilted += tilt * X.mean(axis=1) - tilt**2 * float(along.mean()) / 2
    return plain, _share(tilted, is_mixed)


def _share(excess: Array, is_mixed: bool) -> Array:
    """One over the density of the draws, from its logarithm."""
    if is_mixed:
        return np.asarray(2 * np.exp(-np.logaddexp(0.0, np.minimum(excess, 700.0))))
    return np.asarray(np.exp(-np.maximum(excess, -700.0)))
