"""Whether row b of every layer is example b: the gradient of some losses lies in their rows alone.

    losses    a  .  .  d  .  f        of these the gradient is taken
    rows      x  0  0  x  0  x        and what layer rules make of it, row by row

A model that orders its examples by Python's `sorted` or by NumPy, or lays them out in the places of
an expert by a running count, hands its layers rows of which only the data say whose they are. No
loss shows that, and no gradient by autograd: what lies in the row of somebody else is clipped by
the norm of somebody else. Nothing is compared from run to run, so that random numbers, and what a
model changes by itself, do not matter. No state.

>>> from noshuffle.clipping.forms import DenseGradient
>>> def swapped(rows, asked):
...     grads = torch.zeros(2, 3)
...     grads[1 - asked] = 1.0
...     return {"w": [DenseGradient(grads)]}
>>> in_place(swapped, (torch.ones(2, 1),), torch.tensor([0]))
Traceback (most recent call last):
    ...
noshuffle.clipping.layers.Mixes: a layer sees the rows of some examples in the place of others
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor, nn

from noshuffle.clipping.forms import GradientForm, merge, squares
from noshuffle.clipping.isolation_check import REFUSALS
from noshuffle.clipping.layers import Mixes
from noshuffle.clipping.objective import Batch, batch_size, take
from noshuffle.clipping.products import exactly
from noshuffle.clipping.statefulness import put_back_after
from noshuffle.clipping.trial_rows import (
    EXTREMES,
    cut_short,
    extremes,
    filled,
    finite_rows,
    unlike_pair,
    usual,
)
from noshuffle.clipping.trial_runs import new_seed, with_same_rng

#: The forms of some rows, from the gradient of all losses or of those of the examples asked for.
FormsFn = Callable[..., dict[str, list[GradientForm]]]
#: Squared, the part of a gradient that may lie elsewhere, and what is added where squares vanish.
SHARE, LEAST = 1e-6, 1e-16
CPU = torch.device("cpu")
#: Halves of a batch that are asked for: of two rows that were exchanged each sees half the time.
HALVES = 2
#: Where the row stands that is alone of its kind, and where the others do.
_PLACE, _OTHERS = 1, [0, 2, 3]
#: Extremes whose gradients may be finite, and numbers of a usual size that are below zero.
FAR = (-1.0, *filter(math.isfinite, EXTREMES))
#: Pairs that are shown where gates may be shut, and rows in which such are looked for.
PAIRS, _LOOKED = 4, 8


def in_place(forms_of: FormsFn, rows: Batch, asked: Tensor, *, device: torch.device = CPU) -> None:
    """Raise Mixes if the gradient of the losses that are asked for lies in other rows, too.

    What is not finite says nothing: 0·∞ is NaN in any row.
    """
    others = torch.ones(batch_size(rows), dtype=torch.bool, device="cpu")
    others[asked] = False
    inside = outside = 0.0
    found = forms_of(rows, asked)  # the model runs as in a step, under autocast, too
    with exactly(device):
        for forms in found.values():
            own = squares(merge(forms)).double().nan_to_num(0.0, 0.0, 0.0).cpu()
            if len(own) != len(others):
                continue  # more rows than examples, of which the trial says more
            outside += float(own[others].sum())
            inside += float(own[~others].sum())
    if outside > SHARE * inside + LEAST:
        raise Mixes("a layer sees the rows of some examples in the place of others")


def _one_of_its_kind(pair: Batch) -> Iterator[Batch]:
    """The second of two rows, as it is, extreme or whole beside a short one, among three of the
    other. It stands at `_PLACE`: no order by what rows hold, and no turn of them, leaves it there.
    """
    for rows in (pair, next(iter(cut_short(pair)))[1], *extremes(pair, FAR)):
        yield take(rows, torch.tensor([0, 1, 0, 0], device="cpu"))


def pair_in_place(model: nn.Module, forms_of: FormsFn, pair: Batch) -> None:
    """Raise Mixes unless the second of two rows is seen in its place among others of the first.

    What orders rows by what they hold, and what lays them out by kind, from the front or from the
    back, moves one that is alone of its kind. The others are asked for as well: an extreme row may
    have no gradient (a gate that is shut), and where it has left its place another stands there.
    """
    for rows in _one_of_its_kind(pair):
        for asked in ([_PLACE], _OTHERS):
            with suppress(*REFUSALS), with_same_rng(model):  # numbers that the model does not take
                in_place(forms_of, rows, torch.tensor(asked, device="cpu"))


def pairs_in_place(model: nn.Module, forms_of: FormsFn, rows: Batch) -> None:
    """Raise Mixes unless rows are seen in their places in a pair of them, or in several.

    The gate of an ordinary row may be shut, too (a ReLU), so that nothing is seen of the layers
    behind it: where some rows have a gradient that others do not have, several are first.
    """
    size = batch_size(rows)
    is_gated = _is_gated(model, forms_of, take(rows, slice(_LOOKED)))
    for first in range(min(size, PAIRS) if is_gated else 1):
        turned = (torch.arange(size, device="cpu") + first) % size
        pair_in_place(model, forms_of, unlike_pair(take(rows, turned)))


def _is_gated(model: nn.Module, forms_of: FormsFn, rows: Batch) -> bool:
    """Whether a parameter has gradients of some rows, and none of others."""
    with suppress(*REFUSALS), with_same_rng(model):
        found = [squares(merge(forms)) > LEAST for forms in forms_of(rows).values()]
        return any(bool(some.any()) and not bool(some.all()) for some in found)
    return True


def batch_in_place(model: nn.Module, forms_of: FormsFn, batch: Batch) -> None:
    """Raise Mixes unless the rows of a whole batch are in their places; the model is as before.

    A batch that does not fit the device a second time is halved until it does.
    """
    rows = finite_rows(batch, *range(batch_size(batch)))
    rows = filled(rows, usual(rows))
    done, seed = 0, new_seed()
    while done < HALVES and (size := batch_size(rows)) > 1:
        picks = sorted(range(size), key=lambda _: secrets.randbits(62))[: size // 2]
        device = next(model.parameters()).device
        try:
            with put_back_after(model), with_same_rng(model, seed):
                in_place(forms_of, rows, torch.tensor(picks, device="cpu"), device=device)
            done += 1
        except torch.OutOfMemoryError:
            rows = take(rows, slice(size // 2))
