"""K networks one after the other by the engine of a single run: every model, no gain from K.

    sums_k = engine.clipped_sum(model_k, loss, batch; c_k)          for k = 0 … K − 1

The last resort of a study, for what vmap cannot run (a model that branches on its data), and the
better form for large convolutions on a CPU: grouped convolutions and gradients written out take
longer there than the engine's own loops, and there are no launches to save. The models are views
of the stacked parameters, so an update in place moves both. State: these models, an engine each.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from noshuffle.clipping import Flat, ModelLoss, auto, validate
from noshuffle.clipping.check import trainable
from noshuffle.clipping.objective import Criterion, single_loss, take
from noshuffle.clipping.stateless import call_with

#: Products in convolutions of a whole batch from which a CPU is busy with them alone; measured.
MANY_PRODUCTS = 2**24


class OneByOne:
    """The models of a study, each with its row of the stacked parameters."""

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
            modes = [(module, module.training) for module in model.modules()]
            try:
                found.append(call_with(model.eval(), own, (x,)))
            finally:
                for module, mode in modes:
                    module.training = mode
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
