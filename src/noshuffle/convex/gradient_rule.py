"""GradientRule: full-batch gradient descent on columns that it standardises first, both private.

A table that is there as a whole is read T times, each time as one batch, and every reading leaves
by the same door (independent noise, T releases of norm c: exactly μ = √T/z). The first s readings
release the sums of (x, x²) over the columns, the others clipped gradients:

    (m, q) = mean of (x, x²)·min(1, C/‖(x, x²)‖),  C = √(0.6 p)       → centre m̂, deviation σ̂
    x' = 3(x − m̂)/(σ̂√p)                                            a row, beside its constant 1
    v ← βv + ḡ,   θ ← θ − ηv,   ḡ = mean of clip(r ⊗ (x', 1)) + noise,   β = 0.9
    answer: the mean of θ over the second half of the steps

At θ = 0 every residual of two classes is ±½, so that the intercept of the first released gradient
tells the share of the rarer class, π̂ = ½(1 − |ḡ|/min(½, c/‖(x', 1)‖)), up to noise and with the
root mean square ϱ of ‖x'‖ by what was released: where `eases`, steps are multiplied by
max(2π̂, ¼) (`schedule` says why).

Before them one reading may count rows, by class where classes are to be balanced (`census`): a row
is one unit of one count. Then n̂_k rows of class k (n̂ in all) were released, rows of class k weigh
u_k = min_j n̂_j/n̂_k ≤ 1, and means are multiplied by n/n̂ (rows that were left out) and, for balance,
by n̂/(K min_j n̂_j) but at most 4. Models of log y learn the mean of y from it.
Clipped slopes make their predictions too small: as many readings as there are of columns correct
the intercept at the end (`calibration`). Weights of rows (`weighting`) multiply clipped gradients.

m̂ is shrunk towards the mean of all columns by the share of its spread that is noise (Lindley), and
σ̂² = q − m̂² is floored by its noise, so that what noise hides is not blown up. Rows are shorter for
that than gradients are clipped for: all columns grow by one factor, at most 4, until ϱ = 3, where
ϱ² = Σ 9v/(σ̂²p) and v is the shrunken q − m̂² (that itself, whose noise is in σ̂², too, would be too
much). All of it is post-processing: the x' of a row depends on the row and on what was
released, and its gradient is clipped afterwards. Clipped gradients of linear models are gradients
of another convex loss (Song, Steinke, Thakkar, Thakurta 2021).

Targets may be small beside their bounds, and the noise is for the bounds: linear regression counts
them first and takes a smaller unit (`target_window`), and regressions follow what a
velocity has beyond its noise (`shrinkage`; of deviation σ√(1 + β² + … + β^{2(t−1)})) in every step.
Otherwise predictions lie far from a mean that is known: steps that follow all of the noise add
ησ²/(2(1 − β)) to the variance of predictions for every column, whatever its curvature.

`schedule` says how many steps are worth their noise. Sparse rows are taken as they
are, and models without an intercept are scaled but not centred.

State: iterate, velocity, sum of the iterates of the second half, what the first readings released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.arrays import CLIP_SLACK, Array, Targets
from noshuffle.convex.calibration import LARGEST, calibration_sum, growth
from noshuffle.convex.inference import Law, free_clip, law_of, reach, spread_sum
from noshuffle.convex.margins import MarginLoss, PerMargin
from noshuffle.convex.moments import pack, unpack_square
from noshuffle.convex.phases import Phase
from noshuffle.convex.rows import squared_norms
from noshuffle.convex.rule import Rule, Watch
from noshuffle.convex.schedule import LENGTH, eased
from noshuffle.convex.shrinkage import kept_share, shrunk
from noshuffle.convex.target_window import BINS, bins_of, window
from noshuffle.errors import non_negative, positive

#: Momentum, clipping of (x, x²) in units of √p.
MOMENTUM, TYPICAL = 0.9, math.sqrt(0.6)
#: Rows that the floor of σ̂ made shorter than 3 are stretched by at most this.
MOST_STRETCH = 4.0
#: Balanced classes multiply steps by at most this.
MOST_GAIN = 4.0
#: Variance below which a column within [−1, 1] counts as constant.
_FLOOR = 1e-4


@dataclass(eq=False, kw_only=True)
class GradientRule(Rule):
    """Iterate and velocity; `readings` of the columns come first (0: rows are taken as they are).

    Guarantees: what a row adds to a sum has norm at most `clip_norm`, in readings of the columns
    and in gradients; rows that are not finite add nothing. With `has_many_rows` the same holds for
    all rows of a unit together: each adds at most its share weight/most_weight of it.
    """

    loss: MarginLoss
    features: int
    outputs: int
    clip_norm: float
    rate: float
    readings: int
    length: float = LENGTH
    eases: bool = False
    ridge: float = 0.0
    fit_intercept: bool = True
    most_weight: float = 1.0
    #: Classes to count in the first reading (1: rows only; 0: no such reading), and to balance.
    census: int = 0
    #: Whether a unit has several rows, whose weights add up to `most_weight` at most. Then counts
    #: and sums of columns are of weighted rows, as gradients are.
    has_many_rows: bool = False
    is_balanced: bool = False
    #: Models of log y start at the logarithm of the mean target, which the first reading releases,
    #: and divide gradients by this power of it. None: targets are not read for that.
    level_power: float | None = None
    #: Readings before those of the columns that count targets (regressions: see `target_window`),
    #: and R = nμ/√(p + 1) for it.
    windows: int = 0
    worth: float = 0.0
    #: Readings at the end that compare means of y and of predictions (models of log y).
    balances: int = 0
    #: Readings of the run that come before those of this rule (`ranges`).
    lead: int = 0
    #: Readings at the end that release what confidence intervals need (see `inference`).
    spreads: int = 0
    watch: Watch | None = None

    _STATE: ClassVar[tuple[str, ...]] = ("_theta", "_velocity", "_average", "_moments", "_centre")
    _STATE += ("_scale", "_count", "_taken", "counts", "_class_weight", "_gain", "_level")
    _STATE += ("_slopes", "_spread", "learning_rate", "_row_length", "_shift", "_gap")
    _STATE += ("_bins", "_middle", "_unit")

    def __post_init__(self) -> None:
        positive(clip_norm=self.clip_norm, learning_rate=self.rate)
        non_negative(alpha=self.ridge)
        k, p = self.outputs, self.features
        self._columns = 2 * p if self.readings else 0
        self.size = max(k * (p + 1), self._columns, self.census + 1, BINS if self.windows else 0)
        self._counting = int(self.census > 0)
        self._lead_in = self._counting + self.windows  # readings before the first of the columns
        self._before = self._lead_in + self.readings  # readings before the first gradient
        self._bins, self._middle, self._unit = np.zeros(BINS if self.windows else 0), 0.0, 1.0
        #: Released numbers of rows by class, and what follows from them.
        self.counts, self._class_weight = np.zeros(self.census), np.ones(max(self.census, 1))
        self._gain, self._level, self._shift, self._gap = 1.0, 1.0, 0.0, np.zeros(2)
        self._balance_unit = self.clip_norm * (1 - CLIP_SLACK) / LARGEST
        # Sums of gradients at the answer and of `spread_sum`.
        self._slopes = np.zeros(p + 1)
        self._spread = np.zeros((p + 1) * (p + 2) + 1 if self.spreads else 0)
        self.size = max(self.size, len(self._spread))
        self._theta, self._velocity, self._average = (np.zeros((k, p + 1)) for _ in range(3))
        self._moments = np.zeros(self._columns)
        self._centre, self._scale = np.zeros(p), np.full(p, float(self.length > 0))
        self._count, self._taken = 0, 0
        self.learning_rate, self._row_length = self.rate, self.length

    @property
    def weights(self) -> Array:
        theta = self._answer.copy()
        theta[:, -1] += self._shift
        return self._unscaled(theta)

    def _unscaled(self, theta: Array) -> Array:
        """Weights for rows as they come, from those for standardised ones."""
        coef = theta[:, :-1] * self._scale * self._unit
        intercept = theta[:, -1:] * self._unit + self._middle
        return np.hstack([coef, intercept - coef @ self._centre[:, None]])

    def law(self) -> Law:
        """What is known of the error of the weights, in their own coordinates."""
        q, phase = self.features + 1, self._phase
        m = self._steps - self.spreads - self._descent
        unit = self._deviation
        kept = np.arange(q) < self.features + int(self.fit_intercept)
        own = np.ix_(kept, kept)
        half = q * (q + 1) // 2
        *squares, clipped = np.split(self._spread / self.spreads, [half, 2 * half])
        parts = [unpack_square(v, q)[own] for v in squares]
        answer, ridge = self._answer[0, kept], self._ridge[kept]
        found = law_of(
            np.concatenate([*(pack(part) for part in parts), clipped]),
            q=int(kept.sum()),
            clip=self.clip_norm,
            limit=self._limit,
            outer_limit=self._outer_limit,
            deviation=unit / math.sqrt(self.spreads),
            point=answer,
            gradient=self._slopes[kept] / m + ridge * answer,
            gradient_deviation=self._gain * unit / math.sqrt(m),
            rows=phase.batch_size,
            gain=self._gain,
            ridge=ridge,
        )
        matrix = np.column_stack([self._unscaled(one[None])[0] for one in np.eye(q)])
        return found.mapped(matrix[:, kept])

    def start(self, phase: Phase) -> None:
        self._phase = phase

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        out, there = np.zeros(self.size), np.ones(x.shape[0])
        if weight is not None:
            there *= weight / self.most_weight if self.has_many_rows else weight > 0
        if self._count < self._counting:
            codes = y.astype(np.int64) if self.census > 1 else np.zeros(len(y), dtype=np.int64)
            counts = np.asarray(np.bincount(codes, there, self.census), dtype=np.float64)
            if self.level_power is not None:  # (1, y), y within [0, 1]
                counts = np.append(counts, there @ np.clip(y, 0.0, 1.0)) / math.sqrt(2.0)
            out[: len(counts)] = self.clip_norm * (1 - CLIP_SLACK) * counts
        elif self._count < self._lead_in:
            held = np.bincount(bins_of(y), there, BINS)
            out[:BINS] = self.clip_norm * (1 - CLIP_SLACK) * held
        elif self._count < self._before:
            out[: self._columns] = self._column_sums(x, there)
        elif self.balances and self._count >= self._steps - self.balances:
            out[:2] = self._balance_sum(x, y, weight)
        elif self._count >= self._last:
            rows, residual, bends, clipped = self._residuals(x, y, weight, theta=self._answer)
            rows = np.hstack([rows, np.full((len(y), 1), float(self.fit_intercept))])
            limit = {"clip": self.clip_norm, "limit": self._limit, "outer_limit": self._outer_limit}
            out[: len(self._spread)] = spread_sum(
                rows, residual * rows, bends, **limit, is_clipped=clipped & (there > 0)
            )
        else:
            gradient = self._gradient(x, y, weight)
            out[: gradient.size] = gradient.ravel()
        return out

    @property
    def _steps(self) -> int:
        """Readings of this rule."""
        return self._phase.plan.steps - self.lead

    @property
    def _last(self) -> int:
        """Readings before the first that is about curvature."""
        return self._steps - self.spreads if self.spreads else self._count + 1

    @property
    def _descent(self) -> int:
        """Readings until the descent ends; for intervals it has half of the gradients."""
        if not self.spreads:
            return self._count + 1
        return self._before + (self._steps - self._before - self.spreads + 1) // 2

    @property
    def _answer(self) -> Array:
        return self._average / self._taken if self._taken else self._theta

    @property
    def _limit(self) -> float:
        """Curvature of a row up to which it counts in full."""
        most = self.loss.curvature() or 1.0
        return self.most_weight * reach(self.features) * most * min(1.0, 3.0 * self._level)

    @property
    def _outer_limit(self) -> float:
        """Squared gradient up to which a row counts in full: no more than clipping leaves, nor than
        a bounded slope, or the curvature where there is none, lets expect."""
        slope = self.loss.lipschitz(self.outputs)
        most = (self.most_weight * free_clip(slope, self.features)) ** 2
        return min(self.clip_norm**2, most if self.loss.is_classifier else 2.0 * self._limit)

    def _gradient(self, x: Any, y: Targets, weight: Array | None) -> Array:
        theta = self._theta if self._count < self._descent else self._answer
        rows, residual, *_ = self._residuals(x, y, weight, theta=theta)
        gradient = np.zeros_like(self._theta)
        gradient[:, :-1] = (rows.T @ residual).T
        gradient[:, -1] = residual.sum(axis=0) if self.fit_intercept else 0.0
        return gradient

    def _residuals(
        self, x: Any, y: Targets, weight: Array | None, *, theta: Array
    ) -> tuple[Any, Array, Array, Any]:
        """Standardised rows, clipped residuals, curvatures (for intervals), which are clipped."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows, far = self._standardised(x)
            margins = rows @ theta[:, :-1].T + theta[:, -1]
            if self.windows:
                y = np.asarray((y - self._middle) / self._unit, dtype=np.float64)
            residual = self.loss.residual(margins, y)
            if self.length == 0 and self.loss.is_classifier:
                residual *= 2.0  # at weights of zero they are half of what clipping lets through
            squares, lever = squared_norms(rows) + float(self.fit_intercept), np.ones(len(y))
            if self.spreads:  # long rows weigh less, in gradients and in their curvature alike
                lever = np.minimum(1.0, reach(self.features) / np.maximum(squares, 1.0))
                residual *= lever[:, None]
            norms = np.sqrt(np.einsum("ij,ij->i", residual, residual)) * np.sqrt(squares)
            factor = clip_factor(norms, self.clip_norm / self.most_weight, slack=CLIP_SLACK)
            free = factor == 1.0
            factor = factor if weight is None else factor * weight
            if self.is_balanced:
                factor = factor * self._class_weight[y.astype(np.int64)]
            residual *= factor[:, None]
        far |= ~np.isfinite(residual).all(axis=1)
        residual[far] = 0.0
        bends = np.zeros(0)
        if self.spreads:  # the slope of a clipped row does not change with its margin
            assert isinstance(self.loss, PerMargin)
            phi = self.loss.phi.curvature_fn(margins[:, 0], self.loss.targets(margins, y)[:, 0])
            bends = np.where(free & ~far, phi * factor * lever, 0.0)
        return rows, residual, bends, ~free

    def _standardised(self, x: Any) -> tuple[Any, Any]:
        """Rows as the descent reads them, and which of them are too long for a number."""
        far = np.zeros(x.shape[0], dtype=bool)
        rows = np.zeros((x.shape[0], self.features)) if self.length == 0 else x
        if self.length > 0 and self.readings:
            rows = (x - self._centre) * self._scale
            far = ~np.isfinite(rows).all(axis=1)
            rows[far] = 0.0  # 0·∞ is not 0
        return rows, far

    def _balance_sum(self, x: Any, y: Targets, weight: Array | None) -> Array:
        """What `calibration` needs, a row as long as the clip norm at most."""
        with np.errstate(over="ignore", invalid="ignore"):
            rows, far = self._standardised(x)
            margins = (rows @ self._answer[:, :-1].T)[:, 0] + self._answer[0, -1]
        there = None if weight is None else weight / self.most_weight
        return self._balance_unit * calibration_sum(y, np.where(far, np.nan, margins), there)

    def _column_sums(self, x: Array, there: Array) -> Array:
        with np.errstate(over="ignore"):
            squares = x * x
            norms = np.sqrt(squared_norms(x) + squared_norms(squares))
        factor = clip_factor(norms, self._typical, slack=CLIP_SLACK) * (
            self.clip_norm / self._typical
        )
        squares[~np.isfinite(squares)] = 0.0  # of a row with factor 0
        return np.concatenate([(factor * there) @ x, (factor * there) @ squares])

    @property
    def _typical(self) -> float:
        return TYPICAL * math.sqrt(self.features)

    def update(self, mean: Array, *, step: int) -> None:
        self._count += 1
        if self._count <= self._counting:
            self._take_census(mean * (self._phase.batch_size * self._share / self.clip_norm))
            return
        if self._count <= self._lead_in:
            self._bins += mean[:BINS] * (self._phase.batch_size * self._share / self.clip_norm)
            if self._count == self._lead_in:
                self._find_window()
            return
        if self._count <= self._before:
            unit = self._filled * self._share * self._typical / self.clip_norm
            self._moments += mean[: self._columns] * unit
            if self._count == self._before:
                self._standardise()
            return
        if self.balances and self._count > self._steps - self.balances:
            self._gap = self._gap + mean[:2] / (self.balances * self._balance_unit)
            if self._count == self._steps:
                noise = self._deviation / (self._balance_unit * math.sqrt(self.balances))
                self._shift = growth(self._gap, intercept=self._answer[0, -1], deviation=noise)
            return
        if self.spreads and self._count > self._last:
            self._spread += mean[: len(self._spread)]
            return
        gradient = mean[: self._theta.size].reshape(self._theta.shape) * self._gain
        if self._count > self._descent:
            self._slopes = self._slopes + gradient[0]
            return
        if self.eases and self._count == self._before + 1:
            self.learning_rate = self.rate * eased(self._rarer_share(float(gradient[0, -1])))
        rate, own = self.learning_rate, self._ridge
        gradient += own * self._theta
        gradient[:, -1] *= float(self.fit_intercept)
        self._velocity = MOMENTUM * self._velocity + gradient
        # Steps along a column are shorter where its penalty is so large that they would diverge.
        move = self._velocity
        if not (self.loss.is_classifier or self.spreads):
            move = move * np.append(np.full(self.features, self._visible_share()), 1.0)
        self._theta = self._theta - rate / np.maximum(1.0, rate * own) * move
        if 2 * (self._count - self._before) > self._descents:
            self._average, self._taken = self._average + self._theta, self._taken + 1

    def _visible_share(self) -> float:
        """What of the velocity along columns is no noise."""
        squares = (1 - MOMENTUM ** (2 * (self._count - self._before))) / (1 - MOMENTUM**2)
        deviation = self._gain * self._deviation * math.sqrt(squares)
        return kept_share(self._velocity[:, :-1], deviation)

    @property
    def _descents(self) -> int:
        """Gradient steps."""
        end = self._descent if self.spreads else self._steps - self.balances
        return end - self._before

    @property
    def _deviation(self) -> float:
        """Of the noise of an entry of a released mean."""
        return self._phase.plan.noise_multiplier * self.clip_norm / self._phase.batch_size

    def _rarer_share(self, intercept: float) -> float:
        """Of two classes, from the intercept of the gradient at zero."""
        length = math.hypot(1.0, self._row_length)
        most = min(0.5, self.clip_norm / (self.most_weight * length))
        return 0.5 * (1.0 - abs(intercept) / most)

    @property
    def _ridge(self) -> Array:
        """Strength of the penalty along standardised columns; the intercept has none."""
        return np.append(self.ridge * self._scale**2, 0.0)

    @property
    def _share(self) -> float:
        """What counts and sums of columns were divided by, so that a unit adds at most one row."""
        return self.most_weight if self.has_many_rows else 1.0

    @property
    def _filled(self) -> float:
        """Rows for each row that was counted; between 1 and 10 (1,000 where units have several)
        whatever the noise says."""
        if not self.census:
            return 1.0
        rows = float(self._phase.batch_size)
        least = 0.1 * rows
        if self.has_many_rows:  # of units with a hundred rows each, one counts
            least = min(least, max(1e-3 * rows, 4.0 * self._phase.plan.noise_multiplier))
        return rows / min(max(float(self.counts.sum()), least), rows)

    def _take_census(self, sums: Array) -> None:
        deviation = self._phase.plan.noise_multiplier * self._share
        sums = sums if self.level_power is None else math.sqrt(2.0) * sums
        self.counts = counts = sums[: self.census].copy()
        self._gain = self._filled
        if self.level_power is not None:
            rows = self._phase.batch_size / self._filled
            level = min(max(float(sums[self.census]), 4.0 * deviation, 1e-6 * rows) / rows, 1.0)
            self._theta[:, -1] = math.log(level) * float(self.fit_intercept)
            self._gain, self._level = self._gain * min(level**-self.level_power, MOST_GAIN), level
        if self.is_balanced:
            kept = np.maximum(counts, max(2.0 * deviation, 1.0))
            self._class_weight = kept.min() / kept
            self._gain *= min(float(kept.mean() / kept.min()), MOST_GAIN)

    def _find_window(self) -> None:
        """Where the targets are, from what was released."""
        noise = self._phase.plan.noise_multiplier * self._share / math.sqrt(self.windows)
        rows = self._phase.batch_size / self._filled
        self._middle, self._unit = window(
            self._bins / self.windows, rows=rows, deviation=noise, worth=self.worth
        )

    def _standardise(self) -> None:
        """Centre and scale of the columns from what was released."""
        mean, square = np.split(self._moments / self.readings, 2)
        noise = self._phase.plan.noise_multiplier * self._typical * self._share
        noise *= self._filled / (self._phase.batch_size * math.sqrt(self.readings))
        if self.fit_intercept:
            self._centre = shrunk(mean, noise)
        variance = np.maximum(square - self._centre**2, 0.0) + 2.0 * noise + _FLOOR
        self._scale = self.length / (np.sqrt(variance) * math.sqrt(self.features))
        # The floor leaves rows too short for the clip norm: all columns grow by one factor.
        likely = np.maximum(shrunk(square - self._centre**2, noise), 0.0)
        found = math.sqrt(self._scale**2 @ likely)
        stretch = min(max(self.length / max(found, 1e-9), 1.0), MOST_STRETCH)
        self._scale, self._row_length = self._scale * stretch, found * stretch
