"""The best restart of a tree, and whether to complete trees before they restart.

A tree over all epochs pays for a unit's participations in every common node, Σ_nodes (count)²; one
that restarts after r epochs pays less and carries the noise of finished trees along. Completion
(Kairouz et al., arXiv 2103.00039, appendix D) goes on with virtual steps up to a power of two, so
that one root is carried instead of several nodes, and pays for that root. Which r is best has no
formula: all divisors of the number of epochs are compared by error × sensitivity, both exact. Where
a unit may come at any step after its separation, powers of two are compared too: such a tree is
complete without virtual steps.

>>> from noshuffle.participation import Epochs
>>> found = fit_tree(Epochs(epochs=20, steps_per_epoch=240))
>>> found.strategy.restart_every, found.strategy.completion, round(found.objective, 1)
(480, True, 30.4)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from noshuffle.participation import Epochs, MinSeparation, Participation, Restarted
from noshuffle.strategies.fit_forms import Fit, cost, layout
from noshuffle.strategies.tree import Tree, tree
from noshuffle.strategies.workload import Workload, prefix

#: Longest run whose options are compared on a workload other than prefix sums.
COMPARED_STEPS = 2**14
#: Options under MinSeparation that are compared by their tight value.
SEARCHED = 3


def fit_tree(
    participation: Participation,
    *,
    variant: str = "honaker",
    restart_every: int | None = None,
    completion: bool | None = None,
    workload: Workload | None = None,
    tree_accounting: str = "tight",
) -> Fit:
    """The tree with the least rms error × sensitivity among what is left open.

    `restart_every` counts steps; all of them means one tree. Without it restarts fall on whole
    epochs (or separations), at divisors of their number, or for MinSeparation on powers of two.
    Options are compared on the workload itself. Where that takes long (the full variant, very long
    runs) the rms error of prefix sums, a closed form, decides.

    Guarantees: never worse than the first option, the tree without restart where that was open.
    """
    workload = workload or prefix()
    options = list(_options(participation, variant, restart_every, completion))
    measure = partial(cost, participation=participation, tree_accounting=tree_accounting)
    first = Fit(options[0], measure(options[0], workload=workload), True)
    if len(options) == 1:
        return first
    is_quick = variant != "full" and participation.steps <= COMPARED_STEPS
    ranked = workload if is_quick else prefix()
    if isinstance(participation, MinSeparation) and len(options) > SEARCHED:
        # Searches take long: only what is best by the node count is searched for its tight value.
        count = partial(cost, participation=participation, tree_accounting="nodes")
        options.sort(key=partial(count, workload=ranked))
        options = options[:SEARCHED]
    found = min(options, key=partial(measure, workload=ranked))
    ends = (Fit(found, measure(found, workload=workload), True), first)
    return min(ends, key=lambda fit: fit.objective)


def _options(
    participation: Participation, variant: str, every: int | None, completion: bool | None
) -> Iterator[Tree]:
    restarts: list[int | None]
    if isinstance(participation, Restarted):
        restarts = [every or participation.every]
    elif every is not None:
        restarts = [every if every < participation.steps else None]
    else:
        restarts = [None, *_restarts(participation)]
    for restart in restarts:
        if restart is not None:
            for is_completed in (False, True) if completion is None else (completion,):
                yield tree(variant, restart, is_completed)
        elif not completion or every is not None:
            yield tree(variant)
        elif len(restarts) == 1:
            yield tree(variant, completion=True)  # refused there: nothing restarts


def _restarts(participation: Participation) -> Iterator[int]:
    """Whole epochs at divisors of their number, fewer than all of them; powers of two."""
    if not isinstance(participation, Epochs | MinSeparation):
        return
    n, separation, _ = layout(participation)
    rounds = -(-n // separation)
    for count in range(1, rounds):
        if rounds % count == 0:
            yield count * separation
    if isinstance(participation, MinSeparation):
        yield from (1 << e for e in range(4, (n - 1).bit_length()) if (1 << e) * 4 > separation)
