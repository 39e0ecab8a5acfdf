"""How often full-batch descent reads a table, and how far it steps, from public numbers alone.

Noise of a step is √T/(nμ) in a coordinate, so R = nμ/√(p + 1) says how many steps are worth their
noise. Where the noise hides every column, nothing but the intercept is learned, in one step: the
most frequent class is the better answer then. With s ≈ T/9 readings of the columns,

    classes      R < 1: the intercept;  R < 5: T = 4, s = 0 (means of columns would be noise);
                 beyond, T = R/2 within [4, 64];   η = 4 for logistic losses, 1 for hinges
    regression   R < 3 or nμ < 9: the intercept;  beyond, T = R within [8, 64], of which the first
                 are for the intercept (`mean_first`),  η = R/100 within [0.1, 0.2]

Where a class is rare, gradients of logistic losses are smaller and their noise is not: for 15 ≤ R
< 200 two classes with a share π̂ of the rarer one have η = 4·max(2π̂, ¼), π̂ being read off the first
released gradient (`rarer_share`), at no cost. For the same reason K > 2 classes have
η = 4·max(2/K, ¼) for 40 ≤ R < 200. (`convex_rule.py --task rare`; hinges were worse for it.) Where
π̂ < 0.15 (and its deviation), the most frequent class is hard to beat and easily lost by noise: from
R = 5 on steps are shorter and follow what of a velocity is no noise (`shrinkage`), as those of
regressions do.

Noise of a vertex that is chosen costs ln p instead of √p: two classes of a table of 1,000 columns
and more are learned by private Frank–Wolfe on the unit l1 ball (`takes_vertices`) where R is small
and nμ/ln 2p is not. It finds a few columns that matter; where all of them do, little is to be had
there by either.

Steps, rates and limits were chosen by simulation on synthetic tables (benchmarks/convex_rule.py
prints one), those below R = 5 on breast cancer, digits and a few hundred rows of Bank, Adult and
Elec2 at ε = 0.1; ρ = 3, β, C and that columns are standardised at all while looking at tables of
benchmarks/RESULTS.md, too. All of it moves accuracy, never privacy. No state.

>>> steps_for(rows=10_000, columns=20, mu=0.25)
Schedule(steps=64, readings=7, length=3.0, rate=1.0, eases=False, means=0)
>>> steps_for(rows=100, columns=30, mu=0.03)
Schedule(steps=1, readings=0, length=0.0, rate=1.0, eases=False, means=0)
"""

from __future__ import annotations

import math
from typing import NamedTuple

from noshuffle.convex.mean_first import hides_mean

#: Length of a standardised row beside its constant; step size of logistic losses.
LENGTH, LOGISTIC_RATE = 3.0, 4.0
FEWEST, MOST = 4, 64
#: R below which only the intercept is learned: of classes, of regressions.
HIDDEN, HIDDEN_NUMBERS = 1.0, 3.0
#: R below which classes are learned from columns as they are.
UNSCALED = 5.0
#: R from which on steps are shorter for a rare class of two, for many classes; R up to which.
RARE, MANY, CALM = 15.0, 40.0, 200.0
#: Share of the rarer class below which steps follow what is no noise.
SCARCE = 0.15
#: The least share of their length.
SHORTEST = 0.25
#: Columns from which on vertices are considered, R up to which, and nμ/ln 2p from which on.
WIDE, CROWDED, AUDIBLE = 1000, 30.0, 12.0
#: The l1 ball of such a fit: the direction decides about classes, and small balls need few steps.
WIDE_RADIUS = 1.0


class Schedule(NamedTuple):
    """Gradient steps, readings of the columns before them, length of a standardised row.

    `eases`: whether steps follow the share of the rarer class (`easing`); `means`: so many of the
    first steps move the intercept alone (0: it is as any other coordinate).
    """

    steps: int
    readings: int
    length: float
    rate: float
    eases: bool = False
    means: int = 0


def steps_for(
    *,
    rows: int,
    columns: int,
    mu: float,
    rate: float | None = 1.0,
    fit_intercept: bool = True,
    is_sparse: bool = False,
    classes: int = 0,
) -> Schedule:
    """The schedule of the docstring, from public numbers; rate=None is a regression.

    `classes` are those of a logistic loss (0: another loss).
    """
    worth = rows * mu / math.sqrt(columns + 1)
    is_hidden = worth < (HIDDEN_NUMBERS if rate is None else HIDDEN)
    if fit_intercept and (is_hidden or (rate is None and hides_mean(rows * mu))):
        return Schedule(1, 0, 0.0, rate or 1.0)
    if rate is not None and worth < UNSCALED:
        return Schedule(FEWEST, 0, LENGTH, rate)
    if rate is None:
        steps, rate = int(min(max(worth, 2 * FEWEST), MOST)), min(max(worth / 100, 0.1), 0.2)
    else:
        steps = int(min(max(worth / 2, FEWEST), MOST))
    if classes > 2 and MANY <= worth < CALM:
        rate *= eased(1 / classes)
    eases = classes == 2 and UNSCALED <= worth < CALM and fit_intercept and not is_sparse
    readings = 0 if is_sparse else max(1, round(steps / 9))
    return Schedule(steps, readings, LENGTH, rate, eases)


def eased(share: float) -> float:
    """What the step size is multiplied by where the rarer class has this share.

    >>> eased(0.5), eased(0.25), eased(0.01)
    (1.0, 0.5, 0.25)
    """
    return min(max(2.0 * share, SHORTEST), 1.0)


def rarer_share(intercept: float, *, length: float, clip_norm: float) -> float:
    """Share of the rarer of two classes, from the intercept of the released gradient at θ = 0.

    Every residual is ±½ there, so that it is π̂ = ½(1 − |ḡ|/min(½, c/‖(x', 1)‖)), up to noise and
    with the root mean square of ‖x'‖ by what was released, `length`.

    >>> rarer_share(0.25, length=0.0, clip_norm=1.0)
    0.25
    """
    return 0.5 * (1.0 - abs(intercept) / min(0.5, clip_norm / math.hypot(1.0, length)))


def easing(share: float, *, worth: float, deviation: float = 0.0) -> tuple[float, bool]:
    """What the step size of two classes is multiplied by at this R, and whether steps follow what
    is no noise: where the share of the rarer one may be small, with noise of this deviation.

    >>> easing(0.05, worth=6.0), easing(0.25, worth=6.0), easing(0.25, worth=20.0)
    ((0.25, True), (1.0, False), (0.5, False))
    """
    is_scarce = share < SCARCE + deviation
    return eased(share) if is_scarce or worth >= RARE else 1.0, is_scarce


def takes_vertices(*, rows: int, columns: int, mu: float) -> bool:
    """Whether two classes are learned by chosen vertices; see the docstring.

    >>> [takes_vertices(rows=2000, columns=p, mu=0.25) for p in (100, 10_000)]
    [False, True]
    """
    is_crowded = columns >= WIDE and rows * mu < CROWDED * math.sqrt(columns + 1)
    return is_crowded and rows * mu >= AUDIBLE * math.log(2 * columns)
