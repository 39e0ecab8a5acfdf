"""Whether the examples of a whole batch are apart: some of them beside others than they had.

    rows   a  b  c  d  e  f  g  h        losses and gradient of b and e
    once   x  b  x  x  e  x  x  x        the same, where all others are one example x

Shapes, masks of dropout and the sizes that a model branches on are the same in both, so hardly a
bit of a loss may differ; that is asked with x short (padding that is cut to the longest of a batch)
and with x long. Some examples are also run among themselves. With gradients, `batch_gradients` asks
the same of theirs. What is found here and not in two examples
(`isolation_check`): examples that mix in batches of one size or parity, or from a number on, in the
forward pass or on the way back. No state.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from noshuffle.clipping.batch_gradients import adds_up, same_beside, same_by_few
from noshuffle.clipping.check import as_written, trainable
from noshuffle.clipping.conv_parts import backward_in_parts
from noshuffle.clipping.isolation_check import losses_alone
from noshuffle.clipping.layers import Mixes, NotByLayer, NotNow, without_gradient
from noshuffle.clipping.objective import Batch, Loss, batch_size, take
from noshuffle.clipping.rule_check import length
from noshuffle.clipping.statefulness import put_back_after
from noshuffle.clipping.tape import GradientTape, rewritten
from noshuffle.clipping.trial_rows import filled, finite_rows, lengths, of_rounded, usual
from noshuffle.clipping.trial_runs import (
    FIXED,
    TrialRuns,
    convolves_by_tf32,
    finite_gradients,
    is_low,
    loss_tolerance,
    new_seed,
)

#: So many examples of a batch keep their place while the others are exchanged.
FEW_ROWS = 6
#: Below this a loss is compared by its distance: the terms it is made of are larger.
LEAST_LOSS = 2e-2


def still_apart(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    *,
    has_gradients: bool = True,
) -> None:
    """Raise Mixes if examples of this batch depend on the others, NotNow if none can be asked; the
    model is as before. Without gradients two examples are tried, too (`isolation_check.tried` has
    done so with them). The seed of all random numbers is drawn from the operating system.

    A model may change from run to run by itself (a factor that grows): what is found is asked once
    more with every run from the same state.
    """
    seed = new_seed()

    def ask(*, restores: bool) -> None:
        if not has_gradients:
            losses_alone(model, loss_fn, batch, seed=seed, restores=restores)
        how = {"has_gradients": has_gradients, "restores": restores}
        apart_in(model, loss_fn, batch, seed=seed, **how)

    with put_back_after(model, has_trained=has_gradients):
        try:
            ask(restores=False)
        except Mixes as reason:
            found = reason
        else:
            return
    try:
        ask(restores=True)
    except NotByLayer:
        raise
    except RuntimeError:  # autograd: a tensor that a backward pass needs was put back
        raise found from None


def apart_in(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    *,
    seed: int,
    has_gradients: bool = True,
    restores: bool = False,
) -> None:
    """Raise Mixes if examples of this batch depend on the others, NotNow if none can be asked.

    A batch that does not fit the device a second time is halved until it does.
    """
    rows = finite_rows(batch, *range(batch_size(batch)))
    params = list(trainable(model).values()) if has_gradients else []
    run = TrialRuns(model, loss_fn, params, seed=seed, restores=restores)
    while batch_size(rows) > 1:
        try:
            asks = torch.enable_grad() if params else nullcontext()  # the loop may be under no_grad
            tape, small = GradientTape(2, is_on=False), backward_in_parts(model)
            with as_written(model), rewritten(model, tape), small, asks:
                is_asked, good = _apart(run, rows), usual(rows)
                if params and (not is_asked or len(good) < batch_size(rows)):
                    rows = filled(rows, good)  # beside huge gradients all others are as nothing
                    if not _apart(run, rows):
                        good = finite_gradients(run, rows, params)
                        if not len(good):
                            raise NotNow("no gradient of an example is finite")
                        _apart(run, filled(rows, good))
            return
        except torch.OutOfMemoryError:
            rows = take(rows, slice(batch_size(rows) // 2))
    raise NotNow("a batch of one example")


def _apart(run: TrialRuns, rows: Batch) -> bool:
    """Raise if examples of these rows depend on the others; whether all gradients could be asked.

    One example may hide those of all: where its own would be infinite, 0·∞ is added to each.
    """
    kept, others = _chosen(rows)
    losses = run(rows)
    kept = kept[losses.detach()[kept].isfinite().cpu()]
    if not len(kept):
        raise NotNow("no loss of the examples that were chosen is finite")
    own = losses[kept]
    low = is_low(run.model, own)
    grads = run.gradient(own)
    is_asked = math.isfinite(length(grads))
    own, losses = own.detach(), losses.detach()  # what a graph keeps is let go of: one at a time
    is_coarse = low or convolves_by_tf32(run.model)
    _by_number(run, rows, losses, kept, grads, low=is_coarse)
    for other in others:
        index = torch.full((len(losses),), other, device="cpu")
        index[kept] = kept
        there = run(take(rows, index))[kept]
        if not _same(own, there, low=low) and _stays(run, rows, kept, own, there, low=low):
            raise Mixes("the loss of an example changes with the other examples of its batch")
        if other == others[0]:
            is_asked = same_beside(run, rows, kept, grads, there, low=low) and is_asked
        del there
    return adds_up(run, rows, losses, kept, grads) and is_asked


def _by_number(
    run: TrialRuns,
    rows: Batch,
    losses: Tensor,
    kept: Tensor,
    grads: Sequence[Tensor | None],
    *,
    low: bool,
) -> None:
    """Raise unless some examples have their losses, and those that were kept their gradient,
    without the others.

    Not asked where random numbers show: the same example has other masks in another batch. Where
    they are drawn and do not (a dropout of one in a thousand), they will in one batch or another:
    what counts is seen under every fixed seed.
    """
    size = len(losses)
    picks = torch.linspace(0, size - 1, min(size, FEW_ROWS), device="cpu").round().long()
    with without_gradient():
        one, other = (run(take(rows, picks), seed).nan_to_num() for seed in FIXED[:2])
    if not torch.equal(one, other):
        return
    for seed in FIXED if run.has_drawn else FIXED[:1]:
        if run.has_drawn:
            losses = run(rows, seed)
            grads, losses = run.gradient(losses[kept], seed), losses.detach()
        try:
            _among_themselves(run, rows, losses, picks, seed=seed, low=low)
            same_by_few(run, rows, kept, grads, seed=seed, low=low)
        except Mixes as reason:
            found = reason
        else:
            return
    raise found


def _among_themselves(
    run: TrialRuns, rows: Batch, losses: Tensor, picks: Tensor, *, seed: int, low: bool
) -> None:
    """Raise unless the examples that were picked have their losses without the others."""
    few = take(rows, picks)
    with without_gradient():
        found = run(few, seed)
        moved = (of_rounded(partial(run, seed=seed), few) - found).abs()
    among_all = losses[picks.to(losses.device)]
    for own, whole, room in zip(found.tolist(), among_all.tolist(), moved.tolist()):
        # Where examples stay apart, one that is not finite is that in any batch.
        if math.isfinite(own) and not abs(own - whole) <= loss_tolerance(own, low=low) + room:
            raise Mixes("the loss of an example changes with the number of examples")


def _chosen(rows: Batch) -> tuple[Tensor, list[int]]:
    """Who keeps its place, short ones and others; and the examples, short and long, that the rest
    becomes."""
    long = lengths(rows)
    order = long.argsort(stable=True).tolist()
    count = min(FEW_ROWS, len(order) // 2)
    kept = order[: (count + 1) // 2]
    drawn = [i for i in range(len(order)) if i not in kept]
    while len(kept) < count:
        kept.append(drawn.pop(secrets.randbelow(len(drawn))))
    short = [i for i in drawn if long[i] == long[order[0]]] or order[:1]
    tall = [i for i in drawn if long[i] == long[order[-1]]] or order[-1:]
    return torch.tensor(kept, device="cpu"), [short[0], tall[-1]]


def _same(own: Tensor, there: Tensor, *, low: bool, room: float | Tensor = 0.0) -> bool:
    a, b = own.detach().double(), there.detach().double()
    allowed = (2e-3 if low else 1e-4) * a.abs().clamp(min=LEAST_LOSS) + room
    return bool(((a - b).abs() <= allowed).all())


def _stays(
    run: TrialRuns,
    rows: Batch,
    kept: Tensor,
    own: Tensor,
    there: Tensor,
    *,
    low: bool,
) -> bool:
    """Whether losses that differ are the same from run to run, and firm against rounding."""
    room = (of_rounded(run, rows)[kept] - own).detach().abs().double()
    return _same(own, run(rows)[kept], low=low) and not _same(own, there, low=low, room=4.0 * room)
