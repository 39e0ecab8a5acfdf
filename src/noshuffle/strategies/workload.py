"""Workloads: the linear map A from gradients to iterates whose error the strategies compete on.

    A[t, s] = Σ_{r=s}^{t} η_r β^{r−s}          heavy-ball momentum β, learning rates η

With β = 0 and constant η this is the prefix sum (FTRL, plain SGD). Momentum and schedule are
post-processing of the released gradients, so they never change the guarantee; they only change
which strategy is best. A forgets nothing, as if the loss had no curvature: gains per step that are
fitted to a falling rate put their noise into its last steps, which a model with curvature feels at
its end (docs/results.md). Fit to the momentum, and to rates only where iterates add up.

>>> prefix().matrix(3)
array([[1., 0., 0.],
       [1., 1., 0.],
       [1., 1., 1.]])
>>> momentum(0.5).matrix(3)
array([[1.  , 0.  , 0.  ],
       [1.5 , 1.  , 0.  ],
       [1.75, 1.5 , 1.  ]])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    below_one,
    instance_of,
    non_negative,
    number_tuple,
    unit_rate,
    whole,
)
from noshuffle.strategies.recipe import Array


@dataclass(frozen=True)
class Workload:
    """Heavy-ball momentum in [0, 1) and a learning-rate schedule (empty: constant one)."""

    beta: float = 0.0
    learning_rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        below_one(momentum=self.beta)
        rates = number_tuple(learning_rates=self.learning_rates)
        object.__setattr__(self, "learning_rates", rates)
        if not all(0 <= r < np.inf for r in self.learning_rates):
            raise InvalidInput("learning rates must be finite numbers >= 0; got one that is not")

    @property
    def is_toeplitz(self) -> bool:
        """Whether A depends on t − s alone (no schedule)."""
        return not self.learning_rates

    def rates(self, n: int) -> Array:
        """η_0 … η_{n−1}."""
        if not self.learning_rates:
            return np.ones(n)
        if n > len(self.learning_rates):
            raise HorizonExceeded(
                f"the schedule has {len(self.learning_rates)} learning rates, {n} steps were asked"
            )
        return np.asarray(self.learning_rates[:n])

    def coefficients(self, n: int) -> Array:
        """Coefficients of A for a constant learning rate: 1 / ((1−x)(1−βx))."""
        if not self.is_toeplitz:
            raise InvalidInput("a workload with a schedule is not Toeplitz; use matrix(n)")
        return np.cumsum(self.beta ** np.arange(n))

    def apply(self, rows: Array) -> Array:
        """A @ rows without forming A: momentum filter, learning rates, running sum."""
        n = rows.shape[0]
        filtered = rows
        if self.beta:
            from scipy.signal import lfilter  # a second to import: only where it is needed

            filtered = lfilter([1.0], [1.0, -self.beta], rows, axis=0)
        rates = self.rates(n).reshape((n,) + (1,) * (rows.ndim - 1))
        return np.asarray(np.cumsum(rates * filtered, axis=0), dtype=np.float64)

    def matrix(self, n: int) -> Array:
        """A as an explicit n × n matrix."""
        return self.apply(np.eye(n))


def prefix() -> Workload:
    """Prefix sums: what FTRL and plain SGD consume."""
    return Workload()


def checked_workload(given: Workload | None) -> Workload:
    """The workload that was given; prefix sums for None."""
    workload = prefix() if given is None else given
    instance_of(Workload, workload=workload)
    return workload


def momentum(beta: float, *, learning_rates: tuple[float, ...] = ()) -> Workload:
    """Heavy-ball momentum, with an optional schedule."""
    return Workload(beta=beta, learning_rates=learning_rates)


def cooldown(steps: int, *, last: float = 0.25, floor: float = 0.05) -> tuple[float, ...]:
    """Learning rates 1, then linear to `floor` over the `last` part of the run."""
    whole(steps=steps)
    unit_rate(last=last)
    non_negative(floor=floor)
    start = round(steps * (1 - last))
    tail = np.linspace(1.0, floor, max(steps - start, 1) + 1)[1:]
    return tuple(np.concatenate([np.ones(steps - len(tail)), tail]).tolist())
