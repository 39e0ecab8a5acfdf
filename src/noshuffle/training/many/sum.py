"""Clipped sums of K runs on one batch, and which form of the networks makes them.

    sums_k = Σ_i f[i, k]·G[i, k],      f[i, k] = min(1, c_k/‖G[i, k]‖),  0 for rows left out

`Stacked` where it knows every layer, otherwise `Vmapped` with outer products for linear layers;
both only if they agree with plain `Vmapped` on the first two examples. What vmap cannot do, and
large convolutions on a CPU, are done one run after the other (`OneByOne`); a GPU that one run's
convolutions fill takes them in turn (`InTurn`). Gradients written out stay within `MOST_NUMBERS` at
a time. Nothing waits for the device (but `OneByOne`), nothing branches on data. No state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from noshuffle.clipping import Flat, ModelLoss, auto, validate
from noshuffle.clipping.check import evaluated, trainable
from noshuffle.clipping.factor import SLACK, clip_factor, slack
from noshuffle.clipping.objective import Criterion, batch_size, single_loss, take
from noshuffle.clipping.products import exactly
from noshuffle.clipping.stateless import call_with
from noshuffle.errors import Unsupported
from noshuffle.training.many.in_turn import InTurn
from noshuffle.training.many.stacked import Gradients, Stacked
from noshuffle.training.many.vmapped import Vmapped

#: Numbers of gradients that are written out together: by the cache of a CPU, by memory on a GPU.
MOST_NUMBERS = {"cpu": 2**25, "cuda": 2**29}
#: Products in convolutions of a whole batch from which a CPU is busy with them alone; measured.
MANY_PRODUCTS = 2**24


class OneByOne:
    """K networks one after the other by the engine of a single run: every model, no gain from K.

    The models are views of the stacked parameters, so an update in place moves both.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        params: Mapping[str, Tensor],
        *,
        loss_fn: Criterion | ModelLoss,
    ) -> None:
        device = next(iter(params.values())).device
        self.runs = len(models)
        self._loss_fn = loss_fn
        self._names = tuple(params)
        self._models = [copy.deepcopy(model).to(device) for model in models]
        for run, model in enumerate(self._models):
            validate(model)
            for name, parameter in trainable(model).items():
                parameter.data = params[name][run]
        self._engines = [auto(model) for model in self._models]

    def scores(self, params: Mapping[str, Tensor], x: Any) -> Tensor:
        """Outputs of every network in eval mode: (batch, runs, …)."""
        found = []
        for run, model in enumerate(self._models):
            own = {name: value[run] for name, value in params.items()}
            with evaluated(model):
                found.append(call_with(model, own, (x,)))
        return torch.stack(found, 1)

    def clipped_sums(
        self, batch: tuple[Any, ...], *, keep: Tensor, clip: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Per run, the sum of clipped gradients of the rows in `keep`, and losses (batch, runs)."""
        weights = None if bool(keep.all()) else keep
        found = [
            engine.clipped_sum(model, self._loss_fn, batch, clip=Flat(norm), weights=weights)
            for engine, model, norm in zip(self._engines, self._models, clip.tolist())
        ]
        sums = {name: torch.stack([own.values[name] for own in found]) for name in self._names}
        return sums, torch.stack([own.losses.detach() for own in found], 1)


def products(model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]) -> int:
    """Products in the convolutions of a forward pass over one example."""
    counts: list[int] = []

    def count(layer: Any, given: Any, out: Tensor) -> None:
        counts.append(out.numel() * layer.weight[0].numel())

    hooks = [
        layer.register_forward_hook(count)
        for layer in model.modules()
        if isinstance(layer, _ConvNd)
    ]
    try:
        if hooks:
            with torch.no_grad(), torch.random.fork_rng():
                single_loss(model, loss_fn, take(batch, slice(0, 1)))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts)


SideBySide = Stacked | Vmapped
Network = SideBySide | OneByOne | InTurn


def clipped_sums(
    network: Network,
    params: Mapping[str, Tensor],
    batch: tuple[Any, ...],
    *,
    keep: Tensor,
    clip: Tensor,
    half: bool = False,
) -> tuple[dict[str, Tensor], Tensor]:
    """Per run, the sum of clipped gradients of the rows in `keep`, and the losses (batch, runs).

    With `half`, models and losses run under autocast to bfloat16. Norms are taken of the gradients
    that come out, and these are added up, in single precision.

    Guarantees: one row moves the sum of run k by at most clip[k]. A row outside `keep`, or one with
    a NaN or infinite loss or norm, contributes exactly zero, whatever it holds.
    """
    if isinstance(network, OneByOne):
        return network.clipped_sums(batch, keep=keep, clip=clip)
    if isinstance(network, InTurn):
        with _cast(keep.device, half):
            return network.clipped_sums(params, batch, keep=keep)
    first = next(iter(params.values()))
    most = MOST_NUMBERS.get(first.device.type, MOST_NUMBERS["cpu"])
    rows, size = max(1, most // (network.runs * max(1, network.written))), batch_size(batch)
    rows = -(-size // -(-size // rows)) if size else rows  # parts of one size
    aim = slack(*(value[0] for value in params.values()))
    sums: dict[str, Tensor] = {}
    losses = []
    for begin in range(0, size, rows):
        part = slice(begin, begin + rows)
        whole = rows >= size
        with _cast(first.device, half):
            grads, seen = network.example_gradients(params, batch if whole else take(batch, part))
        with exactly(first.device):  # a sum in half precision could pass the clip norm
            factor = _factors(grads, seen, keep[part], clip=clip, aim=aim)
            for name, value in params.items():
                total = grads[name].total(factor).reshape(value.shape)
                sums[name] = sums[name].add_(total) if name in sums else total.contiguous()
        losses.append(seen.detach())
    return sums, torch.cat(losses)


def _cast(device: torch.device, half: bool) -> AbstractContextManager[Any]:
    """Autocast as a graph can hold it: no cast weight is kept for later."""
    if not half:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def _factors(grads: Gradients, losses: Tensor, keep: Tensor, *, clip: Tensor, aim: float) -> Tensor:
    """Clip factor per example and run, in double precision, in which no square overflows."""
    squares = torch.stack([g.squares() for g in grads.values()]).sum(0, dtype=torch.float64)
    good = torch.isfinite(squares) & torch.isfinite(losses) & keep[:, None]
    return clip_factor(squares.sqrt(), clip, slack=aim, keep=good)


def network_for(
    models: Sequence[nn.Module],
    params: Mapping[str, Tensor],
    batch: tuple[Any, ...],
    *,
    loss_fn: Criterion | ModelLoss,
    in_turn: Sequence[float] = (),
    half: bool = False,
) -> tuple[Network, str]:
    """The quickest form that holds for these models and batches like this one, and why.

    With `in_turn`, the clip norms, runs of a model with layer rules are worked on in turn.
    """
    device = next(iter(params.values())).device
    reason = ""
    if in_turn:
        try:
            with _cast(device, half):  # which kernels there are depends on it
                own = InTurn(
                    models,
                    params,
                    batch,
                    loss_fn=loss_fn,
                    clip_norms=in_turn,
                )
            return own, f"{own.form}, in turn"
        except Unsupported as error:
            reason = f"not in turn: {error}"
    general = Vmapped(models, loss_fn=loss_fn, device=device)
    general.check_memory(batch)
    two, size = take(batch, slice(0, 2)), batch_size(batch)
    single = "one by one"

    def one_by_one() -> OneByOne:
        return OneByOne(models, params, loss_fn=loss_fn)

    if device.type == "cpu" and size * products(models[0], loss_fn, batch) >= MANY_PRODUCTS:
        return one_by_one(), f"{single} (convolutions fill a CPU)"
    try:
        general.example_gradients(params, two)
    except Unsupported as error:
        return one_by_one(), f"{single} ({error})"

    def stacked() -> SideBySide:
        return Stacked(models[0], runs=len(models), loss_fn=loss_fn)

    def outer() -> SideBySide:
        known = general.linear_layers(batch)
        if not known:
            raise Unsupported("no linear layer is called once with one vector")
        return Vmapped(models, loss_fn=loss_fn, device=device, known=known)

    for name, make in (("stacked layers", stacked), ("vmap", outer)):
        try:
            found = make()
            if _agree(found, general, params, two):
                return found, f"{name} ({reason})" if reason else name
            line = "other gradients on two examples"
        except Unsupported as error:
            line = str(error)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            line = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        reason = reason or line
    return general, f"vmap, written out ({reason})"


def _agree(
    quick: SideBySide, general: SideBySide, params: Mapping[str, Tensor], batch: tuple[Any, ...]
) -> bool:
    """Whether two forms have the same gradients on these rows, up to rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # layers that draw, draw the same
        found = quick.example_gradients(params, batch)
        torch.manual_seed(0)
        truth = general.example_gradients(params, batch)
    if found[1].shape != truth[1].shape or found[0].keys() != truth[0].keys():
        return False
    aim = slack(*(value[0] for value in params.values()))
    tolerance = 1e-4 if aim <= SLACK else 1e-2
    is_tried = False
    for row in range(len(truth[1])):
        ones = torch.zeros_like(truth[1])
        ones[row] = 1.0
        own = [(found[0][n].total(ones), truth[0][n].total(ones)) for n in params]
        gap = torch.stack([(a - b.reshape(a.shape)).double().norm() for a, b in own]).norm()
        size = torch.stack([b.double().norm() for _, b in own]).norm()
        if not bool(torch.isfinite(size)):
            continue  # an example that says nothing
        if not bool(gap <= tolerance * size + 1e-12):
            return False
        is_tried = True
    return is_tried
