"""Convolutions of one, two and three axes: stride, padding, dilation, groups, padding modes.

With the input cut into windows, a convolution is a linear map applied at every position:

    grad[b, o, (c, k)] = Σ_l g[b, o, l] · window[b, l, (c, k)]

in each group. On a GPU kernels take norms and sum, where windows would be large (`conv_kernels`):
in half precision, or, of float32 that torch may not round to TF32, in pairs of such numbers.
Elsewhere windows are a strided view, and the weighted sum is torch's own weight gradient. Windows
that do not overlap (the patches of a vision transformer) make a linear map where no kernel knows
them (`conv_patches`). State: which kernels agreed with that, by device and type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad

from noshuffle.clipping import conv_halves, conv_kernels, conv_tolerance
from noshuffle.clipping.conv_patches import by_patches, is_linear, may_fit_kernels
from noshuffle.clipping.conv_tolerance import raised, tolerance
from noshuffle.clipping.conv_windows import Sides, padded, sides_of, windows, with_tolerance
from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient
from noshuffle.clipping.products import HALF, rounds_convolutions, scaled, sum_dtype, wide, zeroed
from noshuffle.clipping.rules import rule
from noshuffle.clipping.shared_copies import copy_of
from noshuffle.triton_shim import KernelTest

#: Windows of fewer numbers are quickly written down, and their gradients where weights are small,
#: or weights times windows: the CNN of `step_gpu`, with 2¹³ and 2²¹ numbers, takes 0.374 ms a step
#: with them written out and 0.399 by kernels; more would take memory.
FEWEST_WINDOWS, FEWEST_BY_WEIGHT, LEAST_WEIGHT, LEAST_WORK = 2**24, 2**19, 2**13, 3 * 2**33
#: Positions of one example, in all of its pictures, that tables are made for.
MOST_POSITIONS = 2**20
_WEIGHT_GRADIENTS: tuple[Callable[..., Tensor], ...] = (
    grad.conv1d_weight,
    grad.conv2d_weight,
    grad.conv3d_weight,
)


@dataclass(frozen=True)
class Convolution(GradientForm):
    """The weight of a convolution: x [B·k, C, *space], g [B·k, O, *positions].

    `sides` are the zeros that x still lacks.
    """

    layer: Any
    x: Tensor
    g: Tensor
    size: int
    sides: Sides = ()
    keep: Tensor | None = None  # of kernels, which need no zeros to leave an example out
    units: Tensor | None = None  # of kernels: what g·x of every example is counted in
    is_pair: bool = False  # of kernels: each number is two, and channels twice as many
    lengths: conv_tolerance.Lengths | None = None  # of kernels: squared, of x and g at every place
    written: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def full(self) -> Tensor:
        """x with its border."""
        return padded(wide(self.x), self.sides, mode="zeros")

    @cached_property
    def is_fused(self) -> bool:
        """Whether kernels give norms and sum, so that it is better not written out."""
        return not self.written and self.lengths is not None  # made for them

    @property
    def _kernels(self) -> dict[str, Any]:
        layer, sides = self.layer, self.sides or ((0, 0), (0, 0))
        how = (layer.stride, tuple(before for before, _ in sides), layer.dilation)
        pictures = len(self.x) // self.size
        common = {"kernel": layer.kernel_size, "how": how, "pictures": pictures}
        return common | {"is_pair": self.is_pair}

    def _plain(self) -> Convolution:
        """The same without a mask and units, in at least single precision."""
        widened = conv_halves.pair_sum if self.is_pair else wide
        x, g = widened(self.x), widened(self.g)
        pictures = len(x) // self.size
        if self.keep is not None:
            keep = self.keep.repeat_interleave(pictures)
            x, g = zeroed(x, keep), zeroed(g, keep)
        if self.units is not None:  # half of it each: their product need not fit where these do
            half = self.units.log2().div(2.0).floor().exp2()
            x = scaled(x, half.repeat_interleave(pictures))
            g = scaled(g, (self.units / half).repeat_interleave(pictures))
        return replace(self, x=x, g=g, keep=None, units=None, is_pair=False, lengths=None)

    def _outer(self) -> OuterGradient:
        """One OuterGradient over (example, group) pairs."""
        layer, (n, c), o = self.layer, self.x.shape[:2], self.g.shape[1]
        axes, many = len(layer.kernel_size), layer.groups
        w = windows(self.full, layer.kernel_size, layer.stride, layer.dilation)
        w = w.reshape(n, many, c // many, *w.shape[2:])
        length = self.g.shape[2:].numel() if n else 0
        places, kernel = range(3, 3 + axes), range(3 + axes, 3 + 2 * axes)
        # a [N, groups, positions, (c, kernel)], copied in the order with the longer runs
        if layer.kernel_size[-1] >= 8:
            a = w.permute(0, 1, *places, 2, *kernel).reshape(n, many, length, -1)
        else:
            a = w.permute(0, 1, 2, *kernel, *places).reshape(n, many, -1, length).mT
        g = wide(self.g).reshape(n, many, o // many, length).transpose(2, 3)
        if n > self.size:  # several frames an example
            both = (t.reshape(self.size, -1, *t.shape[1:]) for t in (a, g))
            a, g = (t.transpose(1, 2).flatten(2, 3) for t in both)
        shape = (o // many, *layer.weight.shape[1:])
        return OuterGradient(a.flatten(0, 1), g.flatten(0, 1), shape)

    def squares(self) -> Tensor:
        if self.is_fused:
            found = conv_kernels.squares(self.x, self.g, **self._kernels, lengths=self.lengths)
            found = found if self.units is None else found * self.units.square()
            return found if self.keep is None else torch.where(self.keep, found, 0.0)
        if self.lengths is not None:  # written out before anybody asked
            return self._plain().squares()
        outer = self._outer()
        is_one = outer.a.shape[1] == 1  # position
        if self.x.is_cuda:
            return DenseGradient(self.dense(outer)).squares() if is_one else self._of_windows(outer)
        if self.written or is_one or (outer.is_small() and self.x.device.type == "cpu"):
            return self._with_tolerance(DenseGradient(self.dense(outer)).squares())
        found = outer.squares().reshape(self.size, -1).sum(1)
        shape = (self.size, *self.layer.weight.shape)
        self.written.extend(full.reshape(shape) for full in outer.written)
        return found

    def _of_windows(self, outer: OuterGradient) -> Tensor:
        """By windows that are written down, with the tolerance that kernels have."""
        shape = (self.size, *self.layer.weight.shape)
        full = self.written[0].reshape(len(outer.a), *outer.shape) if self.written else None
        found = conv_tolerance.of_windows(outer, full).reshape(self.size, -1).sum(1)
        self.written.extend(own.reshape(shape) for own in outer.written)
        return found

    def _with_tolerance(self, squared: Tensor) -> Tensor:
        """With a tolerance, the same whichever way a norm is found (`gram.of_written`): the longest
        example must not change those of the others.
        """
        return with_tolerance(squared, self.layer, self.x, self.g, size=self.size, sides=self.sides)

    def dense(self, outer: OuterGradient | None = None) -> Tensor:
        if not self.written:
            full = (outer or self._plain()._outer()).dense()
            self.written.append(full.reshape(self.size, *self.layer.weight.shape))
        return self.written[0]

    def write_(self, out: Tensor) -> None:
        if self.written or self.layer.groups != 1:
            super().write_(out)
        else:
            self._plain()._outer().write_(out)

    def total(self, factors: Tensor) -> Tensor:
        if self.written:
            return DenseGradient(self.written[0]).total(factors)
        if self.is_fused:
            kept = factors if self.keep is None else torch.where(self.keep, factors, 0.0)
            if self.units is not None:  # where both are huge and never meet, 0·∞ would be NaN
                kept = (kept.double() * self.units).clamp_max(1e38)
            return conv_kernels.total(self.x, self.g, kept, **self._kernels)
        layer, g = self.layer, self._scaled(factors)
        weight_of = _WEIGHT_GRADIENTS[len(layer.kernel_size) - 1]
        return weight_of(
            self.full, layer.weight.shape, g, layer.stride, 0, layer.dilation, layer.groups
        )

    def spent(self, factors: Tensor) -> Tensor:
        return self.total(factors) if self.is_fused else super().spent(factors)

    def kept(self, keep: Tensor) -> GradientForm:
        if self.is_fused and not self.written:
            return replace(self, keep=keep if self.keep is None else self.keep & keep)
        rest = [zeroed(grads, keep) for grads in self.written]
        keep = keep.repeat_interleave(self.g.shape[0] // self.size)
        return replace(self, x=zeroed(self.x, keep), g=zeroed(self.g, keep), written=rest)

    def scaled(self, factors: Tensor) -> GradientForm:
        own = self if self.lengths is None else self._plain()
        return replace(own, g=own._scaled(factors), written=[])

    def _scaled(self, factors: Tensor) -> Tensor:
        return scaled(self.g, factors.repeat_interleave(self.g.shape[0] // self.size))


def _by_channel(g: Tensor, size: int) -> Tensor:
    """Σ g over frames and positions, [B, O]: the gradients of the bias."""
    frames = g.reshape(size, -1, *g.shape[1:])
    return frames.sum((1, *range(3, frames.dim())), dtype=sum_dtype(g.dtype))


def _has_kernels(layer: Any, x: Tensor, g: Tensor, size: int, sides: Sides) -> bool:
    """Whether this is work for the kernels, and they are good here."""
    if not may_fit_kernels(layer, x, g, sides):
        return False
    taps, places = math.prod(layer.kernel_size), g.shape[2] * g.shape[3]
    if len(x) % size or len(x) // size * places > MOST_POSITIONS:
        return False
    most = 2**30 if _is_paired(g) else 2**31
    if max(g.numel(), x.numel()) // max(1, size) >= most:
        return False
    weight = layer.weight.numel()
    windowed = len(x) * x.shape[1] * taps * places
    # In pairs a product is three, and small gradients are sooner written out.
    is_heavy = size * weight >= FEWEST_WINDOWS
    if not _is_paired(g):
        is_heavy = weight >= LEAST_WEIGHT and weight * windowed >= LEAST_WORK
    fewest = FEWEST_BY_WEIGHT if is_heavy else FEWEST_WINDOWS
    if windowed < fewest:
        return False
    return _agrees(x.device, x.dtype, g.dtype, _is_paired(g))


def _is_paired(g: Tensor) -> bool:
    """Whether products of g are to have all the bits of float32."""
    return g.dtype is torch.float32 and not rounds_convolutions()


def _fused(layer: Any, x: Tensor, g: Tensor, size: int, sides: Sides) -> Convolution:
    """In the form that kernels read: half precision or pairs of it, channels last."""
    if g.dtype in HALF:
        to = g.dtype
        (x, of_x), (g, of_g) = (copy_of(t, to, lambda t: conv_halves.turned(t, to)) for t in (x, g))
        return Convolution(layer, x, g, size, sides, lengths=(of_x, of_g))
    pictures, is_pair = len(x) // size, _is_paired(g)

    def halved(t: Tensor) -> tuple[Tensor, ...]:
        return conv_halves.halves(t.float(), pictures=pictures, is_pair=is_pair)

    made = [copy_of(t, (pictures, is_pair), halved) for t in (x, g)]
    (x, of_x, long_x), (g, of_g, long_g) = made
    both, lengths = of_x.double() * of_g, (long_x, long_g)
    return Convolution(layer, x, g, size, sides, units=both, is_pair=is_pair, lengths=lengths)


@KernelTest
def _agrees(device: torch.device, x_type: torch.dtype, g_type: torch.dtype, is_pair: bool) -> bool:
    """Whether the kernels run here and give what the windows give.

    Pairs are tried on numbers all of whose second halves have the sign of the first: one of the
    three products that is missing changes norms and sums by 2⁻¹².
    """
    close, narrow = (1.5e-4, 1e-5) if is_pair else (2e-2, 1e-2)
    draw = torch.Generator(device=device).manual_seed(7)
    for layer, pad in (
        (nn.Conv2d(24, 40, 3, padding=1), 1),
        (nn.Conv2d(70, 130, (3, 2), stride=(2, 1), dilation=(1, 2)), 0),
        (nn.Conv2d(130, 200, 3, stride=4, padding=1), 1),  # norms by `conv_gram`
    ):
        sides: Sides = ((pad, pad), (pad, pad)) if pad else ()
        x = torch.randn(5, layer.in_channels, 13, 11, device=device, generator=draw).to(x_type)
        out = layer.to("meta")(x.float().to("meta")).shape
        g = torch.randn(out, device=device, generator=draw).to(g_type)
        if is_pair:
            x, g = (t.half().float().mul_(1.0 + 2.0**-12) for t in (x, g))
        plain = Convolution(layer, padded(x.double(), sides, mode="zeros"), g.double(), 5)
        outer = plain._outer()
        truth, widths = outer.dense().reshape(5, -1), (outer.a.shape[2], outer.g.shape[2])
        lengths, how = (outer.a.norm(dim=2), outer.g.norm(dim=2)), tolerance(g, *widths)
        own = raised(truth.square().sum(1), lengths, widths, how)
        factors = torch.tensor([0.5, 1.0, 0.0, 0.25, 1.0], device=device)
        wanted, good = factors.double() @ truth, factors != 0.0
        g[2] = torch.nan
        try:
            form = _fused(layer, x, g, 5, sides)
            units = 1.0 if form.units is None else form.units
            found = conv_kernels.squares(form.x, form.g, **form._kernels, lengths=form.lengths)
            found = found * units**2
            total = conv_kernels.total(form.x, form.g, factors * units, **form._kernels)
        except Exception:  # a compiler may fail in any way; the windows are always there
            return False
        gap = (total.reshape(-1).double() - wanted).norm() / wanted.norm()
        if not torch.allclose(found[good], own[good], rtol=close) or not bool(gap < narrow):
            return False
    return True


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(layer: nn.Conv2d, a: Tensor, g: Tensor, size: int) -> dict[str, GradientForm]:
    sides, mode = sides_of(layer), layer.padding_mode
    if mode != "zeros":
        a, sides = padded(wide(a), sides, mode=mode), ()
    if is_linear(layer, a, g, sides):
        return by_patches(layer, padded(a, sides, mode="zeros"), g, size)
    if _has_kernels(layer, a, g, size, sides):
        weight = _fused(layer, a, g, size, sides)
    else:
        a, g = wide(a), wide(g)
        if a.device.type != "cpu":
            a, sides = padded(a, sides, mode=mode), ()
        weight = Convolution(layer, a, g, size, sides)
    if layer.bias is None:
        return {"weight": weight}
    return {"weight": weight, "bias": DenseGradient(_by_channel(g, size))}
