"""The gradient at the input of a convolution, as convolutions of stride 1 of its own.

With stride s the taps r of W that meet input j are those with r ≡ j + padding (mod s). So inputs
a, a + s, a + 2s … see the gradient at the output convolved with every s-th tap, from behind:

    ∂L/∂x[s·q + a] = Σ_m W[r₀ + s·m] · g[q + c − dilation·m]      r₀ = (a + padding) mod s
                                                                  c = (a + padding − r₀)/s

cuDNN has few algorithms for this gradient that give the same bits every time, and in full single
precision those it takes are slow and need much memory. All of those for convolutions themselves
repeat. Layers run this way only while a block lasts, on a GPU whose convolutions are to repeat, and
without TF32 or half precision, where cuDNN has better ones. The weight is a constant here: its
gradients are the rules'. No state.

>>> layer, x = nn.Conv2d(2, 3, 3, padding=1), torch.randn(1, 2, 5, 5, requires_grad=True)
>>> out = convolved(layer, x)
>>> torch.equal(out, layer(x)), torch.autograd.grad(out.sum(), x)[0].shape
(True, torch.Size([1, 2, 5, 5]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import conv_pairs
from noshuffle.clipping.forwards import forward_by
from noshuffle.clipping.products import rounds_convolutions
from noshuffle.clipping.state import is_wrapped

#: Numbers of g that are convolved at once: the transforms that cuDNN makes of them take much room.
MOST_AT_ONCE = 2**23
CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}


class _Phase(NamedTuple):
    """Every s-th input along one axis: which taps it sees, and where it lies in what they give."""

    inputs: slice
    taps: slice
    border: int
    own: slice


def _phases(
    size: int, outputs: int, *, taps: int, stride: int, padding: int, dilation: int
) -> Iterator[_Phase]:
    """The phases of an axis that see a tap at all."""
    for a in range(min(stride, size)):
        first = (a + padding) % stride
        many = len(range(first, taps, stride))
        if many:
            count, reach = -(-(size - a) // stride), dilation * (many - 1)
            before = reach - (a + padding - first) // stride
            border = max(0, before, count + reach - before - outputs)
            own = slice(border - before, border - before + count)
            yield _Phase(slice(a, size, stride), slice(first, taps, stride), border, own)


def _kind(layer: nn.Module) -> Any:
    """Torch's own class of convolution that this layer runs as, or None."""
    found = (own for own in CONVOLUTIONS if isinstance(layer, own))
    own: Any = next(found, None)
    return own if own is not None and type(layer).forward is own.forward else None


def is_fit(layer: Any) -> bool:
    """Whether the gradient at the input of this layer is made of such convolutions."""
    if _kind(layer) is None or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return False
    return all(1 in both for both in zip(layer.stride, layer.dilation))


def turned(weight: Tensor, groups: int) -> Tensor:
    """[O, C/groups, *taps] → [C, O/groups, *taps], the taps from behind."""
    own = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
    return own.flip(tuple(range(2, weight.dim()))).contiguous()


def input_gradient(layer: Any, weight: Tensor, g: Tensor, sizes: Sequence[int]) -> Tensor:
    """∂L/∂x of x with these sizes along its axes."""
    run: Any = CONVOLUTIONS[_kind(layer)]
    how = zip(sizes, g.shape[2:], layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    by_axis = [
        list(_phases(size, many, taps=taps, stride=step, padding=border, dilation=far))
        for size, many, taps, step, border, far in how
    ]
    most = max(1, MOST_AT_ONCE * len(g) // max(1, g.numel()))
    phases = list(product(*by_axis))
    if (found_by := _by_pairs(layer, weight, g, sizes)) is not None:
        return found_by
    is_dense = set(layer.stride) == {1}  # every input sees a tap
    is_whole, new = len(g) <= most and is_dense, g.new_empty if is_dense else g.new_zeros
    out: Tensor | None = None if is_whole else new(len(g), layer.in_channels, *sizes)
    for phase in phases:
        taps = (slice(None), slice(None), *(one.taps for one in phase))
        own = turned(weight[taps], layer.groups)
        borders = tuple(one.border for one in phase)
        inside = (slice(None), slice(None), *(one.own for one in phase))
        inputs = (slice(None), *(one.inputs for one in phase))
        for begin in range(0, len(g), most):
            part = g[begin : begin + most]
            found: Tensor = run(part, own, None, 1, borders, layer.dilation, layer.groups)[inside]
            if out is None:
                return found
            out[(slice(begin, begin + most), *inputs)] = found
    assert out is not None
    return out


def _by_pairs(layer: Any, weight: Tensor, g: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """The same on tensor cores, where a kernel has it."""
    if len(sizes) != 2 or layer.groups != 1 or set(layer.stride) != {1}:
        return None
    how = zip(layer.kernel_size, layer.padding, layer.dilation)
    border = [d * (k - 1) - p for k, p, d in how]
    padding, dilation = (border[0], border[1]), (layer.dilation[0], layer.dilation[1])
    if not conv_pairs.is_work(g, layer.in_channels, layer.kernel_size, padding):
        return None
    return conv_pairs.by_pairs(g, turned(weight, 1), padding=padding, dilation=dilation)


def run_as(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of a layer, with these tensors."""
    run: Any = CONVOLUTIONS[_kind(layer)]
    out: Tensor = run(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    return out


class _Convolved(torch.autograd.Function):
    """The layer's convolution, and its input gradient by others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
        ctx.layer, ctx.sizes = layer, x.shape[2:]
        ctx.save_for_backward(weight)
        return run_as(layer, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *sent: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return input_gradient(ctx.layer, weight, sent[0], ctx.sizes), None, None, None


def convolved(layer: Any, x: Tensor) -> Tensor:
    """What the layer gives for x; only x has a gradient."""
    bias = None if layer.bias is None else layer.bias.detach()
    apply: Any = _Convolved.apply
    out: Tensor = apply(x, layer.weight.detach(), bias, layer)
    return out


def by_hand(
    run: Callable[[Any, Tensor], Tensor], is_it: Callable[[Any, Any], bool]
) -> Callable[..., Any]:
    """A `forward` for convolutions: by `run`, of one input for which it `is_it`."""

    def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if len(given) == 1 and kwargs.keys() <= {"input"} and is_it(layer, given[0]):
            return run(layer, given[0])
        return _kind(layer).forward(layer, *args, **kwargs)  # which says what is wrong with others

    return forward


def is_single(layer: Any, x: Any) -> bool:
    """Whether a layer runs in full single precision on a GPU for this input."""
    if type(x) is not Tensor or not x.is_cuda or x.dtype is not torch.float32:
        return False
    if x.dim() != layer.weight.dim() or is_wrapped(x):
        return False
    return not torch.is_autocast_enabled("cuda")


def _is_slow(layer: Any, x: Any) -> bool:
    """Whether cuDNN is slower for the gradient at this input."""
    return is_single(layer, x) and bool(x.requires_grad)


def inputs_by_convolution(layers: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Run those of these layers so that are fit for it; for convolutions that are to repeat."""
    if rounds_convolutions():
        return nullcontext()
    run = by_hand(convolved, _is_slow)
    return forward_by((layer, run) for layer in layers if is_fit(layer))
