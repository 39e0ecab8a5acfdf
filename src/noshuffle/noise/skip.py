"""Many steps of buffered noise in one draw: the exact law of what a skipped stretch adds up to.

One step τ of an untapped `Buffered` recipe, followed by a consumer that only sums, is linear in the
state (S, acc) of one element and in its fresh normal z. With r_τ = rate_τ·scale_τ and the draw
scale d_τ (both one when absent),

    F_τ = [ diag θ   0 ]    g_τ = d_τ·(1, …, 1, r_τ)ᵀ       (S, acc) ← F_τ (S, acc) + g_τ z
          [ r_τ ωᵀ   1 ]

so a stretch [s, t) is (S', acc) = F (S, 0) + L ζ with ζ standard normal of dimension d + 1,
F = F_{t−1} … F_s and L Lᵀ = Q the covariance that the fresh normals build up. Two neighbouring
stretches A, B join to  F = F_B F_A,  Q = F_B Q_A F_Bᵀ + Q_B  (doubling when A = B).

Q itself is never formed: it is singular for stretches of up to d steps. What is joined are the
factors, L = the triangle of the QR decomposition of [F_B L_A, L_B]ᵀ in float64, i.e. the Cholesky
factor of Q with a diagonal >= 0, however badly conditioned Q is.

State kept: without per-step numbers, powers of two of one step and a table by length; with them, a
binary tree over all steps.

>>> skips = Skips.of(Buffered(decays=(0.5,), scales=(-0.25,)), steps=8)
>>> np.round(skips.between(np.array([3]), stop=4), 4)[0]     # one step: S' = θS + z, acc = ωS + z
array([[ 0.5 ,  1.  ,  0.  ],
       [-0.25,  1.  ,  0.  ]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from noshuffle.errors import InvalidInput, Unsupported, whole
from noshuffle.strategies.recipe import Array, Buffered, Recipe

#: Longest stretch whose factors are kept once computed, and most steps with numbers of their own.
KEPT_LENGTHS, MOST_VARIED_STEPS = 2**18, 2**17
#: Lengths are computed in blocks: a multiple of this many steps, and a rest.
_BLOCK = 2**8

Pair = tuple[Array, Array]


@dataclass(frozen=True, eq=False)
class Skips:
    """The maps of stretches of steps; see the module's equations."""

    recipe: Buffered
    steps: int
    levels: tuple[Pair, ...]  # level i: F and L of stretches of 2^i steps
    is_varied: bool
    _table: Array = field(repr=False)
    _is_known: np.ndarray[tuple[int], np.dtype[np.bool_]] = field(repr=False)

    @staticmethod
    def of(recipe: Recipe, *, steps: int, rates: Sequence[float] = ()) -> Skips:
        """Prepare a recipe; `rates` are the consumer's weights of each step's noise (its sums)."""
        whole(steps=steps)
        if not isinstance(recipe, Buffered):
            raise Unsupported(
                f"lazy noise is built for buffered (blt) recipes, got {type(recipe).__name__}; use "
                "a blt without taps, or eager noise"
            )
        taps = [tap for tap in recipe.taps if tap[0] < steps]  # the others draw nothing
        if taps != [(0, 1.0)]:
            raise Unsupported(
                f"lazy noise has no exact skip over taps, got {len(taps) - 1} of them; fit "
                "a blt without taps, or use eager noise"
            )
        given = {"scale": recipe.scale, "draw_scale": recipe.draw_scale, "rates": tuple(rates)}
        for name, values in given.items():
            if values and (len(values) < steps or not np.isfinite(values).all()):
                raise InvalidInput(
                    f"{name} must hold a finite number for each of {steps} steps, got {len(values)}"
                )
        is_varied = any(map(bool, given.values()))
        if is_varied and steps > MOST_VARIED_STEPS:
            raise Unsupported(
                f"lazy noise with gains or rates of single steps is built for at most "
                f"{MOST_VARIED_STEPS:,} steps, got {steps:,}; drop the gains"
            )
        count = steps if is_varied else 1
        one = np.ones(count)
        parts = [np.asarray(v[:count], dtype=np.float64) if v else one for v in given.values()]
        levels = [_one_step(recipe, gain=parts[0] * parts[2], draw=parts[1])]
        while 2 ** len(levels) <= steps:
            f, l = levels[-1]
            if is_varied:
                whole_pairs = len(f) // 2 * 2
                levels.append(_join((f[:whole_pairs:2], l[:whole_pairs:2]), (f[1::2], l[1::2])))
            else:
                levels.append(_join((f, l), (f, l)))
        d = len(recipe.decays)
        slots = 0 if is_varied else min(steps, KEPT_LENGTHS) + 1
        table, is_known = np.empty((slots, d + 1, 2 * d + 1)), np.zeros(slots, dtype=np.bool_)
        return Skips(recipe, steps, tuple(levels), is_varied, table, is_known)

    @property
    def buffers(self) -> int:
        return len(self.recipe.decays)

    def between(self, starts: np.ndarray, *, stop: int) -> Array:
        """For each stretch [start, stop): the (d+1) × (2d+1) matrix [F's columns of S, L]."""
        if self.is_varied:
            return self._walk(starts, stop)
        lengths = stop - np.asarray(starts, dtype=np.int64)
        is_kept = lengths < len(self._table)
        missing = lengths[is_kept][~self._is_known[lengths[is_kept]]]
        if len(missing):
            whole_blocks = np.unique(missing // _BLOCK)[:, None] * _BLOCK + np.arange(_BLOCK)
            wanted = whole_blocks[whole_blocks < len(self._table)]
            self._table[wanted] = self._powers(wanted)
            self._is_known[wanted] = True
        if is_kept.all():
            return np.asarray(self._table[lengths])
        out = np.empty((len(lengths), *self._table.shape[1:]))
        out[is_kept], out[~is_kept] = self._table[lengths[is_kept]], self._powers(lengths[~is_kept])
        return out

    def _powers(self, lengths: np.ndarray) -> Array:
        """Stretches of equal steps: whole blocks, then the rest."""
        blocks, which = np.unique(lengths // _BLOCK, return_inverse=True)
        rests, rest = np.unique(lengths % _BLOCK, return_inverse=True)
        f, l = self._binary(blocks * _BLOCK)
        rest_f, rest_l = self._binary(rests)
        f, l = _join((f[which], l[which]), (rest_f[rest], rest_l[rest]))
        return self._matrix(f, l, lengths)

    def _binary(self, lengths: np.ndarray) -> Pair:
        """Stretches of equal steps: join the powers of two of each length."""
        f, l = self._empty(len(lengths))
        for level, (step_f, step_l) in enumerate(self.levels):
            chosen = lengths >> level & 1 == 1
            if chosen.any():
                f[chosen], l[chosen] = _join((f[chosen], l[chosen]), (step_f, step_l))
        return f, l

    def _walk(self, starts: np.ndarray, stop: int) -> Array:
        """Stretches of differing steps: climb the tree from each start, then descend to stop."""
        at = np.array(starts, dtype=np.int64)
        f, l = self._empty(len(at))
        heights = range(len(self.levels))
        climb = [(level, True) for level in heights] + [(level, False) for level in heights[::-1]]
        for level, is_up in climb:
            chosen = at + 2**level <= stop
            if is_up:
                chosen &= at >> level & 1 == 1
            if chosen.any():
                node = at[chosen] >> level
                after = tuple(part[node] for part in self.levels[level])
                f[chosen], l[chosen] = _join((f[chosen], l[chosen]), (after[0], after[1]))
                at[chosen] += 2**level
        return self._matrix(f, l, stop - starts)

    def _empty(self, count: int) -> Pair:
        size = self.buffers + 1
        return np.tile(np.eye(size), (count, 1, 1)), np.zeros((count, size, size))

    def _matrix(self, f: Array, l: Array, lengths: np.ndarray) -> Array:
        # Q of a stretch of m steps has rank m at most; beyond, the factor holds rounding errors.
        is_beyond = np.arange(self.buffers + 1)[None, :] >= lengths[:, None]
        l = np.where(is_beyond[:, None, :], 0.0, l)
        return np.concatenate([f[:, :, : self.buffers], l], axis=2)


def _one_step(recipe: Buffered, *, gain: Array, draw: Array) -> Pair:
    """F and L of single steps, one for each entry of `gain` and `draw`."""
    d = len(recipe.decays)
    f = np.zeros((len(gain), d + 1, d + 1))
    f[:, range(d), range(d)] = recipe.decays
    f[:, d, :d] = gain[:, None] * np.asarray(recipe.scales)
    f[:, d, d] = 1.0
    l = np.zeros_like(f)
    l[:, :d, 0] = draw[:, None]
    l[:, d, 0] = draw * gain
    return f, l


def _join(before: Pair, after: Pair) -> Pair:
    """First `before`, then `after`; arrays of stretches that broadcast along the first axis."""
    f_a, l_a = before
    f_b, l_b = after
    moved = f_b @ l_a
    wide = np.concatenate([moved, np.broadcast_to(l_b, moved.shape)], axis=2)
    triangle = np.asarray(np.linalg.qr(wide.transpose(0, 2, 1), mode="r"))
    # The decomposition leaves the sign of each row open; fixed here, the factor is unique.
    sign = np.where(np.diagonal(triangle, axis1=1, axis2=2) < 0, -1.0, 1.0)
    factor = np.asarray(triangle * sign[:, :, None], dtype=np.float64)
    return f_b @ f_a, factor.transpose(0, 2, 1)
