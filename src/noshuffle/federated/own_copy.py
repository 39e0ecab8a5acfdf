"""A client's own copy of a model or a loss, so that nothing of a user reaches the next one.

Whatever a layer, or an object that is called as a loss, keeps of its data (in a buffer, a frozen
parameter, an attribute) goes with the client; otherwise it would reach the next client, past the
clip norm. A copy is what `copy.deepcopy` makes. As every client of every round takes one, a model
is gone through once, and what there is to copy is written down: of a small layer's forty
attributes most are numbers, and a dozen are empty tables of hooks.

>>> model = nn.Linear(2, 1)
>>> copies = Copies(model, {"weight": model.weight})
>>> first, second = copies(), copies()
>>> first.weight is second.weight is model.weight, first.bias is model.bias
(True, False)
"""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from noshuffle.errors import Unsupported

_Part = TypeVar("_Part")
#: Copies by the ids of their originals, as `copy.deepcopy` keeps them.
_Memo = dict[int, Any]
#: Makes a copy, or finds the one that is made.
_Write = Callable[[_Memo], Any]
#: What is copied anew of a table.
_Rest = list[tuple[Any, _Write]]
#: Kinds of which `copy.deepcopy` hands back the same object.
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType}
)


class Copies(Generic[_Part]):
    """Makes copies of a model or a loss as it is now, in which the server's parameters take part.

    A plain function is its own copy, and what it keeps outside is its own.
    """

    def __init__(self, part: _Part, parameters: Mapping[str, Tensor]) -> None:
        self._name, self._shared = type(part).__name__, dict[int, Any]()
        if isinstance(part, nn.Module):
            self._shared = {id(p): p for name, p in part.named_parameters() if name in parameters}
        self._make = self._made(lambda: _written(part, {}))

    def __call__(self) -> _Part:
        return self._made(lambda: self._make(dict(self._shared)))  # type: ignore[no-any-return]

    def _made(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            raise Unsupported(
                f"every client trains a copy of its own, and {self._name} cannot be copied "
                f"({error}); keep tensors with gradients out of its attributes"
            ) from error


def _written(value: Any, known: dict[int, _Write]) -> _Write:
    """How `copy.deepcopy(value, memo)` is done; `known`: what is written already, by ids."""
    if _is_atom(value):
        return lambda memo: value
    if id(value) not in known:
        known[id(value)] = lambda memo: memo[id(value)]  # where it holds itself
        known[id(value)] = _as_it_is(value, known)
    return known[id(value)]


def _as_it_is(value: Any, known: dict[int, _Write]) -> _Write:
    kind = type(value)
    if kind in (list, set) and all(map(_is_atom, value)):
        return partial(_again, value, kind)
    if kind is OrderedDict and not value and not vars(value):
        return partial(_again, value, kind)
    if kind is dict and all(map(_is_atom, value)):
        return partial(_table, value, *_parts(value, known))
    if isinstance(value, nn.Module) and _is_usual(kind) and "__deepcopy__" not in vars(value):
        state: Any = value.__getstate__()  # type: ignore[no-untyped-call]
        if type(state) is dict and all(map(_is_atom, state)):
            return partial(_module, value, *_parts(state, known))
    return lambda memo: copy.deepcopy(value, memo)


def _is_atom(value: Any) -> bool:
    kind = type(value)
    return kind in _ATOMS or (kind is tuple and all(type(item) in _ATOMS for item in value))


def _parts(table: dict[Any, Any], known: dict[int, _Write]) -> tuple[dict[Any, Any], _Rest]:
    """A table with what stays the same, in its order, and how the rest is copied."""
    rest = [(key, _written(item, known)) for key, item in table.items() if not _is_atom(item)]
    return {key: item if _is_atom(item) else None for key, item in table.items()}, rest


def _again(value: Any, make: Callable[[Any], Any], memo: _Memo) -> Any:
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = make(value)
    return made


def _table(value: Any, fixed: dict[Any, Any], rest: _Rest, memo: _Memo) -> Any:
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = fixed.copy()
        for key, write in rest:
            made[key] = write(memo)
    return made


def _module(value: nn.Module, fixed: dict[Any, Any], rest: _Rest, memo: _Memo) -> Any:
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = object.__new__(type(value))
        state = fixed.copy()
        for key, write in rest:
            state[key] = write(memo)
        made.__setstate__(state)  # type: ignore[no-untyped-call]
    return made


def _is_usual(kind: type[Any]) -> bool:
    """Whether Python makes an empty object of this class and hands it a copy of the state."""
    plain = ("__new__", "__reduce__", "__reduce_ex__")
    own = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__")
    return (
        all(getattr(kind, name) is getattr(object, name) for name in plain)
        and not any(hasattr(kind, name) for name in own)
        and not any("__slots__" in vars(base) for base in kind.__mro__)
        and kind not in copyreg.dispatch_table
    )
