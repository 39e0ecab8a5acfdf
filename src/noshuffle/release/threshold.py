"""The clip norm of a run: constant, or following a quantile where that is allowed.

With correlated noise, later noise cancels earlier noise; that works only while both are in units of
the same clip norm. ε does not mind (docs/proofs.md, "A clip norm that moves"), but the sum does: a
threshold moves at every step under independent noise, at the end of a tree where trees restart, and
nowhere else.

The noisy count that steers it is one more Gaussian mechanism (`clipping.adaptive`), and one plan
pays for both: a unit that takes part k times is counted k times, μ_count² = k / (2σ_b)², and the
gradients get the noise z_Δ that leaves the plan's μ as it is,

    S²/z_Δ² + k/(2σ_b)² = S²/z²   ⇔   z_Δ = (z⁻² − (2σ_b·S/√k)⁻²)^(−½),

so the statement is unchanged (Andrew et al. 2021, for k = S = 1). Under sampling gradient and count
are drawn by the same coin, and S = k = 1 for the joint release of a step.

State: the threshold and the estimate.

>>> from noshuffle.participation import Epochs
>>> from noshuffle.strategies import identity
>>> four = Epochs(epochs=4, steps_per_epoch=10)                     # S² = k = 4
>>> plan = Plan(participation=four, strategy=identity(), noise_multiplier=2.0)
>>> bit_noise_for(plan, share=0.25)
2.0
>>> clip = QuantileClip(initial=1.0, units=100, bit_noise=2.0)
>>> round(joint_multiplier(clip, plan, plan), 12)                   # it costs what was planned
2.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from noshuffle.clipping import Clip, ClippedSum, Flat
from noshuffle.clipping.adaptive import (
    BIT_SENSITIVITY,
    QuantileClip,
    QuantileState,
    gradient_multiplier,
    shifted_count,
    start,
    update,
)
from noshuffle.clipping.factor import Groups
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import Source
from noshuffle.noise.source import NumberNoise
from noshuffle.plan import Plan
from noshuffle.release.keys import Keys
from noshuffle.strategies.base import Strategy
from noshuffle.strategies.identity import Identity
from noshuffle.strategies.tree import Tree

#: Not a name that a parameter can have, so the counts have a noise stream of their own.
COUNT = "(clip count)"


@dataclass(frozen=True)
class FixedClip:
    """A clip as it was when the run began, which the noise is made for.

    Guarantees: what happens to the mapping or object behind it later changes nothing.
    """

    limits: Groups
    norm: float

    def groups(self, names: Sequence[str]) -> Groups:
        return self.limits

    def bound(self, names: Sequence[str]) -> float:
        return self.norm


def fixed(clip: Clip, names: Sequence[str]) -> Clip:
    """The clip of these sums; raises where its groups allow more than its bound."""
    if type(clip) is Flat:
        return clip
    limits = [(tuple(own), float(norm)) for own, norm in clip.groups(names)]
    bound, whole = float(clip.bound(names)), math.hypot(*(norm for _, norm in limits))
    if sorted(name for own, _ in limits for name in own) != sorted(names):
        raise InvalidInput(f"{clip!r} must have every parameter in one of its groups, once")
    if not whole <= bound * (1.0 + 1e-9):
        raise InvalidInput(
            f"{clip!r} clips its groups to {whole:g} in all and states a bound of {bound:g}, which "
            "the noise is made for; let bound() be the larger one"
        )
    return FixedClip(limits, bound)


class Threshold:
    """What to clip to in the coming step."""

    #: Whether it moves: sums are brought to units of the clip norm before noise is added, and noisy
    #: counts are paid for out of the plan's budget.
    is_adaptive = False

    #: Of the run, for the noise on counts.
    keys: Keys

    def __init__(self, clip: Clip) -> None:
        self.clip = clip

    def noise_scale(self, plan: Plan, names: tuple[str, ...]) -> float:
        """Standard deviation of one row of noise."""
        return plan.noise_multiplier * self.clip.bound(names)

    def learn(self, clipped: list[ClippedSum], *, step: int) -> None:
        """Take in the norms of a step (nothing to do for a constant)."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class AdaptiveThreshold(Threshold):
    """A threshold that follows a quantile."""

    is_adaptive = True

    def __init__(self, config: QuantileClip, plan: Plan) -> None:
        self._every = changes_every(plan.strategy)
        if not self._every:
            raise Unsupported(
                f"the clip norm may not change under {plan.strategy.name!r}, whose noise is "
                "correlated over the whole run; use a constant clip_norm, identity(), or a tree "
                "with restarts"
            )
        self.config = config
        self._adders: tuple[Source, Callable[[int], NumberNoise]] | None = None
        #: What the norms of the coming step are clipped to and compared with.
        self.state = start(config)

    @property
    def clip(self) -> Clip:  # type: ignore[override]
        return Flat(self.state.threshold)

    def noise_scale(self, plan: Plan, names: tuple[str, ...]) -> float:
        """z_Δ, in units of the clip norm."""
        if COUNT in names:
            raise InvalidInput(f"{COUNT!r} is the name of the counts of norms; use another")
        if plan.noise_multiplier == 0:
            return 0.0
        if self.config.noise <= bit_noise_for(plan, share=1.0):
            how = "units/20 by default" if self.config.bit_noise is None else "as given"
            raise InvalidInput(
                f"the noise on the count of QuantileClip, {self.config.noise:g} ({how}), would "
                "spend the whole budget of this plan; give "
                f"bit_noise={math.ceil(bit_noise_for(plan, share=0.1) * 100) / 100:g}, which "
                "leaves nine tenths of it to the updates"
            )
        ratio = count_ratio(plan)
        return gradient_multiplier(plan.noise_multiplier, bit_noise=self.config.noise * ratio)

    def learn(self, clipped: list[ClippedSum], *, step: int) -> None:
        """Count, add noise, move.

        Guarantees: the count noise of step t is a draw of its own stream. The
        noisy count is on the grid of its noise before anything is made of it, since two thresholds
        give it back to the last bit.
        """
        # Σ over units of (1 if the norm is at most the threshold, else 0) − ½
        count = sum(shifted_count(c.norms, self.state, present=c.present) for c in clipped)
        source = self.keys.source_of_step(step)
        if self._adders is None or self._adders[0] != source:
            self._adders = source, source.adders(name=COUNT, scale=self.config.noise)
        noisy = self._adders[1](step)(count)
        may_change = (step + 1) % self._every == 0  # else the noise of a tree would not cancel
        self.state = update(self.state, noisy, config=self.config, may_change=may_change)

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = QuantileState(float(state["threshold"]), float(state["estimate"]))


def changes_every(strategy: Strategy) -> int:
    """After how many steps a threshold may move under this strategy; 0 for never."""
    if isinstance(strategy, Identity) and not strategy.has_gains:
        return 1
    return (strategy.restart_every or 0) if isinstance(strategy, Tree) else 0


def threshold_for(clip: Clip | QuantileClip, plan: Plan, names: Sequence[str]) -> Threshold:
    """A constant clip, or one that follows a quantile."""
    if isinstance(clip, QuantileClip):
        return AdaptiveThreshold(clip, plan)
    return Threshold(fixed(clip, names))


def count_ratio(plan: Plan) -> float:
    """S/√k; one where a release is sampled."""
    if plan.participation.is_sampled:
        return 1.0
    return math.sqrt(plan.sensitivity.squared / plan.participation.most)


def bit_noise_for(plan: Plan, *, share: float) -> float:
    """The `bit_noise` of counts that take this share of the plan's μ²; more noise takes less."""
    return plan.noise_multiplier * BIT_SENSITIVITY / (count_ratio(plan) * math.sqrt(share))


def joint_multiplier(config: QuantileClip, plan: Plan, held: Plan) -> float:
    """z of one mechanism that costs units of `held` what updates and counts of `plan` cost them.

    The noise was shared out by S/√k of the plan. Units with other limits than planned have another
    ratio, and the share of the counts is another for them.
    """
    own = gradient_multiplier(plan.noise_multiplier, bit_noise=config.noise * count_ratio(plan))
    count = config.noise * count_ratio(held) / BIT_SENSITIVITY
    return float((own**-2 + count**-2) ** -0.5)
