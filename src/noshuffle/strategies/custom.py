"""Custom mechanisms: `register` gives one a name, `check_custom` holds its recipe to its encoder.

ε comes from `encoder` or `noising`, the noise from `recipe`; nothing but a comparison ties them
together. A strategy that is not built in (those are covered by the contract suite) is refused
unless C and C⁻¹ are square and lower triangular with no zero on the diagonal, so that every step
has a draw of its own, and random draws streamed through the recipe give the noise of C⁻¹ over the
whole run. Two linear maps that agree on random draws are equal with probability one. Matrices are
compared for the first 128 steps of a longer run.

>>> from noshuffle.strategies.toeplitz import sqrt_toeplitz
>>> check_custom(sqrt_toeplitz(), 10**6)          # built in: nothing to do
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from noshuffle.errors import InvalidInput, instance_of
from noshuffle.strategies.base import Strategy, ToeplitzStrategy
from noshuffle.strategies.fit_forms import Fit
from noshuffle.strategies.mechanisms import MECHANISMS, FitRequest, Mechanism
from noshuffle.strategies.recipe import Array, rows, stream
from noshuffle.strategies.recursions import convolve
from noshuffle.strategies.registry import add_class, is_built_in
from noshuffle.strategies.sensitivity import OWN_STEPS

#: Steps whose matrices are compared entry by entry.
LEADING_STEPS = 128

#: Largest difference, relative to the largest entry, that rounding explains.
TOLERANCE = 1e-8


def check_custom(strategy: Strategy, steps: int) -> None:
    """Refuse a strategy whose recipe, noising matrix and encoder contradict each other."""
    if is_built_in(strategy):
        return
    try:
        _check(strategy, steps)
    except TypeError:  # cannot be hashed: checked every time
        _check.__wrapped__(strategy, steps)


@lru_cache(maxsize=64)
def _check(strategy: Strategy, n: int) -> None:
    is_toeplitz = isinstance(strategy, ToeplitzStrategy)
    lead = min(n, LEADING_STEPS)
    C, N = strategy.encoder(lead), strategy.noising(lead)
    _refuse_if_not_triangular(strategy, C, N)
    _compare(strategy, N @ C, np.eye(lead), f"noising({lead}) @ encoder({lead})", "the identity")
    if n > OWN_STEPS and not is_toeplitz:
        return  # refused by `sensitivity`, which has no proof for such a run
    recipe = strategy.recipe(n)
    if rows(recipe, n) != n:
        raise _contradiction(strategy, f"its recipe reads {rows(recipe, n)} draws in {n} steps")
    draws = np.random.default_rng(20211).normal(size=(n, 2))
    noise = stream(recipe, draws, steps=n)
    if isinstance(strategy, ToeplitzStrategy):
        stated = ToeplitzStrategy.encoder(strategy, lead)
        _compare(strategy, C, stated, f"encoder({lead})", "diag(a)·T(coefficients)·diag(g)")
        c, scaled = strategy.coefficients(n), noise * strategy.gain_values(n)[:, None]
        back = np.stack([convolve(c, column, n) for column in scaled.T], axis=1)
        back *= strategy.draw_gain_values(n)[:, None]
        _compare(strategy, back, draws, f"encoder({n}) @ noise of the recipe", "its draws")
    else:
        N = strategy.noising(n)
        _refuse_if_not_triangular(strategy, N)
        _compare(strategy, noise, N @ draws, f"recipe({n})", f"noising({n})")


def _refuse_if_not_triangular(strategy: Strategy, *matrices: Array) -> None:
    for matrix in matrices:
        is_square = matrix.shape[0] == matrix.shape[1]
        if not is_square or np.triu(matrix, 1).any() or not np.all(np.diagonal(matrix)):
            raise _contradiction(
                strategy,
                "C and C⁻¹ must be square and lower triangular with no zero on the diagonal, so "
                "that every step has a draw of its own",
            )


def _compare(strategy: Strategy, got: Array, wanted: Array, what: str, other: str) -> None:
    """Equal up to rounding, or refused with the first step that differs."""
    if got.shape != wanted.shape:
        raise _contradiction(strategy, f"{what} is {got.shape}, {other} is {wanted.shape}")
    is_off = ~(np.abs(got - wanted) <= TOLERANCE * max(1.0, float(np.abs(wanted).max())))
    if is_off.any():
        step = int(np.flatnonzero(is_off.any(axis=1))[0])
        raise _contradiction(strategy, f"{what} differs from {other} at step {step}")


def _contradiction(strategy: Strategy, what: str) -> InvalidInput:
    return InvalidInput(
        f"the strategy {strategy.name!r} contradicts itself: {what}; its ε would not be that of "
        "the noise it adds"
    )


def register(
    cls: type[Strategy],
    *,
    fit: Callable[[FitRequest], Strategy] | None = None,
    words: str = "",
) -> type[Strategy]:
    """Register a strategy of your own by its class attribute `name`; also a class decorator.

    Plans with it can then be read back from JSON, and `Plan.fit(mechanism=NAME)` builds it: by
    `fit`, which gets a `FitRequest`, or as `cls()` where there is none. Every plan checks it
    against its encoder before it is used (`check_custom`).
    """
    name = getattr(cls, "name", "")
    if name in MECHANISMS and not isinstance(MECHANISMS[name].fit, _CustomFit):
        raise InvalidInput(f"a name that is not taken is needed, got {name!r}; choose another")
    add_class(cls)
    words = words or f"registered: {cls.__name__}"
    MECHANISMS[name] = Mechanism(name, words, _CustomFit(cls, fit))
    return cls


@dataclass(frozen=True)
class _CustomFit:
    """The fit of a registered strategy: one candidate, measured."""

    cls: type[Strategy]
    build: Callable[[FitRequest], Strategy] | None

    def __call__(self, request: FitRequest) -> Fit:
        try:
            strategy = self.cls() if self.build is None else self.build(request)
        except TypeError as problem:
            raise InvalidInput(
                f"the mechanism {self.cls.name!r} cannot be built: {problem}; give register a fit="
            ) from None
        instance_of(self.cls, **{"what fit returned": strategy})
        return request.closed_form(strategy)
