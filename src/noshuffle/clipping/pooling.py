"""Max pooling with the channels side by side in memory: the same numbers, several times sooner.

On a CPU torch takes the largest number of each window of ordinary images [B, C, H, W] one number
at a time; of images whose channels lie last in memory it takes vectors of them. A maximum is never
rounded, and ties and NaN are decided alike, so values, indices and gradients are the same bits; the
two copies cost less than they save. No state: layers run this way only while a block lasts.

>>> layer, x = nn.MaxPool2d(2, stride=1), torch.randn(16, 32, 9, 9)
>>> with pooling_by_channel([layer]):
...     found = layer(x)
>>> torch.equal(found, layer(x)), found.is_contiguous()
(True, True)
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from noshuffle.clipping.forwards import forward_by
from noshuffle.clipping.state import is_wrapped

#: Channels that fill a vector, and numbers below which the copies are not worth it.
FEWEST, LEAST = 8, 1 << 14


def pools(model: nn.Module) -> list[nn.MaxPool2d]:
    """The layers of a model that are torch's own max pooling of images."""
    own = nn.MaxPool2d
    return [m for m in model.modules() if isinstance(m, own) and type(m).forward is own.forward]


class _Pooled(torch.autograd.Function):
    """Values and indices from turned images; the gradient is torch's own, of images as they were
    (left to autograd it would come with its channels last, and be copied wherever it is used)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        turned = x.contiguous(memory_format=torch.channels_last)
        found = torch.ops.aten.max_pool2d_with_indices(turned, *how)
        values, where = (part.contiguous() for part in found)
        ctx.how = how
        ctx.save_for_backward(x, where)
        ctx.mark_non_differentiable(where)
        return values, where

    @staticmethod
    def backward(ctx: Any, *sent: Tensor) -> Any:
        x, where = ctx.saved_tensors
        g = sent[0].contiguous()
        back = torch.ops.aten.max_pool2d_with_indices_backward(g, x, *ctx.how, where)
        return back, *(None for _ in ctx.how)


def _is_fit(x: Any) -> bool:
    """Whether these are ordinary images, enough of them, in the hands of nobody but autograd."""
    if type(x) is not Tensor or x.device.type != "cpu" or x.dtype is not torch.float32:
        return False
    is_enough = x.dim() == 4 and x.shape[1] >= FEWEST and x.numel() >= LEAST
    return is_enough and not is_wrapped(x) and x.is_contiguous()


def pooled(layer: nn.MaxPool2d, x: Tensor) -> Any:
    """What the layer gives for x; ordinary images on a CPU are turned for it, and back.

    Guarantees: the bits of the layer's own forward and backward pass.
    """
    if not _is_fit(x):
        return nn.MaxPool2d.forward(layer, x)
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    apply: Any = _Pooled.apply
    both = apply(x, *map(_pair, sizes), layer.ceil_mode)
    return both if layer.return_indices else both[0]


def pooling_by_channel(layers: Collection[nn.MaxPool2d]) -> AbstractContextManager[None]:
    """Run these layers by `pooled`, for as long as the block lasts."""
    return forward_by((layer, pooled) for layer in layers)
