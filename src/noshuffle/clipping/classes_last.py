"""Cross entropy of scores [B, V, T] whose V classes lie side by side in memory, read as they lie.

A language model gives scores [B, T, V]; torch wants the classes second, so losses are written
`cross_entropy(scores.transpose(1, 2), y)`. Torch then copies the scores into that order and goes
over them with strides, forward and backward: on a CPU, that takes longer than the product which
made them. With all positions as rows

    cross_entropy(scores[b, :, t], y[b, t]) over b, t  =  cross_entropy(rows[n], y[n]) over n

nothing is copied. `ClassesLast` does that for every call of torch's cross entropy inside a block,
whoever makes it; everything else is left as it is. No state.

>>> scores, y = torch.randn(2, 3, 5).transpose(1, 2), torch.tensor([[0, 4, 1], [2, 2, -100]])
>>> with ClassesLast():
...     found = F.cross_entropy(scores, y)
>>> torch.allclose(found, F.cross_entropy(scores, y))
True
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  (the doctest uses it)
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def _lies_so(scores: Any, target: Any) -> bool:
    """Whether these are scores and numbers of classes, and the classes lie side by side."""
    if not isinstance(scores, Tensor) or not isinstance(target, Tensor):
        return False
    is_index = not target.is_floating_point() and target.shape == (
        *scores.shape[:1],
        *scores.shape[2:],
    )
    if scores.dim() < 3 or not is_index or scores.device.type != "cpu":
        return False
    return scores.shape[1] > 1 and scores.stride(1) == 1 and scores.movedim(1, -1).is_contiguous()


def cross_entropy(scores: Tensor, target: Tensor, *args: Any, **options: Any) -> Tensor:
    """`torch.nn.functional.cross_entropy`, without a copy where classes lie last in memory.

    Guarantees: the same sum, mean or losses by position, with weights, ignored classes and
    smoothing, up to the rounding of sums; on other input it is torch's own call.
    """
    if not _lies_so(scores, target):
        return F.cross_entropy(scores, target, *args, **options)
    rows = scores.movedim(1, -1).reshape(-1, scores.shape[1])
    found = F.cross_entropy(rows, target.reshape(-1), *args, **options)
    return found.reshape(target.shape) if found.dim() else found


class ClassesLast(TorchFunctionMode):
    """In this block cross entropies are computed by `cross_entropy`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is F.cross_entropy and len(args) > 1:
            return cross_entropy(*args, **options)
        return func(*args, **options)
