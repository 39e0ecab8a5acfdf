"""Every recipe as one kind of step: which past draws and buffers make the noise of step t.

With model-sized buffers S_b, a step of any mechanism is one `StepPlan`,

    u = Σ_draws w·z_row        v = u + Σ_inner c·S_b        y = gain·v + Σ_outer d·S_b
    S_b ← θ_b·S_b + u  for all b  (decays)        or        S_store ← v

with the buffers read before they are written. Draws come in the order of their rows. The last one
is new in this step wherever C is invertible, and the bits that its words have to spare decide how
the noisy value is rounded (`grid`); a step that draws nothing has one draw of weight zero. What
each recipe puts in:

    FeedForward   draws z_{t−p} … z_t                                        no buffer
    Recursive     inner: past x in a ring of p−1 slots; store: the oldest    p−1 buffers
    Buffered      draws: the taps, by draw scale; inner: ω; decays: θ        d buffers
    Forest        one buffer per height, see `_forest`                       ⌈log₂ block⌉ buffers
    Rows          draws z_0 … z_t                                            no buffer

Nothing here is accumulated over time but the buffers themselves, and in a forest not even those:
the noise of a step is the new node minus the nodes it replaces, never the difference of totals.

>>> StepPlans.of(FeedForward(weights=(1.0, -1.0))).at(5)
StepPlan(draws=((4, -1.0), (5, 1.0)), inner=(), gain=1.0, outer=(), store=-1, decays=())
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from noshuffle.errors import InvalidInput, one_of
from noshuffle.noise import grid
from noshuffle.strategies.recipe import (
    Buffered,
    FeedForward,
    Forest,
    Recipe,
    Recursive,
    Rows,
)

Pairs = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class StepPlan:
    """The numbers of one step; see the module's equations."""

    draws: Pairs
    inner: Pairs = ()
    gain: float = 1.0
    outer: Pairs = ()
    store: int = -1
    decays: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepPlans:
    """A recipe made ready to run: the longest horizon, the buffers, and the plan of each step."""

    horizon: int | None
    buffers: int
    at: Callable[[int], StepPlan]

    @staticmethod
    def of(recipe: Recipe) -> StepPlans:
        """Read a recipe. `horizon` is None when the recipe itself sets no limit."""
        if isinstance(recipe, FeedForward):
            return StepPlans(len(recipe.scale) or None, 0, lambda t: _feed_forward(recipe, t))
        if isinstance(recipe, Recursive):
            slots = len(recipe.weights) - 1
            return StepPlans(len(recipe.scale) or None, slots, lambda t: _recursive(recipe, t))
        if isinstance(recipe, Buffered):
            lengths = [len(part) for part in (recipe.scale, recipe.draw_scale) if part]
            horizon = min(lengths, default=None)
            return StepPlans(horizon, len(recipe.decays), lambda t: _buffered(recipe, t))
        if isinstance(recipe, Rows):
            return StepPlans(recipe.matrix.shape[0], 0, lambda t: _rows(recipe, t))
        if isinstance(recipe, Forest):
            one_of(("plain", "honaker"), variant=recipe.variant)
            block = min(recipe.block or recipe.steps, recipe.steps)
            return StepPlans(recipe.steps, (block - 1).bit_length(), lambda t: _forest(recipe, t))
        raise InvalidInput(f"expected a recipe of noshuffle.strategies.recipe, got {recipe!r}")


def grid_of(plan: StepPlan, *, scale: float) -> float:
    """The step of the grid (`grid`) of one step, from the weight of its newest draw."""
    return grid.grid_step(abs(scale * plan.gain * plan.draws[-1][1]))


def rows_used(plans: StepPlans, steps: int) -> int:
    """One more than the largest row that steps 0 … steps−1 draw with a weight other than zero.

    Step s draws rows up to s, or, in a forest, rows beyond s that no earlier step has reached. So
    the search goes back from the last step and ends where the steps before can add nothing.
    """
    largest, step = -1, steps - 1
    while step > largest:
        largest = max([largest, *(row for row, weight in plans.at(step).draws if weight)])
        step -= 1
    return largest + 1


def _gain(scale: tuple[float, ...], t: int) -> float:
    return scale[t] if scale else 1.0


def _drawn(draws: Iterable[tuple[int, float]]) -> Pairs:
    """Draws in the order of their rows, at least one."""
    return tuple(sorted(draws)) or ((0, 0.0),)


def _feed_forward(recipe: FeedForward, t: int) -> StepPlan:
    draws = [(t - i, w) for i, w in enumerate(recipe.weights[: t + 1]) if w]
    return StepPlan(_drawn(draws), gain=_gain(recipe.scale, t))


def _recursive(recipe: Recursive, t: int) -> StepPlan:
    slots = len(recipe.weights) - 1
    inner = tuple(((t - i) % slots, recipe.weights[i]) for i in range(1, min(slots, t) + 1))
    store = t % slots if slots else -1
    return StepPlan(((t, recipe.weights[0]),), inner, _gain(recipe.scale, t), store=store)


def _buffered(recipe: Buffered, t: int) -> StepPlan:
    scale = recipe.draw_scale
    draws = [(t - lag, w * _gain(scale, t - lag)) for lag, w in recipe.taps if lag <= t and w]
    inner = tuple(enumerate(recipe.scales)) if t else ()
    return StepPlan(_drawn(draws), inner, _gain(recipe.scale, t), decays=recipe.decays)


def _rows(recipe: Rows, t: int) -> StepPlan:
    row = recipe.matrix[t, : t + 1]
    return StepPlan(_drawn((int(r), float(row[r])) for r in np.flatnonzero(row)))


def _forest(recipe: Forest, t: int) -> StepPlan:
    """Step s of a block replaces finished nodes of heights H by one node of height k.

    Before the step there is one node for each bit of s, and S_h holds the value of the one of
    height h. An ordinary step merges the trailing ones of s: H = {0 … k−1}. The last step of a
    completed block goes on with virtual leaves until one root is left: H = all bits of s. Unrolling
    V = fresh + (left + right)/2 gives, over the fresh nodes (height h) that the step completes,

        V_k = Σ_fresh 2^{h−k} z + Σ_{h∈H} 2^{h−k} S_h,     y = weight_k V_k − Σ_{h∈H} weight_h S_h

    with weight_h = 1/(2 − 2^{−h}); the plain tree has V_k = z_k and weights one.
    """
    is_honaker = recipe.variant == "honaker"
    length = recipe.block or recipe.steps
    index, s = divmod(t, length)
    is_last_block = (index + 1) * length >= recipe.steps
    real = recipe.steps - index * length if is_last_block else length
    is_end = s == real - 1
    full = length
    if recipe.completion:
        full = 1 << (length - 1).bit_length()
    base = index * _rows_before(full)
    if is_end and recipe.completion and not is_last_block:
        leaves, merged = range(s, full), [h for h in range(s.bit_length()) if s >> h & 1]
        top = full.bit_length() - 1
    else:
        top = _trailing_ones(s)
        leaves, merged = range(s, s + 1), list(range(top))
    outer = tuple((h, -_weight(h, is_honaker)) for h in merged)
    store = -1 if is_end else top
    if not is_honaker:
        last = leaves[-1]
        return StepPlan(((base + _rows_before(last) + top, 1.0),), outer=outer, store=store)
    draws = tuple(
        (base + _rows_before(leaf) + h, 2.0 ** (h - top))
        for leaf in leaves
        for h in range(_trailing_ones(leaf) + 1)
    )
    inner = tuple((h, 2.0 ** (h - top)) for h in merged)
    return StepPlan(draws, inner, _weight(top, is_honaker), outer, store)


def _weight(height: int, is_honaker: bool) -> float:
    return 1.0 / (2.0 - 2.0**-height) if is_honaker else 1.0


def _rows_before(leaf: int) -> int:
    """Nodes that the leaves before this one complete (`strategies.recipe.forest_rows`; a step stays
    in this file)."""
    return 2 * leaf - leaf.bit_count()


def _trailing_ones(s: int) -> int:
    return (~s & (s + 1)).bit_length() - 1


def fingerprint(recipe: Recipe) -> str:
    """A name of the recipe that two recipes share only if they make the same noise."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(type(recipe).__name__.encode())
    if isinstance(recipe, Rows):
        digest.update(repr(recipe.matrix.shape).encode())
        digest.update(np.ascontiguousarray(recipe.matrix, dtype="<f8").tobytes())
    else:
        digest.update(repr(sorted(vars(recipe).items())).encode())
    return digest.hexdigest()
