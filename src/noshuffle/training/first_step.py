"""Around the first step of a run: warnings of what is legal and probably not meant.

    first_step   before it: a run on rows that this process has trained on before
    first_look   after it: a batch size, a δ or a slow way that is hardly wanted

What can be said without a step `check` says beforehand. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from noshuffle.errors import ProbablyNotMeant
from noshuffle.release.repeated import remember, warn_if_fitted_before
from noshuffle.training.check import (
    CheckFinding,
    delta_finding,
    records_of,
    size_finding,
    slow_notes,
)
from noshuffle.training.mixing import first_rows
from noshuffle.user_warnings import warn_user

#: What is told of every part of a first step, before it is summed.
Hear = Callable[[tuple[Any, ...]], None]


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
