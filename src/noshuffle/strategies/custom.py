"""Custom mechanisms: `register` gives one a name, `check_custom` compares its parts.

ε comes from `encoder` or `noising`, the noise from `recipe`; nothing but a comparison ties them
together. For every strategy that is not built in (those are covered by the contract suite):

    recipe       streamed through random draws over the whole run, and through unit draws over its
                 first steps, must give the noise of `noising`
    encoder      noising · encoder = identity; a square encoder is lower triangular
    Toeplitz     encoder = T(coefficients)·diag(gains), from which the sensitivity is computed

Two linear maps that agree on random draws are equal with probability one, so the run is checked in
full whatever its length; matrices are compared for the first 128 steps of a longer run.

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
    lead = min(n, LEADING_STEPS)
    C, N = strategy.encoder(lead), strategy.noising(lead)
    if C.shape[1] != lead or N.shape != C.T.shape:
        raise _contradiction(strategy, f"noising({lead}) is {N.shape}, encoder is {C.shape}")
    _compare(strategy, N @ C, np.eye(lead), f"noising({lead}) @ encoder({lead})", "the identity")
    if C.shape[0] == lead and (np.triu(C, 1).any() or not np.all(np.diagonal(C))):
        raise _contradiction(
            strategy, "its square encoder is not lower triangular with a non-zero diagonal"
        )
    leading = strategy.recipe(lead)
    units = stream(leading, np.eye(rows(leading, lead)), steps=lead)
    _compare(strategy, units, N, f"recipe({lead})", f"noising({lead})")
    if n > OWN_STEPS and not isinstance(strategy, ToeplitzStrategy):
        return  # refused by `sensitivity`, which has no proof for such a run
    draws = np.random.default_rng(20211).normal(size=(rows(strategy.recipe(n), n), 2))
    noise = stream(strategy.recipe(n), draws, steps=n)
    if isinstance(strategy, ToeplitzStrategy):
        stated = ToeplitzStrategy.encoder(strategy, lead)
        _compare(strategy, C, stated, f"encoder({lead})", "T(coefficients)·diag(gains)")
        if len(draws) != n:
            raise _contradiction(strategy, f"its recipe reads {len(draws)} draws in {n} steps")
        c, scaled = strategy.coefficients(n), noise * strategy.gain_values(n)[:, None]
        back = np.stack([convolve(c, column, n) for column in scaled.T], axis=1)
        _compare(strategy, back, draws, f"encoder({n}) @ noise of the recipe", "its draws")
    else:
        _compare(strategy, noise, strategy.noising(n) @ draws, f"recipe({n})", f"noising({n})")


def _compare(strategy: Strategy, got: Array, wanted: Array, what: str, other: str) -> None:
    """Equal up to rounding, or refused with the first step that differs."""
    if got.shape != wanted.shape:
        raise _contradiction(strategy, f"{what} is {got.shape}, {other} is {wanted.shape}")
    size = max(1.0, float(np.abs(wanted).max()))
    is_off = ~(np.abs(got - wanted) <= TOLERANCE * size)
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
    needs_horizon: bool = False,
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
    MECHANISMS[name] = Mechanism(name, words, _CustomFit(cls, fit), needs_horizon=needs_horizon)
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
