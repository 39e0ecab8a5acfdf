"""K copies of a Sequential network with their own weights, run side by side.

Activations carry the runs in their second axis: images as (batch, K·channels, height, width),
vectors as (batch, K, features). A convolution of K networks is one convolution in K groups (the
first has no groups: all networks see the same images), a linear layer one batched product. With the
inputs a and output gradients g of a layer, its per-example gradients are

    convolution   G[i, k] = g[i, k] · patches(a[i, k])ᵀ        linear   G[i, k] = g[i, k] ⊗ a[i, k]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from noshuffle.errors import Unsupported

_PLAIN = (nn.Tanh, nn.ReLU, nn.MaxPool2d, nn.AvgPool2d)


@dataclass(frozen=True)
class Dense:
    """Per-example gradients as they are: (batch, runs, *shape)."""

    values: Tensor

    def squares(self) -> Tensor:
        """Squared norm per example and run."""
        return self.values.flatten(2).square().sum(2)

    def total(self, factor: Tensor) -> Tensor:
        """Σ_i factor[i, k]·G[i, k]; an example with factor 0 contributes exactly zero."""
        flat = self.values.flatten(2)
        flat = torch.where(factor[:, :, None] != 0, flat, 0.0)
        out = torch.einsum("bk,bkf->kf", factor, flat)
        return out.reshape(self.values.shape[1:])


@dataclass(frozen=True)
class Outer:
    """Per-example gradients g ⊗ a of a linear layer, never formed."""

    g: Tensor
    a: Tensor

    def squares(self) -> Tensor:
        """‖g ⊗ a‖² = ‖g‖²·‖a‖²."""
        return self.g.square().sum(2) * self.a.square().sum(2)

    def total(self, factor: Tensor) -> Tensor:
        """Σ_i factor[i, k]·g[i, k] ⊗ a[i, k]."""
        is_used = factor[:, :, None] != 0
        g = torch.where(is_used, self.g * factor[:, :, None], 0.0)
        return torch.einsum("bko,bkf->kof", g, torch.where(is_used, self.a, 0.0))


class Stacked:
    """The layers of one network, to be run with stacked parameters (runs first)."""

    def __init__(self, model: nn.Module, *, runs: int) -> None:
        if not isinstance(model, nn.Sequential):
            raise Unsupported("only nn.Sequential models are trained many at once; use privatize")
        self.runs = runs
        self._layers = list(model.named_children())
        for name, layer in self._layers:
            ordinary = isinstance(layer, (nn.Linear, nn.Flatten, *_PLAIN)) or (
                isinstance(layer, nn.Conv2d)
                and layer.groups == 1
                and layer.padding_mode == "zeros"
                and not isinstance(layer.padding, str)
            )
            if not ordinary:
                raise Unsupported(
                    f"layer {name} ({type(layer).__name__}) has no stacked form; use privatize"
                )

    def scores(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Outputs of every network: (batch, runs, classes)."""
        return self._run(params, x)[0]

    def example_gradients(
        self, params: Mapping[str, Tensor], x: Tensor, y: Tensor
    ) -> dict[str, Dense | Outer]:
        """Gradient of each example's cross-entropy, by parameter name."""
        own = {name: value.detach() for name, value in params.items()}
        scores, seen = self._run(own, x, record=True)
        labels = y[:, None].expand(-1, self.runs)
        loss = f.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
        outputs = [output for _, _, _, output in seen]
        gradients = torch.autograd.grad(loss, outputs)
        found: dict[str, Dense | Outer] = {}
        for (name, layer, given, _), g in zip(seen, gradients):
            if isinstance(layer, nn.Conv2d):
                g = _split(g, self.runs).flatten(3)
                found[f"{name}.weight"] = Dense(self._conv_weight(layer, given, g))
                if layer.bias is not None:
                    found[f"{name}.bias"] = Dense(g.sum(3))
            else:
                a = given if given.dim() == 3 else given[:, None].expand(-1, self.runs, -1)
                found[f"{name}.weight"] = Outer(g, a)
                if getattr(layer, "bias", None) is not None:
                    found[f"{name}.bias"] = Dense(g)
        return found

    def _conv_weight(self, layer: nn.Conv2d, given: Tensor, g: Tensor) -> Tensor:
        """g: (batch, runs, out, positions)."""
        patches = f.unfold(
            given,
            layer.kernel_size,
            dilation=layer.dilation,
            padding=layer.padding,  # type: ignore[arg-type]
            stride=layer.stride,
        )
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
    ) -> tuple[Tensor, list[tuple[str, nn.Module, Tensor, Tensor]]]:
        seen: list[tuple[str, nn.Module, Tensor, Tensor]] = []
        is_shared = True  # until the first layer with weights, all networks see the same
        for name, layer in self._layers:
            given = x
            if isinstance(layer, nn.Conv2d):
                weight = params[f"{name}.weight"].flatten(0, 1)
                bias = params[f"{name}.bias"].flatten() if layer.bias is not None else None
                x = f.conv2d(
                    x,
                    weight,
                    bias,
                    layer.stride,
                    layer.padding,
                    layer.dilation,
                    groups=1 if is_shared else self.runs,
                )
            elif isinstance(layer, nn.Linear):
                weight = params[f"{name}.weight"]
                form = "bf,kof->bko" if x.dim() == 2 else "bkf,kof->bko"
                x = torch.einsum(form, x, weight)
                if layer.bias is not None:
                    x = x + params[f"{name}.bias"]
            elif isinstance(layer, nn.Flatten):
                x = x.flatten(1) if is_shared else _split(x, self.runs).flatten(2)
            else:
                x = layer(x)
            if isinstance(layer, nn.Conv2d | nn.Linear):
                is_shared = False
                if record:
                    if not x.requires_grad:
                        x.requires_grad_()
                    seen.append((name, layer, given.detach(), x))
        return x, seen


def _split(x: Tensor, groups: int) -> Tensor:
    """The second axis as (groups, rest)."""
    return x.reshape(x.shape[0], groups, -1, *x.shape[2:])
