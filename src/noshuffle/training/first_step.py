"""Around the first step of a run: warnings of what is legal and probably not meant.

    first_step   before it: a run on rows that this process has trained on before
    first_look   after it: a batch size, a δ or a slow way that is hardly wanted

What can be said without a step `check` says beforehand. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from noshuffle.clipping.objective import leaves
from noshuffle.errors import ProbablyNotMeant
from noshuffle.release.repeated import remember, warn_if_fitted_before
from noshuffle.training.check import (
    CheckFinding,
    delta_finding,
    records_of,
    size_finding,
    slow_notes,
)
from noshuffle.user_warnings import warn_user

#: What is told of every part of a first step, before it is summed.
Hear = Callable[[tuple[Any, ...]], None]
#: Numbers that a row must have to be known by.
LEAST = 3


@contextmanager
def first_step(parts: Any, batch: tuple[Any, ...] | None = None) -> Iterator[Hear]:
    """Around the first step: warn of a run on data that this process has trained on before.

    Known by the first batch; where that comes in parts, by the first part that `Hear` is told.
    Runs that draw on a budget are counted, and those of a test seed are not private anyway. A step
    that is refused releases nothing, so its run does not count.
    """
    is_counted = parts.release.charge is not None or parts.ledger.released
    is_known = is_counted or parts.ledger.bound().get("test_key") == "yes"
    heard: list[frozenset[int]] = []

    def hear(part: tuple[Any, ...]) -> None:
        rows = None if is_known or heard else first_rows(part)
        if rows is not None:
            flat = rows.reshape(len(rows), -1).double().cpu().numpy()
            heard.append(warn_if_fitted_before(flat, what="run"))

    if batch is not None:
        hear(batch)
    try:
        yield hear
    finally:
        if heard and parts.ledger.released:
            remember(heard[0])


def first_rows(data: tuple[Any, ...]) -> Tensor | None:
    """The inputs of a batch that it can be known by: its first tensor of numbers with a point."""
    for leaf in leaves(data):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1:
            if leaf.is_nested or leaf.layout is not torch.strided:
                return None  # the step refuses it
            return leaf.detach() if len(leaf) > 1 and leaf[0].numel() >= LEAST else None
    return None


def first_look(private: Any, size: int) -> None:
    """After the first step: warn of what is legal and probably not meant."""
    found = [size_finding(size, private._parts.planned_batch)]
    records = records_of(private.plan, private._parts.planned_batch, None)
    found.append(delta_finding(private.plan, records))
    slow = slow_notes(private.fallbacks)
    if slow:
        found.append(CheckFinding("speed", "; ".join(slow), "warning", "see private.fallbacks"))
    for one in found:
        if one.verdict == "warning":
            text = f"{one.name}: {one.found}; {one.advice}"
            warn_user(text, ProbablyNotMeant)
