"""The record that every optimizer of strategies returns.

`objective` is error times sensitivity, the number by which mechanisms compare at equal privacy;
`start` is the same number for the closed-form starting point, so `objective <= start` always.
"""

from __future__ import annotations

from dataclasses import dataclass

from noshuffle.strategies.base import Strategy


@dataclass(frozen=True)
class Fit:
    """A fitted strategy and how the search for it ended."""

    strategy: Strategy
    objective: float
    converged: bool
    iterations: int
    start: float
