"""Try the layer rules on two examples before they are trusted with a model.

Two facts are checked on real rows of the first batch, under the same random numbers:

    alone     the loss of each and its gradient are the same whoever stands beside it, and the loss
              also with a third example in the batch, with up to twelve, and beside an extreme one
              (10⁴ times as large, infinite, NaN: on a CPU alone) or one that was cut short (zeros
              in the place of its second half; labels −100, −1: on a CPU alone); the gradient of
              both losses is the sum of the gradients, however large one of them is, and that of the
              first is the same with a third example in the batch
    exact     per parameter, the squared norms of both examples and the sum of their gradients
              equal those of plain autograd, also where one of them is 10⁴ times as large

What mixes batches of some sizes only does nothing to two: `batch_check` looks at whole ones.

A hook that changes an output, a batch flattened the other way or examples that mix all fail here,
and so does a weight used outside its layer where these two have a gradient there (`outside_use`
asks the graph). The caller then writes gradients out instead. No state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from noshuffle.clipping.check import as_written, trainable
from noshuffle.clipping.forms import GradientForm
from noshuffle.clipping.layers import Mixes, NotByLayer, NotNow, without_gradient
from noshuffle.clipping.objective import Batch, Loss, _is_vmap_limit, batch_losses, batch_size, take
from noshuffle.clipping.products import HALF
from noshuffle.clipping.rule_check import by_autograd, inexact, joined, length
from noshuffle.clipping.tape import GradientTape, rewritten, with_rewrite
from noshuffle.clipping.trial_rows import (
    EXTREMES,
    cut_short,
    extremes,
    finite_rows,
    first_rows,
    of_rounded,
    unlike_pair,
    usual,
)
from noshuffle.clipping.trial_runs import (
    FIXED,
    TrialRuns,
    convolves_by_tf32,
    finite_gradients,
    gradient_of,
    is_low,
    loss_tolerance,
    with_same_rng,
)

#: Examples that stand beside each other in the trial, at most; from sixteen on a CPU packs weights,
#: which takes megabytes.
TRIAL_ROWS = 12
#: How code refuses numbers that it does not take.
REFUSALS = (RuntimeError, ValueError, LookupError, ArithmeticError, AssertionError)


def _alone(
    run: Callable[[tuple[Any, ...]], Tensor],
    pair: Batch,
    losses: Tensor,
    truth: Sequence[Sequence[Tensor | None]],
    params: list[nn.Parameter],
    *,
    low: bool,
) -> None:
    """Raise Mixes unless each example has the same loss and gradient beside its copy.

    Shapes are the same and so are the operations on each row: hardly a bit should differ. The
    gradient shows what a gate that is still zero hides from the loss.
    """
    for i, own in enumerate(truth or ((), ())):
        with torch.enable_grad():
            again = run(take(pair, torch.tensor([i, i], device="cpu")))[i]
        gap = abs(float(again.detach()) - float(losses[i].detach()))
        if not gap <= (2e-3 if low else 1e-4) * max(abs(float(losses[i].detach())), 1e-6):
            raise Mixes("the loss of an example changes with the other examples of its batch")
        if not own:
            continue
        # Nothing of a gradient is kept: the next one takes its memory.
        moved = length(own, torch.autograd.grad(again, params, allow_unused=True))
        size = length(own)
        tolerance = (2e-2 if low else 1e-4) * size + 1e-12
        if not moved <= tolerance and not low and losses.is_cuda:
            # Attention and convolutions on a GPU may add up in any order.
            with torch.enable_grad():
                same = run(pair)[i]
            gap = length(own, torch.autograd.grad(same, params, allow_unused=True))
            tolerance = max(tolerance, min(3.0 * gap, 5e-3 * size))
        if not moved <= tolerance:
            raise Mixes("the gradient of an example changes with the other examples of its batch")


def _beside(run: Callable[..., Tensor], pair: Batch, batch: Batch) -> Tensor:
    """The losses of the pair beside further examples of its batch, as many as fit the device.

    What mixes large batches only, or such as are divided by four, is not seen in two.
    """
    rows, size = pair, min(batch_size(batch), TRIAL_ROWS)
    if size > 2:
        rest = finite_rows(batch, *range(2, size))
        rows = tree_map(lambda a, b: torch.cat([a, b]) if isinstance(a, Tensor) else a, pair, rest)
    while True:
        try:
            return run(rows)
        except torch.OutOfMemoryError:
            if batch_size(rows) <= 3:
                raise
        rows = take(rows, slice(max(2, batch_size(rows) // 2)))


#: The pair, and the same with a third example.
_MANY = [0, 1], [0, 1, 1]


def _counted(
    model: nn.Module,
    run: Callable[..., Tensor],
    pair: Batch,
    batch: Batch,
    *,
    low: bool,
    params: Sequence[nn.Parameter] = (),
) -> None:
    """Raise Mixes if the loss of an example depends on how many there are (a batch mean), or
    its gradient by `params` (a function of one's own that divides by them on the way back).

    A loss may move as far as rounding of its inputs moves it, which is far where it is all but
    cancelled. Masks differ with the number, so that random numbers are fixed.
    """
    fixed, is_coarse = partial(run, seed=FIXED[0]), low or convolves_by_tf32(model)
    with without_gradient(), ExitStack() as stack:
        two = fixed(pair)
        if not torch.equal(two, run(pair, seed=FIXED[1])):  # masks of dropout would differ
            for module in model.modules():
                stack.callback(setattr, module, "training", module.training)
                module.training = False
            two = fixed(pair)
            if not torch.equal(two, run(pair, seed=FIXED[1])):
                return
        three, more = (
            fixed(take(pair, torch.tensor([0, 1, 1], device="cpu"))),
            _beside(fixed, pair, batch),
        )
        moved = (of_rounded(fixed, pair) - two).abs()
        with torch.enable_grad():
            ran = (
                fixed(take(pair, torch.tensor(i, device="cpu")))[:1]
                for i in (_MANY if params else ())
            )
            grads = [gradient_of(first, params) for first in ran]
    if grads and not length(*grads) <= 5e-2 * length(grads[0]) + 1e-12:
        raise Mixes("the gradient of an example changes with the number of examples")
    for a, room, *others in zip(two.tolist(), moved.tolist(), three.tolist(), more.tolist()):
        if not all(abs(a - b) <= loss_tolerance(a, low=is_coarse) + room for b in others):
            raise Mixes("the loss of an example changes with the number of examples")


def _beside_extremes(
    run: Callable[[Batch], Tensor], pair: Batch, losses: Tensor, *, low: bool
) -> None:
    """Raise Mixes if an extreme example moves the loss of another one.

    A batch that the model does not take (it checks its inputs, say) is none that it is trained on.
    """
    own = float(losses[0].detach())
    for rows in extremes(pair):
        try:
            with without_gradient():
                gap = abs(float(run(rows)[0]) - own)
        except REFUSALS:
            continue
        if not gap <= (2e-3 if low else 1e-4) * max(abs(own), 1e-6):
            raise Mixes("the loss of an example changes beside one that is extreme")


def _beside_short(run: Callable[[Batch], Tensor], pair: Batch, *, low: bool) -> None:
    """Raise Mixes if the loss of an example changes with the length of the other one, or with how
    many labels of the other one count."""
    for short, whole in cut_short(pair):
        try:
            with without_gradient():
                one, other = float(run(short)[0]), float(run(whole)[0])
        except REFUSALS:
            continue
        if math.isfinite(one) and not abs(one - other) <= (2e-3 if low else 1e-4) * max(
            abs(one), 1e-3
        ):
            raise Mixes(
                "the loss of an example changes with the length, or the labels, of another one"
            )


def _sums_up(
    losses: Tensor,
    truth: Sequence[list[Tensor | None]],
    params: list[nn.Parameter],
    *,
    low: bool,
) -> None:
    """Raise Mixes unless the gradient of ℓ₀ + k ℓ₁ is g₀ + k g₁, which are used up: a backward pass
    that looks at the size of all gradients (a hook, a function of one's own) lets examples mix."""
    large = 2.0**6 if low else 2.0**14
    seeds = torch.tensor([1.0, large], dtype=losses.dtype, device=losses.device)
    with torch.enable_grad():  # whatever the loop has set around its step
        total = (losses * seeds).sum()  # torch 2.13 imports sympy (0.5 s) where seeds are given
    due = joined(*truth, factor=large)
    own = torch.autograd.grad(total, params, retain_graph=True, allow_unused=True)
    both = [(a, b) for a, b in zip(due, own) if a is not None and b is not None]
    gap, size = length((a for a, _ in both), (b for _, b in both)), length(a for a, _ in both)
    if gap > 2e-2 * size + 1e-12 and math.isfinite(gap):
        raise Mixes("the gradient of an example changes with the size of the others")


def tried(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    forms_of: Callable[[tuple[Any, ...]], dict[str, list[GradientForm]]],
) -> None:
    """Raise NotByLayer unless the rules agree with plain autograd on two examples."""
    few = first_rows(batch)
    few = take(few, usual(few))
    pair = unlike_pair(few)
    params = trainable(model)
    own_params = list(params.values())
    tape, inside, held = GradientTape(2, is_on=False), with_rewrite(model), list(model.parameters())

    def run(rows: Batch, seed: int = FIXED[0]) -> Tensor:
        with as_written(model), rewritten(model, tape, only=inside), with_same_rng(held, seed):
            return batch_losses(model, loss_fn, rows)

    losses, truth = by_autograd(run, pair, params)
    if not _is_finite(losses, truth):
        # One example must not decide how the others are added up: that rounds them otherwise.
        del losses, truth  # one graph, and its gradients, at a time
        some = take(few, slice(TRIAL_ROWS))
        good = finite_gradients(run, some, own_params)
        pair = unlike_pair(take(some, good) if len(good) else some)
        losses, truth = by_autograd(run, pair, params)
    if not _is_finite(losses, truth):
        raise NotNow("no loss of the first examples, or no gradient, is finite")
    forms = _read_forms(model, forms_of, pair)
    read = [t for each in forms.values() for form in each for t in vars(form).values()]
    is_half = any(isinstance(t, Tensor) and t.dtype in HALF for t in (*read, *own_params))
    low = is_half or is_low(model, losses)  # forms may be wider than what autograd went through
    _alone(run, pair, losses, truth, own_params, low=low)
    # What mixes is said before what is not exact; gradients are let go of when they were read.
    wrong = inexact(params, forms, truth, low=low)
    del forms, read
    if truth:
        _sums_up(losses, truth, own_params, low=low)
    losses = losses.detach()
    _counted(model, run, pair, batch, low=low, params=own_params if truth else ())
    _beside_extremes(run, pair, losses, low=low)
    _beside_short(run, pair, low=low)
    if wrong:
        raise NotByLayer(wrong)
    for far in () if is_half else extremes(pair, EXTREMES[:1]):  # one may be used otherwise there
        with suppress(*REFUSALS):
            losses, truth = by_autograd(run, far, params)
            if _is_finite(losses, truth):
                wrong = inexact(params, _read_forms(model, forms_of, far), truth, low=True)
        if wrong:
            raise NotByLayer(wrong)


def _is_finite(losses: Tensor, grads: Sequence[Sequence[Tensor | None]]) -> bool:
    return bool(torch.isfinite(losses).all()) and math.isfinite(sum(map(length, grads)))


def _read_forms(
    model: nn.Module, forms_of: Callable[[Batch], dict[str, list[GradientForm]]], pair: Batch
) -> dict[str, list[GradientForm]]:
    try:
        with with_same_rng(model):
            return forms_of(pair)
    except RuntimeError as error:
        if not _is_vmap_limit(error):
            raise
        raise NotByLayer(f"a layer without a rule does not run under vmap ({error})") from error


def losses_alone(
    model: nn.Module, loss_fn: Loss, batch: Batch, *, seed: int, restores: bool = False
) -> None:
    """Raise Mixes if two examples change the losses of each other: the trial without gradients.

    `restores`: every run begins with the model as it is now.
    """
    pair, run = unlike_pair(batch), TrialRuns(model, loss_fn, seed=seed, restores=restores)
    with as_written(model), rewritten(model, GradientTape(2, is_on=False)):
        losses = run(pair)
        if not bool(torch.isfinite(losses).all()):
            raise NotNow("a loss of the two examples is not finite")
        low = is_low(model, losses)
        _alone(run, pair, losses, (), [], low=low)
        _counted(model, run, pair, batch, low=low)
        _beside_extremes(run, pair, losses, low=low)
        _beside_short(run, pair, low=low)
