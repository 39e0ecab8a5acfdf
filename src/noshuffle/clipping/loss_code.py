"""Which losses are alike: those that run the same code.

What an engine finds out about a model holds for one kind of loss. A fresh lambda in every step runs
the code of the last one, so the code is what is compared: of the function, of what it wraps and of
what it holds. No state.

>>> identity_of(lambda out, y: out) == identity_of(lambda out, y: -out)
False
>>> alike = [lambda out, y: out * k for k in (1, 2)]
>>> identity_of(alike[0]) == identity_of(alike[1])
True
"""

from __future__ import annotations

from functools import partial
from typing import Any

from noshuffle.clipping.objective import Criterion, ModelLoss


def identity_of(loss_fn: Criterion | ModelLoss) -> Any:
    """A key for the kind of loss that does not keep it alive; a fresh lambda each step is alike."""
    fn = loss_fn.fn if isinstance(loss_fn, ModelLoss) else loss_fn
    return _code(fn), isinstance(loss_fn, ModelLoss)


def _code(fn: Any, depth: int = 4) -> Any:
    """What a function runs: its code, and that of the functions it wraps or holds."""
    if isinstance(fn, bool | str):
        return fn
    if isinstance(fn, partial):
        given = (fn.func, *fn.args, *fn.keywords.values())
        return tuple(_code(each, depth - 1) for each in given) if depth else partial
    code, cells = getattr(fn, "__code__", type(fn)), getattr(fn, "__closure__", None) or ()
    if not depth or not cells:
        return code
    return (code, *(_code(_held(cell), depth - 1) for cell in cells))


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
