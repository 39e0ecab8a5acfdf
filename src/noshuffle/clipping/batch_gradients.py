"""Whether gradients of a whole batch are made of those of its examples.

    by few    the gradient of some losses is the same where those examples stand alone
    adds up   the gradient of all losses is that of some and that of the others
    moved     the gradient of some losses is the same where all other examples are exchanged

`batch_check` asks, with the losses of the same rows. A backward pass that looks at other rows, at
their number or at the size of their gradients is seen here only. No state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from noshuffle.clipping.layers import Mixes
from noshuffle.clipping.objective import Batch, take
from noshuffle.clipping.rule_check import joined, length
from noshuffle.clipping.trial_rows import of_rounded
from noshuffle.clipping.trial_runs import TrialRuns


def same_by_few(
    run: TrialRuns,
    rows: Batch,
    kept: Tensor,
    grads: Sequence[Tensor | None],
    *,
    seed: int,
    low: bool,
) -> None:
    """Raise unless the examples that were kept have their gradient without the others.

    Batches of other sizes go through other kernels, so there is more room for rounding.
    """
    few, share = take(rows, kept), 0.2 if low else 5e-2
    alone = run.gradient(run(few, seed), seed)

    def rounding() -> float:
        return length(alone, run.gradient(of_rounded(partial(run, seed=seed), few), seed))

    if _is_beyond(length(grads, alone), share * length(grads), rounding):
        raise Mixes("the gradient of an example changes with the number of examples")


def adds_up(
    run: TrialRuns,
    rows: Batch,
    losses: Tensor,
    kept: Tensor,
    grads: list[Tensor | None],
) -> bool:
    """Raise unless the gradient of all losses is that of some, which is used up, and that of the
    others; False if these are not finite."""
    if not grads:
        return True
    rest = losses.detach().isfinite()
    rest[kept] = False
    if not bool(rest.any()):
        return True

    def of_all(given: Batch) -> list[Tensor | None]:
        found = run(given)
        return run.gradient(torch.cat([found[kept], found[rest]]))

    due = joined(grads, run.gradient(run(rows)[rest]))
    both = of_all(rows)
    gap, size = length(due, both), length(both)
    del due

    def rounding() -> float:  # terms that all but cancel may move as far as it moves them
        return length(both, of_rounded(of_all, rows))

    if math.isfinite(gap) and _is_beyond(gap, 2e-2 * size, rounding):
        raise Mixes("the gradient of an example changes with those of the others")
    return math.isfinite(gap)


def same_beside(
    run: TrialRuns,
    rows: Batch,
    kept: Tensor,
    grads: Sequence[Tensor | None],
    there: Tensor,
    *,
    low: bool,
) -> bool:
    """Raise unless the examples that were kept have their gradient where their losses are `there`,
    beside others; False if these are not finite."""
    moved, share = length(grads, run.gradient(there)), 2e-2 if low else 1e-4

    def rounding() -> float:
        return length(grads, run.gradient(of_rounded(run, rows)[kept]))

    if _is_beyond(moved, share * length(grads), rounding):
        raise Mixes("the gradient of an example changes with the other examples of its batch")
    return math.isfinite(moved)


def _is_beyond(gap: float, allowed: float, rounding: Callable[[], float]) -> bool:
    """Whether a gap is larger than is allowed, and than four times what rounding moves besides."""
    return gap > allowed + 1e-12 and gap > allowed + 4.0 * rounding()
