"""K copies of a Sequential network with their own weights, run side by side.

Activations carry the runs in their second axis: images as (batch, K·channels, height, width),
vectors as (batch, K, features). A convolution of K networks is one convolution in K groups (the
first has no groups: all networks see the same images), a linear layer one batched product. With the
inputs a and output gradients g of a layer, its per-example gradients are

    convolution   G[i, k] = g[i, k] · patches(a[i, k])ᵀ        linear   G[i, k] = g[i, k] ⊗ a[i, k]

This is the quick form for the few layers that it knows; `vmapped` is the one for all others, and
its twin. No state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.conv_windows import padded, sides_of, windows
from noshuffle.clipping.gram import smallest
from noshuffle.clipping.objective import Criterion, row_losses
from noshuffle.clipping.products import HALF, wide
from noshuffle.errors import Unsupported

#: Layers that treat every number, or every channel, alike.
_PLAIN = (
    *(nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softplus),
    *(nn.Identity, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
)


@dataclass(frozen=True)
class DenseByRun:
    """Per-example gradients as they are: (batch, runs, *shape)."""

    values: Tensor

    def squares(self) -> Tensor:
        """Squared norm per example and run."""
        if self.values.dtype in HALF:  # widened on the way, without a copy
            lengths: Tensor = torch.linalg.vector_norm(
                self.values.flatten(2), dim=2, dtype=torch.float32
            )
            return lengths.square()
        return wide(self.values).flatten(2).square().sum(2)

    def total(self, factor: Tensor) -> Tensor:
        """Σ_i factor[i, k]·G[i, k]; an example with factor 0 contributes exactly zero."""
        used = factor[:, :, None] != 0
        flat = torch.where(used, wide(self.values).flatten(2), 0.0)
        out = torch.einsum("bk,bkf->kf", factor.to(flat.dtype), flat)
        return out.reshape(self.values.shape[1:])


def _lengths(t: Tensor) -> Tensor:
    """‖t[i, k]‖² in double precision, with room for entries whose squares vanish."""
    return wide(t).square().sum(2).double() + t.shape[2] * smallest(t.dtype)


@dataclass(frozen=True)
class OuterByRun:
    """Per-example gradients g ⊗ a of a linear layer, never formed.

    g: (batch, runs, out); a: (batch, runs, in), or (batch, 1, in) where all runs have the same.
    """

    g: Tensor
    a: Tensor

    def squares(self) -> Tensor:
        """‖g ⊗ a‖² = ‖g‖²·‖a‖², never too small where squares vanish beside a huge factor."""
        return _lengths(self.g) * _lengths(self.a)

    def total(self, factor: Tensor) -> Tensor:
        """Σ_i factor[i, k]·g[i, k] ⊗ a[i, k]."""
        is_used = factor[:, :, None] != 0
        g, a = wide(self.g), wide(self.a)
        g = torch.where(is_used, g * factor[:, :, None].to(g.dtype), 0.0)
        if a.shape[1] == 1:
            # One product for all runs; a row that no run uses may hold anything.
            a = torch.where(is_used.any(1), a[:, 0], 0.0)
            return (g.flatten(1).T @ a).reshape(*g.shape[1:], -1)
        return torch.einsum("bko,bkf->kof", g, torch.where(is_used, a, 0.0))


Gradients = dict[str, DenseByRun | OuterByRun]


class Stacked:
    """The layers of one network, to be run with stacked parameters (runs first)."""

    def __init__(
        self, model: nn.Module, *, runs: int, loss_fn: Criterion | ModelLoss = f.cross_entropy
    ) -> None:
        if isinstance(loss_fn, ModelLoss):
            raise Unsupported("a loss that calls the model itself has no stacked form")
        self.runs = runs
        self._loss_fn = loss_fn
        self._layers = list(_layers(model))
        for name, layer in self._layers:
            _check(name, layer)
        own = [(f"{n}.{key}", l, p) for n, l in self._layers for key, p in l.named_parameters()]
        held = sorted(name for name, _, p in own if p.requires_grad)
        if not held or held != sorted(name for name, _ in model.named_parameters()):
            raise Unsupported("weights that are frozen or used twice have no stacked form")
        #: Numbers of gradients that are written out for one example of one run.
        self.written = sum(
            p.numel() for n, l, p in own if n.endswith(".bias") or isinstance(l, nn.Conv2d)
        )

    def scores(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Outputs of every network: (batch, runs, classes)."""
        return self._run(params, x)[0]

    def example_gradients(
        self, params: Mapping[str, Tensor], batch: tuple[Any, ...]
    ) -> tuple[Gradients, Tensor]:
        """Gradient of each example's loss by parameter name, and the losses (batch, runs)."""
        x, *targets = batch
        own = {name: value.detach() for name, value in params.items()}
        scores, seen = self._run(own, x, record=True)
        spread = [y[:, None].expand(-1, self.runs, *y.shape[1:]).flatten(0, 1) for y in targets]
        losses = row_losses(self._loss_fn, scores.flatten(0, 1), tuple(spread))
        outputs = [output for _, _, _, output in seen]
        gradients = torch.autograd.grad(losses.sum(), outputs)
        found: Gradients = {}
        for (name, layer, given, _), g in zip(seen, gradients):
            if isinstance(layer, nn.Conv2d):
                g = _split(g, self.runs).flatten(3)
                found[f"{name}.weight"] = DenseByRun(self._conv_weight(layer, given, g))
                if layer.bias is not None:
                    found[f"{name}.bias"] = DenseByRun(g.sum(3))
            else:
                a = given if given.dim() == 3 else given[:, None]
                found[f"{name}.weight"] = OuterByRun(g, a)
                if layer.bias is not None:
                    found[f"{name}.bias"] = DenseByRun(g)
        return found, losses.detach().reshape(-1, self.runs)

    def _conv_weight(self, layer: nn.Conv2d, given: Tensor, g: Tensor) -> Tensor:
        """g: (batch, runs, out, positions)."""
        patches = _patches(layer, given)
        own = patches.shape[1] // layer.weight[0].numel()
        patches = _split(patches, own)  # (batch, runs or 1, in·k·k, positions)
        if own == 1:
            # One set of patches for all runs: one wider product.
            product = g.flatten(1, 2) @ patches[:, 0].transpose(1, 2)
            product = _split(product, self.runs)
        else:
            product = g @ patches.transpose(2, 3)
        return product.reshape(*product.shape[:3], *layer.weight.shape[1:])

    def _run(
        self, params: Mapping[str, Tensor], x: Tensor, *, record: bool = False
    ) -> tuple[Tensor, list[tuple[str, nn.Conv2d | nn.Linear, Tensor, Tensor]]]:
        seen: list[tuple[str, nn.Conv2d | nn.Linear, Tensor, Tensor]] = []
        is_shared = True  # until the first layer with weights, all networks see the same
        if x.dim() == 4 and x.is_cuda and torch.is_autocast_enabled("cuda"):
            x = x.contiguous(memory_format=torch.channels_last)  # as matrix units want it
        for name, layer in self._layers:
            given = x
            if isinstance(layer, nn.Conv2d):
                weight = params[f"{name}.weight"].flatten(0, 1)
                bias = params[f"{name}.bias"].flatten() if layer.bias is not None else None
                how: Any = (
                    layer.stride,
                    layer.padding,
                    layer.dilation,
                    1 if is_shared else self.runs,
                )
                x = f.conv2d(x, weight, bias, *how)
            elif isinstance(layer, nn.Linear):
                if x.dim() != (2 if is_shared else 3):
                    raise Unsupported(f"linear layer {name} over several axes has no stacked form")
                form = "bf,kof->bko" if is_shared else "bkf,kof->bko"
                x = torch.einsum(form, x, params[f"{name}.weight"])
                if layer.bias is not None:
                    x = x + params[f"{name}.bias"]
            elif isinstance(layer, nn.Flatten):
                if is_shared:
                    x = x.flatten(1)
                elif x.dim() == 4:  # else one vector a run already
                    x = _split(x, self.runs).flatten(2)
            else:
                x = layer(x)
            if isinstance(layer, nn.Conv2d | nn.Linear):
                is_shared = False
                if record:
                    if not x.requires_grad:
                        x.requires_grad_()
                    seen.append((name, layer, given.detach(), x))
        return x if x.dim() < 4 else _split(x, self.runs), seen


def _layers(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All layers in order, those of Sequentials inside included; one used twice comes twice."""
    if type(model) is not nn.Sequential:
        raise Unsupported(f"{type(model).__name__} is no nn.Sequential")
    for name, layer in model._modules.items():
        assert layer is not None
        if isinstance(layer, nn.Sequential):
            yield from _layers(layer, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", layer


def _check(name: str, layer: nn.Module) -> None:
    is_known = type(layer) in (nn.Linear, *_PLAIN)
    if type(layer) is nn.Conv2d:
        is_known = layer.groups == 1 and layer.padding_mode == "zeros"
        is_known = is_known and not isinstance(layer.padding, str)
    elif type(layer) is nn.Flatten:
        is_known = (layer.start_dim, layer.end_dim) == (1, -1)
    if not is_known or layer._forward_hooks or layer._forward_pre_hooks:
        raise Unsupported(f"layer {name} ({type(layer).__name__}) has no stacked form")


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What each position of the output sees: (batch, channels·height·width, positions).

    As `f.unfold`, which takes one launch an example on a GPU; this takes one for all.
    """
    x = padded(x, sides_of(layer), mode="zeros").contiguous()
    seen = windows(x, layer.kernel_size, layer.stride, layer.dilation)
    return seen.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)


def _split(x: Tensor, groups: int) -> Tensor:
    """The second axis as (groups, rest)."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])
