"""Rows that a model is tried on: finite, usual, unlike, rounded, extreme and short ones.

The trial is about the model, not about the data. No state.

>>> pair = unlike_pair((torch.ones(3, 2), torch.tensor([1, 1, 0])))
>>> pair[1].tolist()
[1, 0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.clipping.layers import NotNow, tensors
from noshuffle.clipping.objective import Batch, batch_size, of_each, take

FoundT = TypeVar("FoundT")
#: Factors of absolute values, and what is put in their place.
EXTREMES = (1e4, math.inf, -1e4, math.nan)
#: An example with a number so many times as large as is usual is not tried.
UNUSUAL = 100.0
#: Labels that losses leave out: torch's `ignore_index`, and what many write for "unknown".
IGNORED = (-100, -1)


def finite_rows(batch: Batch, *picks: int) -> Batch:
    """Some examples, with everything non-finite replaced: the trial is about the model."""
    size = batch_size(batch)
    index = torch.tensor([i % size for i in picks], device="cpu")

    def clean(t: Tensor) -> Tensor:
        return torch.nan_to_num(t, posinf=1.0, neginf=-1.0) if t.is_floating_point() else t

    cleaned: Batch = of_each(clean, take(batch, index))
    return cleaned


def first_rows(batch: Batch) -> Batch:
    """The first examples, finite ones."""
    return finite_rows(batch, *range(min(batch_size(batch), 64)))


def usual(rows: Batch) -> Tensor:
    """Which examples have no number far larger than most have; all if none is left.

    One example must not decide how the others are added up, which rounds them otherwise: rules and
    autograd need not agree where squares overflow.
    """
    fine = torch.ones(batch_size(rows), dtype=torch.bool, device="cpu")
    for t in tensors(rows):
        if t.is_floating_point() and t.numel():
            largest = t.detach().reshape(len(t), -1).abs().amax(1).double().cpu()
            fine &= largest <= UNUSUAL * largest.median().clamp(min=1.0)
    return (fine if bool(fine.any()) else ~fine).nonzero().flatten()


def filled(rows: Batch, part: Tensor) -> Batch:
    """As many rows, all of them from a part."""
    return take(rows, part[torch.arange(batch_size(rows), device="cpu") % len(part)])


def unlike_pair(batch: Batch) -> Batch:
    """The first example and one that differs from it in as many tensors as can be.

    Beside its own copy an example would look undisturbed whatever the model does. Real numbers
    that are the same in all examples are changed in the second one, whole ones to whole ones (a
    loss may take no other label); integers, where nothing else differs, are put in reverse order.
    """
    few = first_rows(batch)
    leaves = tensors(few)
    differs = torch.stack([(t != t[:1]).reshape(len(t), -1).any(1).cpu() for t in leaves])
    other = int(differs.sum(0).argmax())
    alike = not bool(differs[:, other].any())

    def unlike(t: Any) -> Any:
        if not isinstance(t, Tensor) or not torch.equal(t[0], t[1]):
            return t
        if t.is_floating_point():
            is_whole = bool((t == t.round()).all())
            return torch.cat(
                [t[:1], _other_whole(t[1:]) if is_whole else t[1:] * 0.71828 + 0.14159]
            )
        return torch.cat([t[:1], _backwards(t[1:])]) if alike else t

    pair: Batch = tree_map(unlike, take(few, torch.tensor([0, other], device="cpu")))
    if all(torch.equal(t[0], t[1]) for t in tensors(pair)):
        raise NotNow("all examples of the batch are the same")
    return pair


def _backwards(t: Tensor) -> Tensor:
    """The numbers of every row in reverse order."""
    return t.flip(list(range(1, t.dim())))


def _other_whole(t: Tensor) -> Tensor:
    """Other whole numbers that may stand for labels: of a table, counts, ±1, or 0 and 1.

    >>> rows = [[1.0, 0.0, 0.0]], [[0.0]], [[-1.0]], [[7.0]]
    >>> [_other_whole(torch.tensor(row)).tolist() for row in rows]
    [[[0.0, 0.0, 1.0]], [[1.0]], [[1.0]], [[6.0]]]
    """
    turned = _backwards(t)
    if not torch.equal(turned, t):
        return turned
    if bool(((t == 0) | (t == 1)).all()):
        return 1.0 - t
    return -t if bool((t.abs() == 1).all()) else t - t.sign()


def rounded(t: Any, *, has_whole: bool = True) -> Any:
    """Real numbers moved by some roundings, each second one the other way; tensors of whole ones
    only if `has_whole`."""
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    if not has_whole and bool((t == t.round()).all()):
        return t
    signs = torch.ones(t.shape[1:].numel(), device=t.device, dtype=t.dtype)
    signs[1::2] = -1.0
    return t + t * signs.reshape(t.shape[1:]) * (16.0 * torch.finfo(t.dtype).eps)


def of_rounded(run: Callable[[Batch], FoundT], rows: Batch) -> FoundT:
    """What `run` makes of rows that were moved by some roundings.

    A loss may refuse labels that are not whole (`Bernoulli.log_prob`) or beyond a range
    (`binary_cross_entropy`): then whole numbers stay, or all of them.
    """
    for has_whole in (True, False):
        try:
            return run(tree_map(partial(rounded, has_whole=has_whole), rows))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            continue
    return run(rows)


def extremes(pair: Batch, hows: Sequence[float] = EXTREMES) -> Iterator[Batch]:
    """The pair with real numbers of its second example taken to extremes, the first as it was.

    What looks at the largest number of a batch, or for a NaN in it (`if x.max() > 1: x = x / 255`),
    does nothing beside ordinary rows. Whole numbers stay: an index must lie in its table. None on a
    GPU, where a value that an operation refuses ends the process.
    """
    numbers = [t for t in tensors(pair) if t.is_floating_point()]
    if any(t.device.type == "cpu" for t in numbers):
        for how in hows:
            yield tree_map(partial(_moved, how=how), pair)


def _moved(t: Any, how: float) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    far = t[1:].abs() * how if math.isfinite(how) else torch.full_like(t[1:], how)
    return torch.cat([t[:1], far])


def cut_short(pair: Batch) -> Iterator[tuple[Batch, Batch]]:
    """Two batches whose first example is the same and whose second one is whole and cut short.

    What trims padding to the longest of a batch, or divides by how many entries count, does nothing
    to rows of one length. Short, with a first example that is so, too: zeros in the second half of
    an axis, masks and numbers alike, half of a whole number that stands alone (a length), no for a
    yes. Short, with a first example as it was: −100 and −1 in the second half of whole numbers, or
    where they stand alone, one tensor after the other (labels to be ignored; not on a GPU, where an
    index outside its table ends the process).
    """
    short = tree_map(_short, pair)
    yield short, tree_map(_first_of, short, pair)
    for t in tensors(pair):
        if t.dtype in _WHOLE and t.device.type == "cpu":
            for value in IGNORED:
                yield pair, tree_map(_first_of, pair, tree_map(partial(_ignored, t, value), pair))


_WHOLE = (torch.int64, torch.int32, torch.int16)


def _short(t: Any) -> Any:
    if isinstance(t, Tensor) and t.dim() == 1:
        return t // 2 if t.dtype in _WHOLE else t & False if t.dtype is torch.bool else t
    return _half(t, 0)


def _ignored(only: Tensor, value: int, t: Any) -> Any:
    if t is not only:
        return t
    return torch.full_like(only, value) if only.dim() == 1 else _half(only, value)


def _half(t: Any, value: int) -> Any:
    """Another value in the second half of an axis."""
    if not isinstance(t, Tensor) or t.shape[1] < 2:
        return t
    short = t.clone()
    short[:, t.shape[1] // 2 :] = value
    return short


def _first_of(one: Any, other: Any) -> Any:
    return torch.cat([one[:1], other[1:]]) if isinstance(one, Tensor) else one


def lengths(batch: Batch) -> Tensor:
    """How much of every example is no padding, as far as that shows: entries along the second axis
    that are not the same as all before, or behind, them; of all tensors together."""
    found = torch.zeros(batch_size(batch), dtype=torch.int64, device="cpu")
    for t in tree_leaves(batch):
        if not isinstance(t, Tensor) or t.dim() < 2 or t.shape[1] < 2 or not t.numel():
            continue
        rows = t.detach().reshape(len(t), t.shape[1], -1)
        moves = (rows[:, 1:] != rows[:, :-1]).any(2).cpu()
        ends = moves.flip(1).long().argmax(1)
        inside = moves.shape[1] - ends - moves.long().argmax(1)
        found += torch.where(moves.any(1), inside, 0)
    return found
