"""Tensors that a loss has from elsewhere than from its arguments.

A loss of `private.step` is called with one example at a time. What it takes from around it is the
same in each of these calls:

    private.step(lambda out, y: (w * ce(out, y)).sum(), x, y)       # w of the whole batch

and one example moves the gradients of all. So the tensors of the calls that a single example goes
through are looked at: those in the memory of the batch are refused, those that have a row for each
of its examples warned of. What modules keep is none. State: the tensors that calls made, weakly.

>>> import torch
>>> batch = torch.ones(4, 3)
>>> with CapturedTensors((batch,)) as seen:
...     _ = torch.ones(1, 3) * batch
>>> seen.refuse()
Traceback (most recent call last):
    ...
noshuffle.errors.InvalidInput: the loss uses a tensor of the whole batch, of shape (4, 3), beside \
its arguments: every example's gradient would depend on all of them; give it to the step after the \
inputs, and the loss gets its row: private.step(lambda out, y, w: …, x, y, w)
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from noshuffle.errors import InvalidInput, ProbablyNotMeant
from noshuffle.user_warnings import warn_user

OF_BATCH = (
    "the loss uses a tensor of the whole batch, of shape {shape}, beside its arguments: every "
    "example's gradient would depend on all of them; give it to the step after the inputs, and the "
    "loss gets its row: private.step(lambda out, y, w: …, x, y, w)"
)
LIKE_BATCH = (
    "the loss uses a tensor of shape {shape} beside its arguments, which has as many rows as the "
    "batch: if it is of the batch, every example's gradient depends on all of them and the "
    "guarantee does not hold; give it to the step after the inputs, and the loss gets its row"
)


#: What calls are given most often and holds no tensor.
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))


def _tensors(*trees: Any) -> list[Tensor]:
    """The tensors among the leaves of trees, in their order.

    Every call of a run comes through here, with a few tensors side by side: to ask `tree_leaves`
    takes longer than most of these calls (torch 2.13), so that it is asked for what is unusual.
    """
    found: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            found.append(tree)
        elif (kind := type(tree)) is tuple or kind is list:
            found += _tensors(*tree)
        elif kind is dict:
            found += _tensors(*tree.values())
        elif kind not in _PLAIN:
            found += [one for one in tree_leaves(tree) if isinstance(one, Tensor)]
    return found


def memory(one: Tensor) -> int:
    """Where the numbers of a tensor begin, with all that share them.

    0 if nowhere, or where nobody can say (of `torch.func`, sparse, empty). An address belongs to
    one device: torch has host and GPUs in one address space.
    """
    try:
        return one.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


class CapturedTensors(TorchFunctionMode):
    """Looks at the tensors of calls that a part of `batch` goes through.

    Those that `modules` keep are none.
    """

    def __init__(self, batch: Any, modules: Sequence[Any] = ()) -> None:
        super().__init__()
        own = _tensors(batch)
        self._size = len(own[0]) if own else 0
        self._batch = {memory(one) for one in own} - {0}
        inside = [m for one in modules if isinstance(one, nn.Module) for m in one.modules()]
        kept = ([vars(m), *m.buffers(recurse=False)] for m in inside)
        self._known = {memory(one) for one in _tensors(list(kept))}
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self.of_batch: tuple[int, ...] | None = None
        self.like_batch: tuple[int, ...] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for one in _tensors(args, kwargs):
            self._look(one)
        result = func(*args, **(kwargs or {}))
        self._made |= {id(one): weakref.ref(one) for one in _tensors(result)}
        return result

    def _look(self, one: Tensor) -> None:
        made = self._made.get(id(one))
        if isinstance(one, nn.Parameter) or (made is not None and made() is one):
            return
        where = memory(one)
        if where in self._batch:
            self.of_batch = tuple(one.shape)
        elif where and where not in self._known and one.dim() and len(one) == self._size > 1:
            self.like_batch = tuple(one.shape)

    def refuse(self) -> None:
        """Raise, or warn, if there were any."""
        if self.of_batch is not None:
            raise InvalidInput(OF_BATCH.format(shape=self.of_batch))
        if self.like_batch is not None:
            text = LIKE_BATCH.format(shape=self.like_batch)
            warn_user(text, ProbablyNotMeant)
