"""What every strategy can do, and what all Toeplitz strategies share.

A strategy is a lower-triangular encoder C with A = B·C: the run protects C·G + Z and adds row t of
C⁻¹Z to the gradient of step t (Denisov et al. 2022, arXiv 2202.08312). It is a frozen record with

    encoder(n)   C, m × n           noising(n)   n × m, with noising @ encoder = identity
    recipe(n)    the streaming form (see `recipe`)
    buffers(n)   how many model-sized tensors the stream keeps

A Toeplitz strategy is  C = T(c)·diag(g):  one sequence of coefficients, c_i on the i-th diagonal,
and optional gains g, given one by one, or as `normalized=n`: every column of the n × n matrix gets
norm one (Henzinger–Upadhyay, arXiv 2509.14334), which is worth it for a single participation. With
draw gains a it is C = diag(a)·T(c)·diag(g), for which nothing holds that is proved for a = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    Unsupported,
    instance_of,
    number_tuple,
    whole,
)
from noshuffle.strategies.recipe import Array, Recipe
from noshuffle.strategies.recursions import divided

#: Largest matrix that is ever built in full.
DENSE_LIMIT = 8192


def dense_size(n: int) -> None:
    """Refuse to build an n × n matrix that would not fit a person's patience."""
    whole(steps=n)
    if n > DENSE_LIMIT:
        raise Unsupported(
            f"an explicit matrix is built for at most {DENSE_LIMIT} steps, got {n}; "
            "use the streaming form or a closed form"
        )


class Strategy:
    """Base of every strategy; subclasses are frozen dataclasses of plain values."""

    name: ClassVar[str] = ""

    def encoder(self, n: int) -> Array:
        """C as an m × n matrix."""
        raise NotImplementedError

    def noising(self, n: int) -> Array:
        """The n × m left inverse of C whose rows make the noise of each step."""
        raise NotImplementedError

    def recipe(self, n: int) -> Recipe:
        """The streaming form for a run of n steps."""
        raise NotImplementedError

    def buffers(self, n: int) -> int:
        """Model-sized tensors that the streaming form keeps between steps."""
        raise NotImplementedError

    def words(self) -> str:
        """The mechanism in a few plain words."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain values, `name` first; fields at their default are left out."""
        record: dict[str, Any] = {"name": self.name}
        values = asdict(self)  # type: ignore[call-overload]
        for field in fields(self):  # type: ignore[arg-type]
            if values[field.name] != field.default:
                record[field.name] = values[field.name]
        return record


def leading_gains(gains: Array | tuple[float, ...], n: int) -> Array:
    """The first n of them, if there are so many."""
    if n > len(gains):
        raise HorizonExceeded(f"gains cover {len(gains)} steps, {n} were asked for; fit again")
    return np.array(gains[:n], dtype=np.float64)


def lower_toeplitz(c: Array) -> Array:
    """The lower-triangular matrix with c_i on its i-th diagonal."""
    from scipy.linalg import toeplitz

    return np.asarray(toeplitz(c, np.zeros_like(c)), dtype=np.float64)


def padded(values: Array, n: int) -> Array:
    """The first n values, zeros after the last."""
    out = np.zeros(n)
    out[: min(n, len(values))] = values[:n]
    return out


def reciprocal(c: Array, n: int) -> Array:
    """First n coefficients of 1 / c(x) by the recursion, exactly zero once below 1e-100."""
    return divided(padded(np.ones(1), n), c)


@dataclass(frozen=True, kw_only=True)
class ToeplitzStrategy(Strategy):
    """C = diag(a)·T(c)·diag(g), a = 1 unless `has_draw_gains`.

    Subclasses give `coefficients`, `noising_coefficients` and `recipe`.
    """

    gains: tuple[float, ...] = ()
    normalized: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "gains", number_tuple(gains=self.gains))
        if self.gains and self.normalized:
            raise InvalidInput("give either gains or normalized, not both")
        if self.gains and not all(0 < g < np.inf for g in self.gains):
            raise InvalidInput("gains must be finite numbers > 0; got one that is not")
        if self.normalized:
            whole(normalized=self.normalized)

    def coefficients(self, n: int) -> Array:
        """First n coefficients of c(x)."""
        raise NotImplementedError

    def noising_coefficients(self, n: int) -> Array:
        """First n coefficients of 1 / c(x)."""
        return reciprocal(self.coefficients(n), n)

    @property
    def has_gains(self) -> bool:
        return bool(self.gains) or bool(self.normalized)

    def gain_values(self, n: int) -> Array:
        """g_0 … g_{n−1}; a run may be shorter than its gains were made for, never longer."""
        if self.gains:
            return leading_gains(self.gains, n)
        if self.normalized:
            norms = np.sqrt(np.cumsum(self.coefficients(self.normalized) ** 2))[::-1]
            return leading_gains(1.0 / norms, n)
        return np.ones(n)

    @property
    def has_draw_gains(self) -> bool:
        return False

    def draw_gain_values(self, n: int) -> Array:
        """a_0 … a_{n−1}: what the draws are divided by."""
        return np.ones(n)

    def step_scale(self, n: int) -> tuple[float, ...]:
        """1 / g_t, or nothing when there are no gains: what recipes carry."""
        return tuple(1.0 / self.gain_values(n)) if self.has_gains else ()

    def encoder(self, n: int) -> Array:
        dense_size(n)
        scaled = self.draw_gain_values(n)[:, None] * lower_toeplitz(self.coefficients(n))
        return np.asarray(scaled * self.gain_values(n), dtype=np.float64)

    def noising(self, n: int) -> Array:
        dense_size(n)
        inverse = lower_toeplitz(self.noising_coefficients(n))
        scaled = inverse / self.gain_values(n)[:, None] / self.draw_gain_values(n)
        return np.asarray(scaled, dtype=np.float64)

    def noising_rows(self, n: int) -> Iterator[Array]:
        """The rows of `noising(n)`, each up to its diagonal, without the matrix."""
        gains, scale = self.gain_values(n).tolist(), 1.0 / self.draw_gain_values(n)
        backwards = np.ascontiguousarray(self.noising_coefficients(n)[::-1])
        for t, gain in enumerate(gains):
            yield backwards[n - 1 - t :] * scale[: t + 1] / gain


def column_normalized(strategy: Strategy, steps: int) -> Strategy:
    """The same strategy with every column of its steps × steps matrix scaled to norm one."""
    whole(steps=steps)
    instance_of(Strategy, strategy=strategy)
    if not isinstance(strategy, ToeplitzStrategy) or strategy.has_draw_gains:
        raise Unsupported(
            f"column normalisation is built in for Toeplitz strategies, got {strategy.name!r}"
        )
    return replace(strategy, gains=(), normalized=steps)
