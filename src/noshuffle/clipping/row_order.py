"""Whether a model picks or orders its rows by what they hold.

Layer rules take row b of a layer's input for example b. A model that sorts its examples by length,
or leaves out padding and so packs the tokens of all examples side by side, hands its layers rows of
which only the data say whose they are: in a batch without padding all looks well, and in the next
one the gradients of one example are clipped by the norm of another. `Picking` listens to a run for
what such a choice is made by:

    sort, topk along the first axis           an order of the examples
    nonzero, x[mask], masked_select           rows that are there or not

State: the first such operation of the block.

>>> with Picking(2) as listening:
...     _ = torch.tensor([3, 5]).argsort()
>>> listening.how
'argsort'
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ORDERS = ("sort", "msort", "argsort", "topk", "kthvalue")
_CHOICES = ("nonzero", "argwhere", "nonzero_static", "masked_select", "unique", "where")
_MASKS = (torch.bool, torch.uint8)


class Picking(TorchFunctionMode):
    """In this block, operations that choose among rows of `size` examples are noticed."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.size = size
        self.how = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if not self.how:
            self._listen(getattr(func, "__name__", "").strip("_"), args, options)
        return func(*args, **options)

    def _listen(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        of = args[0] if args else options.get("input")
        if not isinstance(of, Tensor) or not of.dim() or of.shape[0] % self.size:
            return
        is_it = False
        if name in _ORDERS:
            given = [a for a in args[1:] if type(a) is int]
            at = 1 if name in ("topk", "kthvalue") else 0
            usual = 0 if name == "msort" else -1
            axis = options.get("dim", given[at] if len(given) > at else usual)
            is_it = axis % of.dim() == 0
        elif name == "where":  # with one argument it is nonzero; with three it chooses nothing
            is_it = len(args) + len(options) == 1
        elif name == "getitem":
            index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            is_it = isinstance(index, Tensor) and index.dtype in _MASKS
        else:
            is_it = name in _CHOICES or name.startswith("unique")
        self.how = name if is_it else ""
