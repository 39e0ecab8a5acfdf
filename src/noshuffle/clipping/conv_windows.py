"""The windows of a convolution's input: which numbers meet the kernel at each position. No state.

>>> import torch
>>> windows(torch.arange(4.0).reshape(1, 1, 4), (2,), (1,), (1,)).shape   # [N, C, L, k]
torch.Size([1, 1, 3, 2])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from noshuffle.clipping.gram import allowance, smallest
from noshuffle.clipping.state import is_wrapped

Sides = tuple[tuple[int, int], ...]  # zeros before and after each axis
_BOXES: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)


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


def with_tolerance(
    squared: Tensor, layer: Any, x: Tensor, g: Tensor, *, size: int, sides: Sides
) -> Tensor:
    """Squared norms of gradients that were written out, with a tolerance for rounding, [B] in
    float64.

    An example with so few positions that inner products of its windows may be cheaper, in a batch
    that has no longer one, has what `gram.squares` adds to those. One with more has what sums over
    them lose, which is far less: √n/4 + 2 roundings of Σ_l ‖g_l‖‖window_l‖ for n of them, and that
    is at most ‖g‖·‖x‖ times the root of how many windows a number of x lies in.
    """
    many, inner, outer = layer.groups, layer.weight[0].numel(), len(layer.weight) // layer.groups
    of_g = _by_position(g, many).reshape(size, -1, many, g.shape[2:].numel())
    count = (of_g > 0.0).sum((1, 3))
    is_few = (count > 0) & (inner * outer > (inner + outer) * count)
    covered = most_windows(layer.kernel_size, layer.stride, layer.dilation)
    by_group = x.detach().reshape(size, -1, many, x.shape[1:].numel() // many)
    far = torch.linalg.vector_norm(by_group, dim=(1, 3), dtype=torch.float64)
    far *= of_g.sum((1, 3)).mul_(covered).sqrt_()
    far *= lost_by_number(g.dtype) * (count.double().sqrt() / 4.0 + 2.0)
    moved = torch.where(is_few | (count == 0), 0.0, far).square().sum(1).sqrt()
    found: Tensor = (squared.double().sqrt() + moved).square()
    if _is_plain(x) and not bool(is_few.any()):
        return found
    return found + torch.where(is_few, _of_few(layer, x, of_g, sides), 0.0).sum(1)


def most_windows(
    kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> int:
    """How many windows a number of x may lie in."""
    axes = zip(kernel, stride, dilation)
    return math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in axes)


def lost_by_number(dtype: torch.dtype) -> float:
    """How far a number is rounded, relative to it."""
    return 0.5 * torch.finfo(dtype).eps


def _of_few(layer: Any, x: Tensor, of_g: Tensor, sides: Sides) -> Tensor:
    """What `gram.squares` adds for rounding, by example and group.

    Windows are not made for that: squares of x, added up over channels, are added up over each.
    Inner products lose what is too small for this type, and overflow, as do products of two: so do
    these squares.
    """
    many, tiny, of_g = layer.groups, smallest(x.dtype), of_g.to(x.dtype)
    box = torch.ones(many, 1, *layer.kernel_size, dtype=x.dtype, device=x.device)
    of_x = padded(_by_position(x, many).to(x.dtype), sides, mode="zeros")
    of_x = _BOXES[box.dim() - 3](of_x, box, None, layer.stride, 0, layer.dilation, many)
    of_x = of_x.clamp_min_(0.0).reshape(of_g.shape)
    inner, outer = layer.weight[0].numel(), len(layer.weight) // many
    long_x, long_g = (of_x + inner * tiny).sqrt_(), (of_g + outer * tiny).sqrt_()
    reach, all_x, all_g = (
        t.sum((1, 3), dtype=torch.float64) for t in (long_x * long_g, long_x, long_g)
    )
    steps = of_g.shape[1] * of_g.shape[3]
    lost = tiny * (inner * all_g.square() + outer * all_x.square() + steps**2)
    found = lost + allowance(x.dtype, inner, outer) * reach.square()
    is_held = (of_x * of_g).amax((1, 3)) < torch.inf  # false for NaN
    return torch.where(is_held, found, torch.inf)


def _is_plain(t: Tensor) -> bool:
    """Whether a CPU has the numbers, and can be asked about them."""
    return t.device.type == "cpu" and get_proxy_mode() is None and not is_wrapped(t)


def _by_position(t: Tensor, many: int) -> Tensor:
    """Σ t² over the channels of each group, [N, groups, *space], in float64, where squares of
    single precision neither vanish nor overflow; NumPy takes one pass for that."""
    t = t.detach()
    if t.shape[1] == many:
        return t.double().square()
    rows = t.reshape(len(t), many, t.shape[1] // many, t.shape[2:].numel())
    if not _is_plain(t):
        found = rows.double().square().sum(2)
    else:
        own, how = rows.numpy(), "ngcl,ngcl->ngl"
        with np.errstate(all="ignore"):  # an example may hold infinities
            found = torch.from_numpy(np.einsum(how, own, own, dtype=np.float64))
    return found.reshape(len(t), many, *t.shape[2:])
