"""Certified lower bounds for long runs: prefix sums over 10⁵ steps, or epochs of many steps.

With the certificates U of `lower_bound` (tr(UX) ≤ sensitivity² for every encoder, X = CᵀC),

    √n · rms · sensitivity ≥ ‖A U^{1/2}‖_tr = tr H^{1/2},      H = U^{1/2} AᵀA U^{1/2}.

For prefix sums A⁻¹ = D is a difference, and U joins only the steps j, j+g, j+2g, … of one pattern:
block diagonal, one k×k block U_j for every place j of an epoch. No eigenvalue is needed, since

    √x = (2/π) ∫ x eˢ/(x + e²ˢ) ds    and so    tr H^{1/2} = (2/π) ∫ eˢ tr(U (U + e²ˢ DDᵀ)⁻¹) ds,

where U + t²DDᵀ is a ring of b blocks with its neighbours: O(b·k³) for every s. The sum over a grid
of step h replaces √x by √x·(h/π) Σ_i sech(ih − u), whose Poisson sum is at most √x·(1 + η),

    η = 2 Σ_{m≥1} sech(π²m/h),

for every x. Terms are positive, and a term at distance ih outside the grid is at least e^{−ih} of
the last one inside, on either side, so the first and the last count 1 + 1/(eʰ − 1) times. Divided
by 1 + η the sum is a bound, whatever the spectrum (derivation ours). The same blocks give X and so
the ascent w ← w·g^1.6 of `lower_bound`, from weights of a short run, interpolated over the places.

Rounding. DDᵀ is the Laplacian of the path of steps with its last step grounded, so elimination can
go by parallel sums E : t²I = (E⁻¹ + t⁻²I)⁻¹, in which nothing is subtracted: a relative error of E
(in the order of semidefinite matrices) is passed on, never enlarged. Each sum adds what rounding
makes of one solve, 4k·2⁻⁵³ times the condition number of E, and that is taken off.

>>> from noshuffle.participation import Epochs
>>> round(long_bound(Epochs(epochs=4, steps_per_epoch=64)).bound, 2)
5.2
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from noshuffle.errors import Unsupported, whole
from noshuffle.participation import Participation
from noshuffle.strategies.fit_forms import layout
from noshuffle.strategies.lower_bound import POWER, several_weights, sign_correlations, solve_single
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.workload import prefix

#: Step of the grid over s; η is then 8e-6.
STEP = 0.75
#: Steps of the short run whose weights are interpolated, for one participation and for several.
SHORT_SINGLE, SHORT_SEVERAL = 1024, 240
#: Largest run, and most participations of one unit.
MOST_STEPS, MOST_TURNS = 2 * 10**6, 64
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Certificate:
    """A bound on rms × sensitivity of `steps` steps, and the weights that certify it.

    weights[r, j]: share of the pattern that starts at place j, with signs of correlation SIGNS[r].
    """

    steps: int
    turns: int
    weights: Array
    bound: float

    def block(self, place: int) -> Array:
        """U_j of one place: what a check by other means is made from."""
        signs = sign_correlations(self.turns)[: len(self.weights)]
        return np.asarray(np.einsum("r,rlm->lm", self.weights[:, place], signs))


def long_bound(participation: Participation, *, rounds: int = 3) -> Certificate:
    """A certificate for prefix sums over a long run; `rounds` steps of ascent sharpen it.

    Guarantees: `bound` is valid for every encoder, whatever `rounds` is. Patterns have equal gaps
    g = ⌊n/k⌋, at least the separation; the n − kg last steps are left out, which is valid, too.
    """
    whole(at_least=0, rounds=rounds)
    n, _, k = layout(participation)
    if n > MOST_STEPS or k > MOST_TURNS:
        raise Unsupported(
            f"lower bounds are computed for at most {MOST_STEPS:,} steps and {MOST_TURNS} "
            f"participations, got {n:,} and {k}"
        )
    places = n // k
    weights = _interpolated(k, places)
    best = Certificate(n, k, weights, 0.0)
    for attempt in range(rounds + 1):
        total, X = traces(weights, turns=k, is_last=attempt == rounds)
        bound = total / math.sqrt(n)
        if bound > best.bound:
            best = Certificate(n, k, weights, bound)
        if X is not None:
            gain = np.einsum("jlm,rlm->rj", X, sign_correlations(k)[: len(weights)])
            weights = weights * (gain / np.sum(weights * gain)) ** POWER
            weights /= weights.sum()
    return best


def _interpolated(turns: int, places: int) -> Array:
    """Weights of a short run of the same shape, spread over the places of the long one."""
    if turns == 1:
        short = solve_single(min(places, SHORT_SINGLE), workload=prefix(), tolerance=2e-3)[0]
        known = short.weights[None]
    else:
        known = several_weights(min(places, max(4, SHORT_SEVERAL // turns)), turns=turns)
    ends = (np.arange(known.shape[1]) + 0.5) / known.shape[1]
    at = (np.arange(places) + 0.5) / places
    spread = np.array([np.exp(np.interp(at, ends, np.log(row + 1e-12))) for row in known])
    return np.asarray(spread / spread.sum())


def traces(weights: Array, *, turns: int, is_last: bool) -> tuple[float, Array | None]:
    """A lower bound of tr H^{1/2} for these weights, and the blocks of X unless it is the last."""
    n = turns * weights.shape[1]
    sizes = weights.sum(axis=0)
    # About where roots of eigenvalues of H begin and end; the bound holds for any range.
    low = 0.5 * math.log(sizes.min() / 4) - 4
    high = 0.5 * math.log(sizes.max() * turns * n * n) + 2
    s = np.arange(low, high, STEP)
    t2, measure = np.exp(2 * s), (2 * STEP / math.pi) * np.exp(s)
    measure[[0, -1]] *= 1 + 1 / math.expm1(STEP)
    U = np.einsum("rj,rlm->jlm", weights, sign_correlations(turns)[: len(weights)])
    if turns == 1:
        diagonal, slack = _line(sizes, t2)[:, :, None, None], np.full(len(t2), 8 * n * _UNIT)
    else:
        diagonal, slack = _ring(U, t2)
    each = np.einsum("jlm,sjml->s", U, diagonal) * np.maximum(1 - slack, 0.0)
    eta = 2 * sum(1 / math.cosh(math.pi**2 * m / STEP) for m in (1, 2, 3)) + 1e-15
    total = float(measure @ each) / (1 + eta)
    X = None if is_last else np.einsum("s,sjlm->jlm", measure, diagonal)
    return total, X


def _line(sizes: Array, t2: Array) -> Array:
    """Diagonals of (diag(u) + t²DDᵀ)⁻¹ for every t: sums from both ends of the path."""
    n = len(sizes)
    ahead, back = np.empty((n, len(t2))), np.empty((n, len(t2)))
    passed = np.zeros(len(t2))
    for j in range(n):
        ahead[j] = sizes[j] + passed
        passed = t2 * ahead[j] / (t2 + ahead[j])
    passed = t2  # the last node has an edge to one that is fixed at zero
    for j in range(n - 1, -1, -1):
        back[j] = passed
        total = sizes[j] + passed
        passed = t2 * total / (t2 + total)
    return np.asarray((1 / (ahead + back)).T)


def _ring(blocks: Array, t2: Array) -> tuple[Array, Array]:
    """Diagonal blocks of (U + t²DDᵀ)⁻¹ for every t, and the relative error that rounding may make.

    Places 0 … b−1 are a ring, the last one of an epoch being next to the first one of the next
    epoch. Folded (place i with b−1−i) it is a chain of blocks of 2k, summed up from both ends.
    """
    b, k = blocks.shape[:2]
    pairs = [(i, b - 1 - i) if i < b - 1 - i else (i,) for i in range((b + 1) // 2)]
    count, one = len(pairs), np.eye(k)
    least = float(np.linalg.eigvalsh(blocks)[:, 0].min()) - 1e-14 * float(np.abs(blocks).max())
    least = max(least, 1e-300)
    slack, t = np.zeros(len(t2)), t2[:, None, None]

    def own(i: int) -> Array:
        """U of a pair, and the edges within it."""
        size = k * len(pairs[i])
        out, edges = np.zeros((len(t2), size, size)), np.zeros((size, size))
        for slot, place in enumerate(pairs[i]):
            cut = slice(slot * k, (slot + 1) * k)
            out[:, cut, cut] = blocks[place]
        if i == 0:  # (l, b − 1) comes before (l + 1, 0); the last step is grounded
            before = np.eye(k, size, k=size - k)
            edge = before - np.eye(k, size, k=1)
            edge[k - 1] = before[k - 1]
            edges += edge.T @ edge
        if i == count - 1 and size == 2 * k:  # its two places are neighbours
            edges += np.block([[one, -one], [-one, one]])
        return out + t * edges

    def passed(E: Array, floor: Array, scale: float = 1.0) -> Array:
        """E : scale·t²I, what is left behind an edge to every entry; E ≥ floor·I."""
        nonlocal slack
        norm = np.abs(E).sum(axis=-1).max(axis=-1)
        slack += 4 * E.shape[-1] * _UNIT * norm / floor
        found = np.linalg.solve(scale * t * np.eye(E.shape[-1]) + E, scale * t * E)
        return np.asarray((found + found.transpose(0, 2, 1)) / 2)

    # What every eigenvalue of E is above after so many sums: all blocks are above `least`.
    floors = [np.full(len(t2), least)]
    for _ in range(count):
        floors.append(least + t2 * floors[-1] / (t2 + floors[-1]))

    both = np.concatenate([one, one])  # an odd ring ends in one place, next to both of a pair
    ahead = [own(0)]
    for i in range(1, count):
        more = passed(ahead[-1], floors[i - 1])
        if len(pairs[i]) == 1:
            more = both.T @ more @ both
        ahead.append(own(i) + more)
    out = np.empty((len(t2), b, k, k))
    behind: Array = np.zeros_like(ahead[-1])
    for i in range(count - 1, -1, -1):
        inverse = np.linalg.inv(ahead[i] + behind)
        for slot, place in enumerate(pairs[i]):
            cut = slice(slot * k, (slot + 1) * k)
            out[:, place] = inverse[:, cut, cut]
        if i:
            rest = own(i) + behind
            if len(pairs[i]) == 2:
                behind = passed(rest, floors[count - 1 - i - b % 2])
            else:
                differ = np.block([[one, -one], [-one, one]])
                behind = t * differ / 2 + both @ passed(rest, floors[0], 2.0) @ both.T / 4
    return out, slack
