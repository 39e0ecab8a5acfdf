"""What the contract suite asks of a driver of the release core, and the rows that it is given.

A driver makes clipped sums of rows of numbers, one row a unit, each of norm below the clip norm:
the sum is known, so what is released less the sum is the noise. To add a driver, write `build` and
`step` (and whatever else does not fit of `Driver`) and put it into `contract.DRIVERS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from noshuffle.errors import ParticipationViolation
from noshuffle.noise import Source
from noshuffle.plan import Plan
from noshuffle.release.ledger import Ledger
from noshuffle.release.release import Release

#: The divisor of every driver that has one: a power of two, so that dividing loses no bit.
DIVISOR = 8


def first_output(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is the row itself."""
    return outputs[..., 0].mean()


class Driver:
    """A run in a folder: `build` begins it or comes back to it, `step` releases the next step."""

    #: Promises that this driver cannot make, and why.
    absent: ClassVar[dict[str, str]] = {}
    #: How it refuses unit 2 in step 1, after its step 0.
    refusal: ClassVar[tuple[type[Exception], str]] = (
        ParticipationViolation,
        "unit 2 may not take part in step 1",
    )
    #: Whether a unit that is not finite is refused, and does not only contribute zero.
    refuses_nan = False
    #: Whether a released step is passed over by whoever comes back, and never repeated.
    passes_over = False
    #: Lives of a run in its folder when its first process builds it.
    first_lives = 1
    #: Whether it keeps its evidence in a folder.
    has_folder = True

    run: Any
    ledger: Ledger

    def build(self, folder: Path | None, plan: Plan, source: Source | None, width: int) -> None:
        raise NotImplementedError

    def step(self, rows: np.ndarray, ids: Any) -> np.ndarray:
        """Release the next step; (sum + noise) as one row of numbers."""
        raise NotImplementedError

    def releases(self, steps: list[tuple[np.ndarray, list[int]]]) -> list[np.ndarray]:
        """Release several steps of rows and ids."""
        return [self.step(rows, ids) for rows, ids in steps]

    def fit(self, plan: Plan) -> Plan:
        """The plan that this driver takes in the place of one."""
        return plan

    def evidence(self, folder: Path) -> Path:
        """Where in its folder the run folder is."""
        return folder

    def wrong(self) -> None:
        """A step with a unit that took part before."""
        self.step(rows_of(1, 16), [4, 5, 2, 7])

    @property
    def released(self) -> int:
        """How many steps left so far."""
        return int(self.ledger.released)

    @property
    def at(self) -> int:
        """Index of the next step."""
        return int(self.run.steps_done)

    def sums(self) -> int:
        """How many sums were computed so far, for promises about what is not computed."""
        return int(self.engine.calls)

    engine: Any

    def sampler(self, population: int) -> Any:
        """The secret draws of a sampled plan."""
        return self.run.sampler(population)

    def statement(self) -> Any:
        return self.run.statement()

    def epsilon(self) -> float:
        return float(self.run.epsilon)

    def save(self) -> None:
        self.run.save()

    def close(self) -> None:
        self.run.close()

    def kill(self) -> None:
        """Leave everything as a killed process does."""
        self.ledger.let_go()
        self.door()._lock = None

    def door(self) -> Release:
        found: Release = getattr(self.run, "_release", None) or self.run._parts.release
        return found


class Spy:
    """A clipping engine that counts its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0

    def clipped_sum(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner.clipped_sum(*args, **kwargs)


def rows_of(step: int, width: int, units: int = 4) -> np.ndarray:
    """Rows of a step, of norms below one, exact in half the digits of a float."""
    rng = np.random.default_rng(step)
    return np.round(rng.uniform(-1, 1, (units, width)) / np.sqrt(width) * 2**9) / 2**10


def ids_of(step: int, units: int = 4) -> list[int]:
    return list(range(units * step, units * step + units))
