"""Dominating pairs of one step on a uniform batch of a fixed size, for each kind of neighbours.

m of n units are drawn without replacement, q = m/n, and noise of deviation z (in clip norms) is
added to the sum of their contributions, each of norm at most one. A batch that has no room for a
unit x holds another one, y, in its place. Let S be a uniform batch of the units other than x and y
uniform in S. The batch of all units is S with probability 1 − q, and else S − y + x. So, given S
and y and counted from the sum of S, with N_v = N(v, z²),

    there          (1−q) N_0 + q N_{x−y}
    removed        N_0                          add-remove: n − 1 units, batches of m all the same
    zeroed out     (1−q) N_0 + q N_{−y}         zero-out: x keeps its place and sends nothing
    replaced       (1−q) N_0 + q N_{x'−y}       replace-one

The hockey-stick H_γ is jointly convex, so its mean over (S, y) bounds that of the step, and what
remains is the worst of x, x' and y for each γ ≥ 0:

    add-remove     x − y as long as can be, two clip norms, for every γ: the Poisson pairs of rate
                   q and noise z/2. Attained: all others send the opposite of x.
    zero-out       γ ≥ 1: y = −x;  γ < 1: y = x. There over zeroed out is
                   (1−q) N_0 + q N_2 over (1−q) N_0 + q N_1, then N_0 over (1−q) N_0 + q N_{−1}.
    replace-one    the Poisson "remove" pair of noise z/2 for γ ≥ 1, "add" for γ < 1.

A `Joined` is one pair with such a curve. The proofs are in docs/proofs.md, "Batches of a fixed
size". Because a pair dominates at every γ a step of any data, its compositions dominate any run
whose steps depend on what was released before; with and without stay the same in all steps, so the
two directions are composed apart.

q belongs to the larger of the two data sets, and grows as n falls. Of `population` units, one may
be removed (q = m/population) or one may be added (q = m/(population + 1), which is less): the rate
m/population covers both. No state.

>>> from noshuffle.accounting import fourier
>>> kinds = ("fixed-zero", "fixed-add-remove", "fixed")
>>> how = {"noise_multiplier": 4.0, "rate": 250 / 60_000, "steps": 4800, "delta": 1e-5}
>>> [round(fourier.epsilon(direction=kind, **how), 3) for kind in kinds]
[0.315, 0.553, 0.65]
"""

from __future__ import annotations

from dataclasses import replace

from noshuffle.accounting.mixture import Joined, Pair, add_pair, remove_pair


def removed_pair(*, noise_multiplier: float, rate: float) -> Pair:
    """Add-remove: the data set with the unit over the one without."""
    return remove_pair(noise_multiplier=noise_multiplier / 2, rate=rate)  # x − y is two clip norms


def added_pair(*, noise_multiplier: float, rate: float) -> Pair:
    """Add-remove: the data set without the unit over the one with it."""
    return removed_pair(noise_multiplier=noise_multiplier, rate=rate).mirrored()


def replaced_pair(*, noise_multiplier: float, rate: float) -> Pair | Joined:
    """Replace-one, either way."""
    over = removed_pair(noise_multiplier=noise_multiplier, rate=rate)
    if rate == 1:
        return over
    return Joined(replace(over, anchor=0.0), replace(over.mirrored(), anchor=0.0))


def zeroed_pair(*, noise_multiplier: float, rate: float) -> Pair | Joined:
    """Zero-out: the unit as it is over the unit that sends nothing."""
    under = add_pair(noise_multiplier=noise_multiplier, rate=rate)
    if rate == 1:
        return under.mirrored()
    over = _opposed(noise_multiplier=noise_multiplier, rate=rate)
    return Joined(over, replace(under, anchor=0.0))


def unzeroed_pair(*, noise_multiplier: float, rate: float) -> Pair | Joined:
    """Zero-out: the unit that sends nothing over the unit as it is."""
    over = remove_pair(noise_multiplier=noise_multiplier, rate=rate)
    if rate == 1:
        return over
    under = _opposed(noise_multiplier=noise_multiplier, rate=rate).mirrored()
    return Joined(replace(over, anchor=0.0), under)


def _opposed(*, noise_multiplier: float, rate: float) -> Pair:
    """A unit and its zero where whoever has its place sends the opposite.

    Counted in two clip norms. The loss is 0 half-way between them, falls a little below that point
    (where a `Joined` does not look) and grows above it.
    """
    pair = remove_pair(noise_multiplier=noise_multiplier / 2, rate=rate)
    lower = ((1 - rate, 0.0), (rate, 0.5))
    return replace(pair, lower=lower, anchor=0.0, within=(0.75, float("inf")))
