"""Try the layer rules on two examples before they are trusted with a model.

Two facts are checked on real rows of the first batch, under the same random numbers:

    alone     the loss of example 0 is the same whoever stands beside it
    exact     per parameter, the squared norms of both examples and the sum of their gradients
              equal those of plain autograd

A weight used outside its layer, a hook that changes an output, a batch flattened the other way or
examples that mix all fail here, and the caller then writes gradients out instead. The answer
depends on data only in which of two equal computations is run. No state.

>>> close(1.0, 1.0005, low=False), close(1.0, 1.2, low=False)
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from noshuffle.clipping.check import trainable
from noshuffle.clipping.forms import Form, merge, squares
from noshuffle.clipping.layers import NotByLayer, NotNow
from noshuffle.clipping.objective import (
    Criterion,
    ModelLoss,
    _is_vmap_limit,
    batch_losses,
    batch_size,
    take,
)
from noshuffle.clipping.tape import Tape, rewritten
from noshuffle.errors import InvalidInput


def close(found: float, truth: float, *, low: bool, room: float = 0.0) -> bool:
    """Whether a norm agrees with the true one as far as the precision allows (`low`: half).

    `room` is the size of the whole gradient: a part that is pure rounding error has no digits to
    agree on. A norm that is somewhat too large (steps that nearly cancel) is safe, one that is too
    small is not.
    """
    tolerance = 0.05 if low else 1e-3
    below = found >= truth * (1.0 - tolerance) - 1e-5 * room - 1e-12
    return below and found <= truth * (1.0 + 10.0 * tolerance) + 0.1 * room + 1e-12


def _rows(batch: tuple[Any, ...], *picks: int) -> tuple[Any, ...]:
    """Some examples, with everything non-finite replaced: the trial is about the model."""
    index = [i % batch_size(batch) for i in picks]

    def clean(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return torch.nan_to_num(t, posinf=1.0, neginf=-1.0) if t.is_floating_point() else t

    cleaned: tuple[Any, ...] = tree_map(clean, take(batch, torch.tensor(index)))
    return cleaned


@contextmanager
def _same_luck(model: nn.Module) -> Iterator[None]:
    """Random numbers that leave the user's generators as they were, the same in every block."""
    devices = {p.device.index or 0 for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        torch.manual_seed(0)
        yield


@contextmanager
def probe(
    model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]
) -> Iterator[Callable[[int], Tensor]]:
    """A function that runs the first n examples, for looking at shapes."""

    def run(n: int) -> Tensor:
        with _same_luck(model):
            try:
                return batch_losses(model, loss_fn, _rows(batch, *range(n)))
            except InvalidInput as error:
                raise NotByLayer(str(error)) from error

    yield run


def tried(
    model: nn.Module,
    loss_fn: Criterion | ModelLoss,
    batch: tuple[Any, ...],
    forms_of: Callable[[tuple[Any, ...]], dict[str, list[Form]]],
) -> None:
    """Raise NotByLayer unless the rules agree with plain autograd on two examples."""
    pair = _rows(batch, 0, 1)
    params = trainable(model)
    low = any(p.dtype in (torch.float16, torch.bfloat16) for p in params.values())
    low = low or any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda"))
    with rewritten(model, Tape(2, is_on=False)):
        with _same_luck(model), torch.enable_grad():
            losses = batch_losses(model, loss_fn, pair)
        with _same_luck(model), torch.no_grad():
            beside = batch_losses(model, loss_fn, _rows(batch, 0, 0))
    if not bool(torch.isfinite(losses).all()):
        raise NotNow("the loss of the first two examples is not finite")
    gap = abs(float(beside[0]) - float(losses[0].detach()))
    if gap > (0.05 if low else 1e-4) * max(abs(float(beside[0])), 1e-6):
        raise NotByLayer("the loss of an example changes with the other examples of its batch")
    one_hot = torch.eye(2, dtype=losses.dtype, device=losses.device)
    own_params = list(params.values())
    truth = [
        torch.autograd.grad(losses, own_params, pick, retain_graph=True, allow_unused=True)
        for pick in (one_hot if losses.requires_grad else ())
    ]
    try:
        with _same_luck(model):
            forms = forms_of(pair)
    except RuntimeError as error:
        if not _is_vmap_limit(error):
            raise
        raise NotByLayer(f"a layer without a rule does not run under vmap ({error})") from error
    room = [float(sum(g.double().square().sum() for g in t if g is not None)) ** 0.5 for t in truth]
    room = room or [0.0, 0.0]
    for i, (name, parameter) in enumerate(params.items()):
        rows = [torch.zeros_like(parameter) if t[i] is None else t[i] for t in truth]
        if not rows:
            rows = [torch.zeros_like(parameter)] * 2
        own = merge(forms.get(name, []))
        found = squares(own).double().sqrt() if own else torch.zeros(2)
        exact = [float(row.norm()) for row in rows]
        total = sum(
            (f.total(torch.ones(2, device=parameter.device)) for f in own), start=torch.zeros(())
        )
        summed = rows[0] + rows[1]
        gap = float((total.to(summed) - summed).norm()) if own else float(summed.norm())
        fits = all(close(float(f), e, low=low, room=r) for f, e, r in zip(found, exact, room))
        if not fits or gap > (0.1 if low else 2e-3) * max(exact) + 1e-5 * sum(room):
            raise NotByLayer(
                f"the gradient of {name!r} by layer rules differs from autograd's: it is used "
                "outside its own layer, or examples mix before it"
            )
