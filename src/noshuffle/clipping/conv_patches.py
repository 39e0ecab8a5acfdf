"""Convolutions whose stride is their kernel: patches that do not overlap, and a linear map of each.

The norm of a linear map has one tolerance for rounding (`gram`), that of a convolution another
(`conv_tolerance`). Whether kernels are worth it depends on how many examples and frames there are:
as a linear map in short batches and a convolution in long ones, one blank picture more would move
the norms of all others that cancel. So layer and picture decide:

    may be known to kernels     convolution, in short batches too
    else, and of one position   linear map: of one position the norm is a product of two

State: none.

>>> from torch import nn
>>> layer = nn.Conv2d(3, 8, 4, stride=4).double()
>>> is_linear(layer, torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 2, 2), ())
True
>>> is_linear(nn.Conv2d(3, 8, 4, stride=2), torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 3, 3), ())
False
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from noshuffle.clipping import conv_kernels
from noshuffle.clipping.conv_windows import Sides, windows
from noshuffle.clipping.forms import GradientForm
from noshuffle.clipping.products import HALF
from noshuffle.clipping.rules import bias_of, weight_of


def may_fit_kernels(layer: Any, x: Tensor, g: Tensor, sides: Sides) -> bool:
    """Whether the kernels know such tensors, however many examples and frames there are."""
    if not (conv_kernels.HAS_TRITON and x.is_cuda) or x.dim() != 4 or layer.groups != 1:
        return False
    is_known = g.dtype in (*HALF, torch.float32) and x.dtype is not torch.float64
    is_even = all(before == after for before, after in sides)
    return is_known and is_even and math.prod(layer.kernel_size) <= conv_kernels.MOST_TAPS


def _cuts_patches(layer: Any) -> bool:
    """Whether every number of the input meets the kernel once, and is not alone there."""
    is_cut = tuple(layer.stride) == tuple(layer.kernel_size) and math.prod(layer.kernel_size) > 1
    return is_cut and layer.groups == 1 and all(d == 1 for d in layer.dilation)


def is_linear(layer: Any, a: Tensor, g: Tensor, sides: Sides) -> bool:
    """Whether the layer is taken for a linear map of patches: by layer and picture alone."""
    if not _cuts_patches(layer):
        return False
    return g.shape[2:].numel() == 1 or not may_fit_kernels(layer, a, g, sides)


def by_patches(layer: Any, x: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    """Weight and bias as those of a linear map of patches; x has its border."""
    axes = len(layer.kernel_size)
    w = windows(x.to(g.dtype), layer.kernel_size, layer.stride, layer.dilation)
    a = w.permute(0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
    a = a.reshape(len(x), g.shape[2:].numel() if len(g) else 0, -1)
    g = g.flatten(2).transpose(1, 2)
    g = g.contiguous() if g.is_cuda else g  # kernels read rows as they lie
    weight = weight_of(a, g, tuple(layer.weight.shape), size=size)
    return {"weight": weight, "bias": bias_of(g, size=size)}
