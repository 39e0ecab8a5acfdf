"""Criteria by row: torch's own whose row form is known, and cross entropy read as memory has it.

A language model gives scores [B, T, V]; torch wants the classes second and copies. With all
positions as rows, nothing is copied:

    cross_entropy(scores[b, :, t], y[b, t]) over b, t  =  cross_entropy(rows[n], y[n]) over n

`ClassesLast` does that for every call of torch's cross entropy inside a block. In a block of
`CriteriaByRow` torch's criteria give one number per example, so that a model which computes its
loss itself (`model(**batch).loss`) gives one for each. No state.

>>> scores, y = torch.randn(2, 3, 5).transpose(1, 2), torch.tensor([[0, 4, 1], [2, 2, -100]])
>>> with ClassesLast():
...     found = F.cross_entropy(scores, y)
>>> torch.allclose(found, F.cross_entropy(scores, y))
True
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from noshuffle.clipping.state import is_wrapped


def _lies_so(scores: Any, target: Any) -> bool:
    """Whether these are scores and numbers of classes, and the classes lie side by side."""
    if not isinstance(scores, Tensor) or not isinstance(target, Tensor):
        return False
    if scores.dim() < 3 or scores.device.type != "cpu" or target.is_floating_point():
        return False
    if target.shape != (*scores.shape[:1], *scores.shape[2:]):
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


#: Criteria with a `reduction`, and rows of numbers or labels.
REDUCED = frozenset(
    getattr(F, f"{name}_loss") for name in ("nll", "mse", "l1", "smooth_l1", "huber", "soft_margin")
) | {F.cross_entropy, F.kl_div, F.binary_cross_entropy, F.binary_cross_entropy_with_logits}
#: What picks as many numbers as the data say.
PICKING = frozenset({Tensor.__getitem__, torch.masked_select, Tensor.masked_select})
_signature = cache(inspect.signature)


def _is_picked(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a mask picks some of a tensor that is not the same for all examples."""
    if func is not Tensor.__getitem__:
        return True
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    masks = [one for one in index if isinstance(one, Tensor) and one.dtype is torch.bool]
    return any(mask.dim() > 0 for mask in masks)


class CriteriaByRow(TorchFunctionMode):
    """In this block torch's criteria are reduced inside each of `size` examples only.

    Guarantees: row i is the criterion of example i alone, where the rows of what it is given are
    those of the examples, one after the other (flattened or not); a mean leaves out ignored labels,
    and a row without labels is 0. Everything else is computed as it is written, and so is a
    criterion after a mask has picked something (one number for all: not by row).
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.is_picked = size, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func not in REDUCED:
            if func in PICKING and _is_picked(func, args):
                self.is_picked = True
            return func(*args, **options)
        given = _signature(func).bind(*args, **options)
        given.apply_defaults()
        own, reduction = given.arguments, given.arguments["reduction"]
        each = func(**{**own, "reduction": "none"})
        # Behind a mask rows are no longer those of the examples, whatever their number.
        if reduction == "none" or each.numel() % self.size or self.is_picked:
            return each if reduction == "none" else func(*args, **options)
        rows = each.reshape(self.size, -1)
        if reduction != "mean":
            return rows.sum(1)
        target = own["target"]
        if "ignore_index" not in own or target.is_floating_point():
            return rows.mean(1)
        weights = target != own["ignore_index"]
        if own["weight"] is not None:
            known = target.clamp(0, len(own["weight"]) - 1)
            weights = torch.where(weights, own["weight"][known], 0.0)
        count = weights.reshape(self.size, -1).sum(1)
        return rows.sum(1) / torch.where(count > 0, count, 1)


def known_by_row(loss_fn: Any, outputs: Any, targets: tuple[Any, ...]) -> Tensor | None:
    """The unreduced loss, reduced inside each row, of criteria where that is known; else None."""
    if not isinstance(outputs, Tensor) or len(targets) != 1 or not isinstance(targets[0], Tensor):
        return None
    target = targets[0]
    if loss_fn is F.cross_entropy or type(loss_fn) is nn.CrossEntropyLoss:
        return _cross_entropy_by_row(loss_fn, outputs, target)
    if loss_fn is F.mse_loss or type(loss_fn) is nn.MSELoss:
        if outputs.shape != target.shape:
            return None
        each = (outputs - target).square().reshape(outputs.shape[0], -1)
        mean = getattr(loss_fn, "reduction", "mean") == "mean"
        return each.mean(1) if mean else each.sum(1)
    return None


def _cross_entropy_by_row(loss_fn: Any, outputs: Tensor, target: Tensor) -> Tensor | None:
    ignore, reduction, plain = -100, "mean", True
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        ignore, reduction = loss_fn.ignore_index, loss_fn.reduction
        plain = loss_fn.weight is None and loss_fn.label_smoothing == 0.0
    if not plain or target.is_floating_point() or outputs.dim() != target.dim() + 1:
        return None
    fn = F.cross_entropy if outputs.dim() == 2 else cross_entropy
    each = fn(outputs, target, reduction="none", ignore_index=ignore)
    if each.dim() == 1:  # nothing to add up; an ignored target is 0/0 where a mean is wanted
        is_plain = target.device.type == "cpu" and not is_wrapped(target)
        is_whole = is_plain and not bool((target.numpy() == ignore).any())
        return each if is_whole or reduction != "mean" else each / (target != ignore)
    total = each.reshape(each.shape[0], -1).sum(1)
    if reduction != "mean":
        return total
    return total / (target != ignore).reshape(each.shape[0], -1).sum(1)
