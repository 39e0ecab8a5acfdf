"""Convolutions whose backward pass takes some examples at a time.

    ∂L/∂W = Σ_parts ∂L_part/∂W        ∂L/∂x_part from g_part alone (`conv_input`)

In full single precision cuDNN takes algorithms for these that need ten times the room of what they
read: 1.3 GiB for 0.13 GiB of gradients of a residual net, more than a step that takes norms and
sums by kernels of its own. A trial of a model as it is written would then set the most memory of a
run. Layers run this way while a block lasts, on a GPU, without TF32 and half precision, for
which cuDNN has better algorithms. No state.

>>> layer, x = nn.Conv2d(2, 3, 3), torch.randn(4, 2, 5, 5)
>>> torch.autograd.grad(convolved(layer, x).sum(), layer.weight)[0].shape
torch.Size([3, 2, 3, 3])
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.clipping import conv_input
from noshuffle.clipping.conv_input import by_hand, input_gradient, is_fit, is_single, run_as
from noshuffle.clipping.forwards import forward_by
from noshuffle.clipping.products import rounds_convolutions


def weight_gradient(layer: Any, x: Tensor, weight: Tensor, g: Tensor) -> Tensor:
    """∂L/∂W, added up over parts of the examples."""
    most = max(1, conv_input.MOST_AT_ONCE * len(g) // max(1, g.numel(), x.numel()))
    how = (layer.stride, layer.padding, layer.dilation, False, [0], layer.groups)
    back, asked = torch.ops.aten.convolution_backward, (False, True, False)
    out = torch.zeros_like(weight)
    for begin in range(0, len(g), most):
        own = slice(begin, begin + most)
        out += back(g[own], x[own], weight, None, *how, asked)[1]
    return out


class _InParts(torch.autograd.Function):
    """The layer's convolution, and all its gradients in parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return run_as(layer, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *sent: Tensor) -> Any:
        (x, weight), g, layer = ctx.saved_tensors, sent[0], ctx.layer
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        return (
            input_gradient(layer, weight, g, x.shape[2:]) if to_x else None,
            weight_gradient(layer, x, weight, g) if to_weight else None,
            g.sum((0, *range(2, g.dim()))) if to_bias else None,
            None,
        )


def convolved(layer: Any, x: Tensor) -> Tensor:
    """What the layer gives for x."""
    apply: Any = _InParts.apply
    out: Tensor = apply(x, layer.weight, layer.bias, layer)
    return out


def backward_in_parts(model: nn.Module) -> AbstractContextManager[None]:
    """Run those convolutions of a model so that are fit for it."""
    if rounds_convolutions() or not any(p.is_cuda for p in model.parameters()):
        return nullcontext()
    run = by_hand(convolved, is_single)
    return forward_by((layer, run) for layer in model.modules() if is_fit(layer))
