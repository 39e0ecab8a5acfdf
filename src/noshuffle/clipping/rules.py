"""Layer rules: from a layer's input and output gradient to its per-example gradients.

    @rule(nn.Linear)
    def linear(layer, a, g, size): …  ->  {"weight": OuterGradient(…), "bias": DenseGradient(…)}

`a` is the input, `g` the gradient at the output, both with the example axis first, which may also
be examples × positions (a flattened batch): rules reshape to (size, -1, …). A rule applies to its
own class, and to subclasses that keep its `forward`. Layers of Hugging Face models go by name and
parameters (`named_rule`), and the trial of the first batch decides whether such a rule fits:

    Conv1D       y = x W + b with W stored [in, out]                       (GPT-2)
    *RMSNorm     y = w · x/√(mean x² + ε), or (1 + w) · …                  (Llama, Qwen, Gemma, T5)
    *Scaled*Embedding   a row of the table times a constant                (Gemma, BART)

`@rewrite(nn.LSTM)` is for layers whose inside must be seen: the function runs in place of
`forward`, computes the same, and records on a tape what it computed. No state but the two tables.

>>> from torch import nn
>>> find_rule(nn.Linear(2, 3)).__name__, find_rule(nn.Bilinear(2, 2, 2)) is None
('linear', True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from noshuffle.clipping import norm_kernels
from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient, RowGradient
from noshuffle.clipping.products import HALF, aligned, sum_dtype, wide

Rule = Callable[[Any, Tensor, Tensor, int], dict[str, GradientForm]]
Rewrite = Callable[..., Any]
_Fn = TypeVar("_Fn", bound=Callable[..., Any])

_RULES: dict[type[nn.Module], Rule] = {}
_REWRITES: dict[type[nn.Module], Rewrite] = {}


def rule(*layers: type[nn.Module]) -> Callable[[_Fn], _Fn]:
    """Register a rule for layer classes."""

    def register(fn: _Fn) -> _Fn:
        _RULES.update(dict.fromkeys(layers, fn))
        return fn

    return register


def rewrite(*layers: type[nn.Module]) -> Callable[[_Fn], _Fn]:
    """Register a `forward(layer, tape, *args, **kwargs)` that records what it computes."""

    def register(fn: _Fn) -> _Fn:
        _REWRITES.update(dict.fromkeys(layers, fn))
        return fn

    return register


def _find(table: dict[type[nn.Module], _Fn], layer: nn.Module) -> _Fn | None:
    if parametrize.is_parametrized(layer):
        return None  # its weight is computed, not held: weight norm, spectral norm
    for base in type(layer).__mro__:
        if base in table:
            return table[base] if type(layer).forward is base.forward else None
    return None


def find_rule(layer: nn.Module) -> Rule | None:
    """The rule of a layer, or None."""
    return _find(_RULES, layer)


def find_rewrite(layer: nn.Module) -> Rewrite | None:
    """The rewrite of a layer, or None (also where the layer uses an option it lacks)."""
    found = _find(_REWRITES, layer)
    is_plain = not (
        getattr(layer, "bias_k", None) is not None or getattr(layer, "add_zero_attn", False)
    )
    return found if is_plain else None


def summed(t: Tensor) -> Tensor:
    """Sum over axis 1, added up in at least single precision without a wide copy."""
    if t.shape[1] == 1:  # a sum of one takes torch ten times as long as a view
        return t[:, 0].float() if t.dtype in HALF else t[:, 0]
    return t.sum(1, dtype=sum_dtype(t.dtype))


def weight_of(a: Tensor, g: Tensor, shape: tuple[int, ...], *, size: int) -> OuterGradient:
    """W of x ↦ W x + b, with any number of axes between example and feature."""
    a = a.reshape(size, -1, a.shape[-1])
    g = g.reshape(size, -1, g.shape[-1])
    widths = (g.shape[2], a.shape[2])
    return OuterGradient(*((aligned(a), aligned(g)) if a.is_cuda else (a, g)), shape, widths)


def bias_of(g: Tensor, *, size: int) -> DenseGradient:
    """b of x ↦ W x + b."""
    return DenseGradient(summed(g.reshape(size, -1, g.shape[-1])))


@rule(nn.Linear)
def linear(layer: nn.Linear, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    forms: dict[str, GradientForm] = {
        "weight": weight_of(a, g, tuple(layer.weight.shape), size=size)
    }
    return forms if layer.bias is None else forms | {"bias": bias_of(g, size=size)}


@rule(nn.Embedding)
def embedding(layer: nn.Embedding, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    index = a.reshape(size, -1).long()
    g = g.reshape(size, index.shape[1], -1)
    if layer.padding_idx is not None:
        g = torch.where((index == layer.padding_idx).unsqueeze(2), torch.zeros_like(g), g)
    return {"weight": RowGradient(index, g, tuple(layer.weight.shape))}


def _scale_and_shift(unit: Tensor, g: Tensor, shape: tuple[int, ...]) -> dict[str, GradientForm]:
    """weight and bias of y = weight · unit + bias; both are [B, positions, *shape]."""
    return {
        "weight": DenseGradient(summed(unit * g).reshape(-1, *shape)),
        "bias": DenseGradient(summed(g).reshape(-1, *shape)),
    }


@rule(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    shape = tuple(layer.normalized_shape)
    if len(shape) == 1 and norm_kernels.fits_rows(a, g, shape[0]):
        weight, bias = norm_kernels.layer_sums(a, g, size=size, eps=layer.eps)
        return {"weight": DenseGradient(weight), "bias": DenseGradient(bias)}
    unit = F.layer_norm(a, shape, eps=layer.eps).reshape(size, -1, *shape)
    return _scale_and_shift(unit, g.reshape(size, -1, *shape), shape)


@rule(nn.RMSNorm)
def rms_norm(layer: nn.RMSNorm, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    shape = tuple(layer.normalized_shape)
    unit = F.rms_norm(a, shape, eps=layer.eps).reshape(size, -1, *shape)
    return {"weight": DenseGradient(summed(unit * g.reshape(size, -1, *shape)).reshape(-1, *shape))}


def _by_channel(t: Tensor, channels: int, size: int) -> Tensor:
    """[B·k, C, …] → [B, positions, C]"""
    return wide(t).reshape(size, -1, channels, t[0, 0].numel()).transpose(2, 3).flatten(1, 2)


@rule(nn.GroupNorm)
def group_norm(layer: nn.GroupNorm, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    c = layer.num_channels
    if norm_kernels.fits(a, g):
        both = norm_kernels.channel_sums(a, g, groups=layer.num_groups, eps=layer.eps)
        weight, bias = (part.reshape(size, -1, c).sum(1) for part in both)  # over pictures
        return {"weight": DenseGradient(weight), "bias": DenseGradient(bias)}
    unit = F.group_norm(wide(a), layer.num_groups, eps=layer.eps)
    return _scale_and_shift(_by_channel(unit, c, size), _by_channel(g, c, size), (c,))


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(
    layer: nn.InstanceNorm2d, a: Tensor, g: Tensor, size: int
) -> dict[str, GradientForm]:
    unit = F.instance_norm(wide(a), eps=layer.eps)
    c = layer.num_features
    return _scale_and_shift(_by_channel(unit, c, size), _by_channel(g, c, size), (c,))


def named_rule(layer: nn.Module) -> Rule | None:
    """The rule for a layer that looks like one of these, or None."""
    name, own = type(layer).__name__, dict(layer.named_parameters())
    weight, is_torch = own.get("weight"), type(layer).__module__.startswith("torch.")
    if weight is None or is_torch or parametrize.is_parametrized(layer):
        return None
    if name == "Conv1D" and weight.dim() == 2 and getattr(layer, "nf", 0) == weight.shape[1]:
        return stored_by_input
    if isinstance(layer, nn.Embedding):
        is_scaled = name.endswith("Embedding") and "Scaled" in name
        is_scaled = is_scaled and getattr(layer, "embed_scale", None) is not None
        return scaled_embedding if is_scaled else None
    is_norm = name.endswith("RMSNorm") or name == "T5LayerNorm"
    if is_norm and list(own) == ["weight"] and weight.dim() == 1 and _eps(layer) is not None:
        return scaled_root_mean_square
    return None


def stored_by_input(layer: Any, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    """Weight [in, out] and bias of x ↦ x W + b."""
    a = a.reshape(size, -1, a.shape[-1])
    g = g.reshape(size, -1, g.shape[-1])
    widths = (a.shape[2], g.shape[2])
    weight = OuterGradient(aligned(g), aligned(a), tuple(layer.weight.shape), widths)
    return {"weight": weight, "bias": bias_of(g, size=size)}


def scaled_embedding(layer: Any, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    """Rows of a table that are multiplied by a constant."""
    scale = layer.embed_scale
    scale = scale.to(g.dtype) if isinstance(scale, Tensor) else scale
    return embedding(layer, a, g * scale, size)


def _eps(layer: Any) -> float | None:
    found = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
    return float(found) if isinstance(found, float) else None


def scaled_root_mean_square(layer: Any, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    """Weight of x ↦ w · x/√(mean x² + ε); adding a constant to w changes nothing here."""
    x = wide(a)
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (_eps(layer) or 0.0))
    unit = unit.to(a.dtype) if a.dtype in HALF else unit
    width = a.shape[-1]
    return {"weight": DenseGradient(summed((unit * g).reshape(size, -1, width)))}
