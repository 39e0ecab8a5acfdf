"""A public number for every step: clip norms and batch sizes that change on the way.

    value(t) = value of the last piece (first step, value) whose first step is at most t

Both are fixed before the run and recorded in its ledger, so ε does not depend on them: noise is
added in units of the clip norm, and the noisy sum is divided by a constant (docs/proofs.md, "A clip
norm that moves"). Noise that is correlated over time cancels less where the clip norm changes.

>>> halves = BySteps.of([(0, 1.0), (100, 0.5)], steps=200)
>>> halves.at(99), halves.at(100)
(1.0, 0.5)
>>> BySteps.of(lambda step: 2.0 if step < 3 else 1.0, steps=10)
BySteps(pieces=((0, 2.0), (3, 1.0)))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from noshuffle.errors import InvalidInput, Unsupported, positive, whole

#: Longest run whose steps are asked for one by one.
MOST_STEPS = 10**6

#: One number, one for every step, pairs (first step, number), or a function of the step.
Scheduled = float | Iterable[Any] | Callable[[int], float]


@dataclass(frozen=True)
class BySteps:
    """Pieces (first step, value); the first begins at step 0."""

    pieces: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        for first, value in self.pieces:
            whole(at_least=0, **{"first step": first})
            positive(**{"scheduled value": value})
        plain = tuple((int(first), float(value)) for first, value in self.pieces)
        object.__setattr__(self, "pieces", plain)
        firsts = [first for first, _ in plain]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
            raise InvalidInput(
                f"a schedule is pairs (first step, value) in order, the first of step 0; got {self}"
            )

    @staticmethod
    def of(given: Scheduled, *, steps: int) -> BySteps:
        """From a function of the step, a value for every step, or pairs (first step, value)."""
        if callable(given) or not isinstance(given, Iterable):
            if steps > MOST_STEPS:
                raise Unsupported(
                    f"a function of the step is asked for at most {MOST_STEPS:,} steps, got "
                    f"{steps:,}; give pairs (first step, value)"
                )
            fn = given if callable(given) else lambda _: given
            listed: list[Any] = [fn(step) for step in range(steps)]
        else:
            listed = list(given)
            if listed and all(isinstance(item, tuple | list) for item in listed):
                if any(len(item) != 2 for item in listed):
                    raise InvalidInput(f"a schedule is pairs (first step, value), got {listed}")
                return BySteps(tuple((first, value) for first, value in listed))
            if len(listed) != steps:
                raise InvalidInput(
                    f"give one value for each of {steps} steps, or pairs (first step, value); got "
                    f"{len(listed)} values"
                )
        values = [float(value) for value in listed]
        changes = [t for t in range(steps) if not t or values[t] != values[t - 1]]
        return BySteps(tuple((t, values[t]) for t in changes))

    def at(self, step: int) -> float:
        return self.pieces[bisect_right(self.pieces, step, key=lambda piece: piece[0]) - 1][1]
