"""One copy of a tensor for all layers that read it in one backward pass.

A block and its shortcut have one input, and the gradient of their sum is that of both of them: what
kernels keep of a tensor in a form of their own (`conv_halves`) is made once and stands for both.

    copy_of(t, how, make)      make(t), or what it gave for the same numbers in this block of code

The same numbers: the same storage, still there, the same place, shape and strides in it, and not
written to since. A copy is held by those it was given to and not by this table, but for the numbers
that come with it, which are far fewer. A table is that of one backward pass (`tape`), so that
nothing computed outside a captured graph is read inside.

State: the table of the backward pass that a thread is in.

>>> import torch
>>> x, token = torch.ones(2), COPIES.set({})
>>> first, again = (copy_of(x.detach(), "twice", lambda t: (t * 2,)) for _ in range(2))
>>> COPIES.reset(token); first[0] is again[0]
True
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from noshuffle.clipping.state import is_wrapped

Copies = tuple[Tensor, ...]


class _Entry(NamedTuple):
    """Whose copy this is, where it is while somebody holds it, and what comes with it."""

    source: Any
    copy: ref[Tensor]
    rest: tuple[Tensor, ...]


#: Whoever runs a backward pass sets an empty table for it, and resets it.
COPIES: ContextVar[dict[Hashable, _Entry] | None] = ContextVar("copies", default=None)


def copy_of(t: Tensor, how: Hashable, make: Callable[[Tensor], Copies]) -> Copies:
    """`make(t)`, or what it gave for the same numbers and the same `how` before."""
    table = COPIES.get()
    if table is None or type(t) is not Tensor or is_wrapped(t) or t.is_inference():
        return make(t)
    # A storage that is gone but weakly referred to keeps its address: no other can have it.
    source: Any = StorageWeakRef(t.untyped_storage())  # type: ignore[no-untyped-call]
    place = (source.cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t._version, how)
    known = table.get(place)
    if known is not None and not known.source.expired() and (copy := known.copy()) is not None:
        return copy, *known.rest
    made = make(t)
    table[place] = _Entry(source, ref(made[0]), made[1:])
    return made
