"""The windows of a convolution's input: which numbers meet the kernel at each position. No state.

>>> import torch
>>> windows(torch.arange(4.0).reshape(1, 1, 4), (2,), (1,), (1,)).shape   # [N, C, L, k]
torch.Size([1, 1, 3, 2])
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from noshuffle.clipping.native_conv import Sides


def windows(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> Tensor:
    """[N, C, *space] → [N, C, *positions, *kernel], a view."""
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation)):
        x = x.unfold(2 + axis, (k - 1) * d + 1, s)
        if d > 1:
            x = x[..., ::d]
    return x


def sides_of(layer: Any) -> Sides:
    """How much goes before and after each axis; empty where nothing does."""
    if layer.padding == "valid":
        return ()
    if layer.padding == "same":
        wholes = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size)]
        sides = tuple((whole // 2, whole - whole // 2) for whole in wholes)
    else:
        sides = tuple((p, p) for p in layer.padding)
    return sides if any(map(any, sides)) else ()


def padded(x: Tensor, sides: Sides, *, mode: str) -> Tensor:
    if not sides:
        return x
    flat = [n for pair in reversed(sides) for n in pair]
    return F.pad(x, flat) if mode == "zeros" else F.pad(x, flat, mode=mode)
