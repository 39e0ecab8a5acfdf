"""What a captured clipped sum gives back, and what a step saw of it. No state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.release.units import Ids
from noshuffle.training.step import Outcome

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class Sums:
    """Values by name, and per row loss, norm, is-bad; `report` has the three rows in one tensor."""

    values: dict[str, Tensor]
    losses: Tensor
    norms: Tensor
    bad: Tensor
    report: Tensor | None = None


TotalFn = Callable[[tuple[Any, ...], Tensor], Sums]


class Told(Protocol):
    """Who tells what a step saw, until the next one; a `Program` does."""

    def report(self) -> Rows:
        """Losses, norms and non-finite marks of all rows; waits for them."""

    def losses(self) -> Rows:
        """The losses alone, which come first."""


@dataclass(frozen=True)
class _Kept:
    """A report that stays."""

    rows: Rows

    def report(self) -> Rows:
        return self.rows

    def losses(self) -> Rows:
        first: Rows = self.rows[0]
        return first


@dataclass(frozen=True)
class Pending:
    """What a step saw, still on its way from the device; good until the next step."""

    program: Told
    rows: Ids | slice
    dropped: int
    is_skipped: bool = False

    def kept(self) -> Pending:
        """The same for good, whatever the next step writes; waits."""
        return replace(self, program=_Kept(self.program.report().copy()))

    def read(self) -> Outcome:
        """Wait for it."""
        found = self.program.report()[:, self.rows].copy()
        losses, norms, bad = torch.from_numpy(found)
        return Outcome(
            losses=losses,
            norms=norms,
            bad=bad != 0,
            dropped=self.dropped,
            is_skipped=self.is_skipped,
        )

    @property
    def loss(self) -> float:
        """Mean loss of the finite examples (NaN if there are none); waits for it."""
        losses = self.program.losses()[self.rows]
        mean = float(losses.sum(dtype=np.float64)) / len(losses) if len(losses) else math.nan
        if math.isfinite(mean):
            return mean
        losses = losses[np.isfinite(losses)]
        return float(losses.mean(dtype=np.float64)) if len(losses) else math.nan
