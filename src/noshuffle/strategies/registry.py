"""Every strategy by its name: from plain values back to the record.

`from_dict(strategy.to_dict()) == strategy` for all of them, also after a trip through JSON, which
turns tuples into lists.

>>> from_dict({"name": "banded", "bands": [1.0, 0.5]}).coefficients(3)
array([1. , 0.5, 0. ])
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.strategies.base import Strategy
from noshuffle.strategies.blt import Blt
from noshuffle.strategies.dense import Dense
from noshuffle.strategies.identity import Identity, ReleaseSums
from noshuffle.strategies.toeplitz import Banded, BandedInverse, SqrtToeplitz
from noshuffle.strategies.tree import Tree

_BUILT_IN: tuple[type[Strategy], ...] = (
    Identity,
    ReleaseSums,
    Tree,
    SqrtToeplitz,
    Banded,
    BandedInverse,
    Blt,
    Dense,
)

_CLASSES: dict[str, type[Strategy]] = {cls.name: cls for cls in _BUILT_IN}
_CLASSES["blt_two_sided"] = Blt


def is_built_in(strategy: Strategy) -> bool:
    """Whether the strategy is one of the library's own, not derived from one."""
    return type(strategy) in _BUILT_IN


def add_class(cls: type[Strategy]) -> None:
    """Let `from_dict` read records of a strategy of one's own (`mechanisms.register`)."""
    candidate: Any = cls
    if not isinstance(candidate, type) or not issubclass(candidate, Strategy):
        raise InvalidInput(f"register a class derived from Strategy, got {cls!r}")
    if not hasattr(candidate, "__dataclass_fields__"):
        raise InvalidInput(f"a strategy must be a frozen dataclass, got {cls.__name__}")
    taken = _CLASSES.get(cls.name, cls)
    is_again = (taken.__module__, taken.__qualname__) == (cls.__module__, cls.__qualname__)
    if not cls.name or not is_again:
        raise InvalidInput(
            f"a strategy of your own needs a name that is not taken, got {cls.name!r}; set the "
            "class attribute `name`"
        )
    _CLASSES[cls.name] = cls


def from_dict(record: dict[str, Any]) -> Strategy:
    """The strategy that `to_dict` wrote."""
    if not isinstance(record, dict):
        raise InvalidInput(f"a strategy record must be a mapping, got {type(record).__name__}")
    values = dict(record)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise InvalidInput(f"strategy name must be one of {', '.join(_CLASSES)}; got {name!r}")
    if name not in _CLASSES:
        raise Unsupported(
            f"the mechanism {name!r} is not known here: import the module that registers it "
            "(noshuffle verify RUN --import MODULE)"
        )
    cls = _CLASSES[name]
    known = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - known):
        raise InvalidInput(f"the strategy {name!r} has no field {unknown[0]!r}")
    try:
        strategy = cls(**{key: _frozen(value) for key, value in values.items()})
    except (TypeError, LookupError) as problem:
        raise InvalidInput(f"the strategy {name!r} cannot be read: {problem}") from None
    if strategy.name != name:
        raise InvalidInput(f"a strategy with these fields is {strategy.name!r}, got {name!r}")
    return strategy


def _frozen(value: Any) -> Any:
    """Lists, at any depth, as tuples."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value
