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
'sort'
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ORDERS = ("sort", "argsort", "topk")
_CHOICES = ("nonzero", "masked_select", "nonzero_static", "_unique2", "unique_dim")
_MASKS = (torch.bool, torch.uint8)


class Picking(TorchDispatchMode):
    """In this block, operations that choose among rows of `size` examples are noticed."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = size
        self.how = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        name = func.overloadpacket.__name__
        if not self.how and (name in _ORDERS or name in _CHOICES or name == "index"):
            self._listen(name, args, options)
        return func(*args, **options)

    def _listen(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        of = args[0]
        if not isinstance(of, Tensor) or not of.dim() or of.shape[0] % self.size:
            return
        if name in _ORDERS:
            given = [a for a in args[1:] if type(a) is int]
            at = 1 if name == "topk" else 0
            axis = options.get("dim", given[at] if len(given) > at else -1)
            is_it = axis % of.dim() == 0
        elif name == "index":
            is_it = isinstance(args[1][0], Tensor) and args[1][0].dtype in _MASKS
        else:
            is_it = True
        self.how = name if is_it else ""
