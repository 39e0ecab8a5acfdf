"""Rows that a model is tried on: finite, unlike, rounded, extreme and short ones.

The trial is about the model, not about the data. No state.

>>> pair = unlike_pair((torch.ones(3, 2), torch.tensor([1, 1, 0])))
>>> pair[1].tolist()
[1, 0]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.clipping.layers import NotNow
from noshuffle.clipping.objective import Batch, batch_size, take

#: Factors of absolute values, and what is put in their place.
EXTREMES = (1e4, math.inf, -1e4, math.nan)


def finite_rows(batch: Batch, *picks: int) -> Batch:
    """Some examples, with everything non-finite replaced: the trial is about the model."""
    index = [i % batch_size(batch) for i in picks]

    def clean(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return torch.nan_to_num(t, posinf=1.0, neginf=-1.0) if t.is_floating_point() else t

    cleaned: Batch = tree_map(clean, take(batch, torch.tensor(index)))
    return cleaned


def unlike_pair(batch: Batch) -> Batch:
    """The first example and one that differs from it in as many tensors as can be.

    Beside its own copy an example would look undisturbed whatever the model does. Real numbers
    that are the same in all examples are changed in the second one; whole numbers, where nothing
    else differs, are put in reverse order.
    """
    few = finite_rows(batch, *range(min(batch_size(batch), 64)))
    leaves = [t for t in tree_leaves(few) if isinstance(t, Tensor)]
    differs = torch.stack([(t != t[:1]).reshape(len(t), -1).any(1).cpu() for t in leaves])
    other = int(differs.sum(0).argmax())
    alike = not bool(differs[:, other].any())

    def unlike(t: Any) -> Any:
        if not isinstance(t, Tensor) or not torch.equal(t[0], t[1]):
            return t
        if t.is_floating_point():
            return torch.cat([t[:1], t[1:] * 0.71828 + 0.14159])
        return torch.cat([t[:1], t[1:].flip(list(range(1, t.dim())))]) if alike else t

    pair: Batch = tree_map(unlike, take(few, torch.tensor([0, other])))
    if all(torch.equal(t[0], t[1]) for t in tree_leaves(pair) if isinstance(t, Tensor)):
        raise NotNow("all examples of the batch are the same")
    return pair


def rounded(t: Any) -> Any:
    """Real numbers moved by some roundings, each second one the other way."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    signs = torch.ones(t.shape[1:].numel(), device=t.device, dtype=t.dtype)
    signs[1::2] = -1.0
    return t + t * signs.reshape(t.shape[1:]) * (16.0 * torch.finfo(t.dtype).eps)


def extremes(pair: Batch, hows: Sequence[float] = EXTREMES) -> Iterator[Batch]:
    """The pair with real numbers of its second example taken to extremes, the first as it was.

    What looks at the largest number of a batch, or for a NaN in it (`if x.max() > 1: x = x / 255`),
    does nothing beside ordinary rows. Whole numbers stay: an index must lie in its table. None on a
    GPU, where a value that an operation refuses ends the process.
    """
    numbers = [t for t in tree_leaves(pair) if isinstance(t, Tensor) and t.is_floating_point()]
    if any(t.device.type == "cpu" for t in numbers):
        for how in hows:
            yield tree_map(partial(_moved, how=how), pair)


def _moved(t: Any, how: float) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    far = t[1:].abs() * how if math.isfinite(how) else torch.full_like(t[1:], how)
    return torch.cat([t[:1], far])


def cut_short(pair: Batch) -> Iterator[tuple[Batch, Batch]]:
    """The pair with both examples cut short, and the same with the second one as it was.

    What trims padding to the longest of a batch, or divides by how many entries count, does nothing
    to rows of one length. Short is: zeros in the second half of an axis, masks and numbers alike,
    and half of a whole number that stands alone (a length); then −100 in the second half of whole
    numbers, or where they stand alone, one tensor after the other (torch's `ignore_index`; not on a
    GPU, where an index outside its table ends the process).
    """
    numbers = [t for t in tree_leaves(pair) if isinstance(t, Tensor)]
    ways: list[Any] = [partial(_short, only=None)]
    for t in numbers:
        if t.dtype in _WHOLE and t.device.type == "cpu":
            ways.append(partial(_short, only=t))
    for way in ways:
        both = tree_map(way, pair)
        if all(a is b for a, b in zip(tree_leaves(both), tree_leaves(pair))):
            continue
        yield both, tree_map(_first_of, both, pair)


_WHOLE = (torch.int64, torch.int32, torch.int16)


def _short(t: Any, only: Tensor | None) -> Any:
    if not isinstance(t, Tensor) or (only is not None and t is not only):
        return t
    if t.dim() == 1:
        if only is not None:
            return torch.full_like(t, -100)
        return t // 2 if t.dtype in _WHOLE else t
    if t.shape[1] < 2:
        return t
    short = t.clone()
    short[:, t.shape[1] // 2 :] = 0 if only is None else -100
    return short


def _first_of(short: Any, whole: Any) -> Any:
    return torch.cat([short[:1], whole[1:]]) if isinstance(short, Tensor) else short


def lengths(batch: Batch) -> Tensor:
    """How much of every example is no padding, as far as that shows: entries along the second axis
    that are not the same as all before, or behind, them; of all tensors together."""
    found = torch.zeros(batch_size(batch), dtype=torch.int64)
    for t in tree_leaves(batch):
        if not isinstance(t, Tensor) or t.dim() < 2 or t.shape[1] < 2 or not t.numel():
            continue
        rows = t.detach().reshape(len(t), t.shape[1], -1)
        moves = (rows[:, 1:] != rows[:, :-1]).any(2).cpu()
        ends = moves.flip(1).long().argmax(1)
        inside = moves.shape[1] - ends - moves.long().argmax(1)
        found += torch.where(moves.any(1), inside, 0)
    return found
