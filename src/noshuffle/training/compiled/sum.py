"""The clipped sum in forms that a CUDA graph can hold, the slowest first.

    engine    the run's own clipping engine, as it is
    rules     layer rules (one backward pass), with a short way from forms to the sum
    written   gradients of every example written out by vmap, the same short way
    … in a matrix   either of the last two, clipped and summed in three kernels (`flat`)
    …, fused        either, traced to its operations and compiled by torch's inductor

All give Σ_b f_b·g_b with f_b = min(1, c/‖g_b‖) over the rows with weight one; they differ in how
many kernels they launch. None waits for the device, and none branches on data: a row that is left
out or not finite is replaced by zeros before it is multiplied, since 0·∞ is not 0. No state.

>>> import torch
>>> from torch import nn
>>> from noshuffle.clipping import Flat
>>> from noshuffle.clipping.forms import DenseGradient
>>> grads, keep = torch.tensor([[3.0, 4.0], [0.0, torch.inf]]), torch.tensor([True, True])
>>> forms, like = {"w": [DenseGradient(grads)]}, {"w": torch.zeros(2)}
>>> got = short(forms, like, torch.ones(2), keep, clip=Flat(1.0))
>>> [round(v, 4) for v in got.values["w"].tolist()], got.bad.tolist()
([0.6, 0.8], [False, True])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from noshuffle.clipping import Clip, Ghost, ModelLoss
from noshuffle.clipping.check import trainable
from noshuffle.clipping.factor import slack
from noshuffle.clipping.forms import DenseGradient, GradientForm, merge
from noshuffle.clipping.layers import NotByLayer
from noshuffle.clipping.objective import Criterion, batch_losses
from noshuffle.clipping.per_example import per_example_gradients
from noshuffle.clipping.products import no_autocast, wide
from noshuffle.clipping.units import Members, finish
from noshuffle.training.compiled.flat import Flattened, Forms, Sums, TotalFn
from noshuffle.training.compiled.staged import StagedUsers

#: Above this many numbers, gradients written out are not worth trying.
MOST_WRITTEN = 2**27

FormsFn = Callable[[tuple[Any, ...]], tuple[dict[str, list[GradientForm]], Tensor]]


def short(
    forms: Forms, like: Mapping[str, Tensor], losses: Tensor, keep: Tensor, *, clip: Clip
) -> Sums:
    """Clip every row and sum the kept ones, without waiting for the device.

    Guarantees: as `clipping.units.finish` without units. One row moves `values` by at most the
    bound of the clip; a row outside `keep` contributes exactly zero whatever it holds; a row with
    a NaN or infinite loss or norm contributes exactly zero and is marked.
    """
    own = {name: list(parts) for name, parts in forms.items()}
    found = finish(own, like, losses, Members(len(losses), keep), clip=clip)
    return Sums(found.values, found.losses, found.norms, found.bad)


def by_engine(
    engine: Any, model: nn.Module, loss_fn: Criterion | ModelLoss, *, clip: Clip
) -> TotalFn:
    """The run's engine as it is."""

    def total(batch: tuple[Any, ...], keep: Tensor) -> Sums:
        found = engine.clipped_sum(model, loss_fn, batch, clip=clip, weights=keep)
        return Sums(found.values, found.losses, found.norms, found.bad)

    return total


def rules(
    engine: Ghost,
    model: nn.Module,
    loss_fn: Criterion | ModelLoss,
    batch: Any,
    *,
    show: Callable[[Tensor], None] | None = None,
) -> FormsFn | None:
    """Gradients as forms by layer rules, if the engine has found them good for this model.

    `show` is handed the losses as soon as they are known, before the backward pass.
    """
    try:
        reading = engine.layers_for(model, loss_fn, batch)
    except NotByLayer:
        return None
    if reading is None:
        return None
    is_early = show is not None and reading.layout is not None

    def by_row(model: nn.Module, *batch: Any) -> Tensor:
        losses = batch_losses(model, loss_fn, batch)
        if show is not None:
            show(losses.detach())
        return losses

    shown = ModelLoss(by_row, by_row=True) if is_early else loss_fn

    def forms(batch: tuple[Any, ...]) -> tuple[dict[str, list[GradientForm]], Tensor]:
        found, losses = reading.forms(model, shown, batch)
        if show is not None and not is_early:  # under vmap no loss is known before all are
            show(losses)
        with no_autocast(losses.device):
            return {name: merge(own) for name, own in found.items()}, losses

    return forms


def written(model: nn.Module, loss_fn: Criterion | ModelLoss) -> FormsFn:
    """Gradients written out by vmap."""

    def forms(batch: tuple[Any, ...]) -> tuple[dict[str, list[GradientForm]], Tensor]:
        grads, losses = per_example_gradients(model, loss_fn, batch)
        return {name: [DenseGradient(wide(g))] for name, g in grads.items()}, losses

    return forms


def clipped(
    forms: FormsFn,
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    clip: Clip,
    by_matrix: bool,
    users: StagedUsers | None = None,
) -> TotalFn:
    """The clipped sum of such gradients, by operations of torch or by way of one matrix."""
    like = trainable(model)
    flat = None
    if by_matrix:
        ((_, c),) = clip.groups(tuple(like))
        first, losses = forms(batch)
        aim = c * (1.0 - slack(*like.values()))
        flat = Flattened(first, like, aim=aim, rows=len(losses), users=users)

    def total(batch: tuple[Any, ...], keep: Tensor) -> Sums:
        found, losses = forms(batch)
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            if flat is not None:
                return flat(found, losses, keep)
            return short(found, like, losses, keep, clip=clip)

    return total


def fused(total: TotalFn, batch: tuple[Any, ...], keep: Tensor) -> TotalFn:
    """The same function traced on these shapes and compiled."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, spec = tree_flatten(batch)
    names: list[str] = []

    def tensors_of(batch: tuple[Any, ...]) -> list[Tensor]:
        return [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]

    def flat(keep: Tensor, *tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        own = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        sums = total(tree_unflatten(own, spec), keep)
        names[:] = list(sums.values)
        return [sums.losses, sums.norms, sums.bad, *sums.values.values()]

    with torch.no_grad():
        traced = make_fx(flat)(keep, *tensors_of(batch))
        compiled = torch.compile(traced, fullgraph=True, dynamic=False)

    def run(batch: tuple[Any, ...], keep: Tensor) -> Sums:
        with torch.no_grad():
            losses, norms, bad, *values = compiled(keep, *tensors_of(batch))
        return Sums(dict(zip(names, values)), losses, norms, bad)

    return run


def candidates(
    engine: Any,
    model: nn.Module,
    loss_fn: Criterion | ModelLoss,
    batch: tuple[Any, ...],
    keep: Tensor,
    *,
    clip: Clip,
    fuse: bool,
    show: Callable[[Tensor], None] | None = None,
    users: StagedUsers | None = None,
) -> dict[str, Callable[[], TotalFn]]:
    """Builders of the forms to try, by name, the best last.

    Sums over users are for the matrix alone.
    """
    found: dict[str, Callable[[], TotalFn]] = {
        "engine": lambda: by_engine(engine, model, loss_fn, clip=clip)
    }
    name, forms = "rules", None
    if isinstance(engine, Ghost):
        forms = rules(engine, model, loss_fn, batch, show=show)
    if forms is None:
        if len(keep) * sum(p.numel() for p in trainable(model).values()) > MOST_WRITTEN:
            return found
        name, forms = "written", written(model, loss_fn)

    like = trainable(model)
    way = partial(clipped, forms, model, batch, clip=clip)
    found[name] = partial(way, by_matrix=False)
    if len(clip.groups(tuple(like))) == 1 and all(p.dtype != torch.float64 for p in like.values()):
        found[f"{name} in a matrix"] = partial(way, by_matrix=True, users=users)
    if users is not None:
        return {name: build for name, build in found.items() if name.endswith("in a matrix")}
    if fuse:
        # The compiler would not keep a copy to the host where it was.
        quiet = rules(engine, model, loss_fn, batch) if name == "rules" else forms

        def compiled() -> TotalFn:
            assert quiet is not None
            return fused(clipped(quiet, model, batch, clip=clip, by_matrix=False), batch, keep)

        found[f"{name}, fused"] = compiled
    return found
