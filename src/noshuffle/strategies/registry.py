"""Every strategy by its name: from plain values back to the record, and builders by name.

`from_dict(strategy.to_dict()) == strategy` for all of them, also after a trip through JSON, which
turns tuples into lists.

>>> from_dict({"name": "banded", "bands": [1.0, 0.5]}).coefficients(3)
array([1. , 0.5, 0. ])
>>> by_name("sqrt_toeplitz", bands=4).buffers(100)
3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from noshuffle.errors import InvalidInput, Unsupported, instance_of, whole
from noshuffle.strategies.base import Strategy, ToeplitzStrategy
from noshuffle.strategies.blt import Blt, blt
from noshuffle.strategies.dense import Dense, dense
from noshuffle.strategies.identity import (
    Identity,
    ReleaseSums,
    identity,
    release_each,
    release_sums,
)
from noshuffle.strategies.toeplitz import (
    Banded,
    BandedInverse,
    SqrtToeplitz,
    banded,
    banded_inverse,
    sqrt_toeplitz,
)
from noshuffle.strategies.tree import Tree, tree
from noshuffle.strategies.two_sided import TwoSidedBlt, two_sided

BUILDERS: dict[str, Callable[..., Strategy]] = {
    "identity": identity,
    "release_each": release_each,
    "release_sums": release_sums,
    "tree": tree,
    "sqrt_toeplitz": sqrt_toeplitz,
    "banded": banded,
    "banded_inverse": banded_inverse,
    "blt": blt,
    "blt_two_sided": two_sided,
    "dense": dense,
}

_CLASSES: dict[str, type[Strategy]] = {
    cls.name: cls
    for cls in (
        Identity,
        ReleaseSums,
        Tree,
        SqrtToeplitz,
        Banded,
        BandedInverse,
        Blt,
        TwoSidedBlt,
        Dense,
    )
}


def by_name(name: str, **options: Any) -> Strategy:
    """The strategy that the builder of this name makes from the options."""
    if name not in BUILDERS:
        raise InvalidInput(f"a strategy must be one of {', '.join(BUILDERS)}; got {name!r}")
    try:
        return BUILDERS[name](**options)
    except TypeError as problem:
        raise InvalidInput(f"the strategy {name!r} cannot be built: {problem}") from None


def from_dict(record: dict[str, Any]) -> Strategy:
    """The strategy that `to_dict` wrote."""
    if not isinstance(record, dict):
        raise InvalidInput(f"a strategy record must be a mapping, got {type(record).__name__}")
    values = dict(record)
    name = values.pop("name", None)
    if name not in _CLASSES:
        raise InvalidInput(f"strategy name must be one of {', '.join(_CLASSES)}; got {name!r}")
    cls = _CLASSES[name]
    known = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise InvalidInput(f"the strategy {name!r} has no field {unknown[0]!r}")
    try:
        return cls(**{key: _frozen(value) for key, value in values.items()})
    except TypeError as problem:
        raise InvalidInput(f"the strategy {name!r} cannot be read: {problem}") from None


def _frozen(value: Any) -> Any:
    """Lists, at any depth, as tuples."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def column_normalized(strategy: Strategy, steps: int) -> Strategy:
    """The same strategy with every column of its steps × steps matrix scaled to norm one."""
    whole(steps=steps)
    instance_of(Strategy, strategy=strategy)
    if not isinstance(strategy, ToeplitzStrategy):
        raise Unsupported(
            f"column normalisation is built in for Toeplitz strategies, got {strategy.name!r}"
        )
    return replace(strategy, gains=(), normalized=steps)
