"""Layers of Hugging Face models that are not torch's own, known by their shape and name.

    Conv1D       y = x W + b with W stored [in, out]                       (GPT-2)
    *RMSNorm     y = w · x/√(mean x² + ε), or (1 + w) · …                  (Llama, Qwen, Gemma, T5)
    *Scaled*Embedding   a row of the table times a constant                (Gemma, BART)

Nothing is imported from transformers: a layer is recognised by the name of its class and the
parameters it holds, and the trial on two examples decides whether the rule fits. Where it does not,
the model is read once more without these rules. No state.

>>> from torch import nn
>>> named_rule(nn.RMSNorm(3)) is None, named_rule(nn.Linear(2, 2)) is None
(True, True)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient
from noshuffle.clipping.products import HALF, aligned, wide
from noshuffle.clipping.rules import Rule, embedding, summed


def named_rule(layer: nn.Module) -> Rule | None:
    """The rule for a layer that looks like one of these, or None."""
    name, own = type(layer).__name__, dict(layer.named_parameters())
    if type(layer).__module__.startswith("torch."):
        return None
    weight = own.get("weight")
    if weight is None:
        return None
    if name == "Conv1D" and weight.dim() == 2 and getattr(layer, "nf", 0) == weight.shape[1]:
        return stored_by_input
    if isinstance(layer, nn.Embedding):
        is_scaled = name.endswith("Embedding") and "Scaled" in name and _scale(layer) is not None
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
    return {"weight": weight, "bias": DenseGradient(summed(g))}


def _scale(layer: Any) -> Any:
    return getattr(layer, "embed_scale", None)


def scaled_embedding(layer: Any, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    """Rows of a table that are multiplied by a constant."""
    scale = _scale(layer)
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
