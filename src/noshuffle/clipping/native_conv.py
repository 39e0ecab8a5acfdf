"""Per-example weight gradients of convolutions in C: their norms, and their weighted sum.

In each group, with the input cut into windows of K = channels × kernel numbers at L positions,

    G_b[o, k] = Σ_l g[b, o, l] · window[b, l, k]

The windows of a few positions at a time are written into the first-level cache, where a block of
outer products is summed up in registers; G_b itself stays in a cache too and is never kept:

    squares   Σ_{o,k} G_b[o, k]²  for every example b, also with its tolerance for rounding
    total     Σ_b f_b G_b         examples in eight slices, each in order, added up in order

so the bits do not depend on the number of threads. `rules_conv` has the torch form, which is the
twin of `native/convolution.c` in the tests; `conv_windows.with_tolerance` is that of the tolerance.
No state.

>>> library() is library()
True
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from noshuffle.c_library import together
from noshuffle.clipping.conv_windows import (
    Sides,
    lost_by_number,
    most_windows,
    sides_of,
    with_tolerance,
)
from noshuffle.clipping.gram import allowance, smallest
from noshuffle.clipping.native_loops import NativeLoops

#: Slices that the examples of a total are cut into, and numbers of windows that are written at a
#: time (64 KiB), as in `native/convolution.c`.
SLICES, SCRATCH = 8, 1 << 14
#: Numbers in a vector, to which windows are padded.
LANE = 16
#: Positions from which on a gradient takes longer to find than to read again.
MANY_POSITIONS = 64
#: The largest G (numbers) and the largest row of a window that fit the caches.
LARGEST, WIDEST = 1 << 17, 4096

#: The struct of `native/convolution.c`; a star marks an address, all else is a whole number.
_FIELDS = """
    next examples frames groups positions outputs width runs run step example group *place *offset
    *x *g *factors *squares *total *scratch taken keep padded lines line *into *channels
    window covered *rounding *tolerated
"""


class ConvJob(ctypes.Structure):
    """A job as `native/convolution.c` declares it."""

    _fields_ = tuple(
        (name.strip("*"), ctypes.c_void_p if name[0] == "*" else ctypes.c_int64)
        for name in _FIELDS.split()
    )


class Geometry(NamedTuple):
    """Kernel, stride and dilation by axis, and the number of groups."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def bordered(space: Sequence[int], sides: Sides) -> tuple[int, ...]:
    """The lengths of the axes with zeros before and after them."""
    return tuple(s + a + b for s, (a, b) in zip(space, sides)) if sides else tuple(space)


def _places(axes: Iterable[tuple[int, int]], *, start: int = 0) -> Any:
    """start + Σ i·step for all indices i of axes given by length and step, the last one fastest."""
    found = np.full(1, start, dtype=np.int64)
    for length, step in axes:
        found = (found[:, None] + np.arange(length) * step).reshape(-1)
    return np.ascontiguousarray(found)


class ConvTables(NamedTuple):
    """What the loops must know of a convolution but the numbers: `ConvJob` from `examples` on."""

    outputs: int
    width: int
    window: int
    place: Any  # where every position begins in x [channels of a group, *space with its border],
    offset: Any  # every run of the kernel, along the last axis,
    into: Any  # and every row (last axis) of x without a border; None where there is none
    border: tuple[int, int, int]
    head: tuple[int, ...]
    covered: int  # windows that a number of x may lie in
    rounding: Any  # of one number, of inner products, and what vanishes in those


@lru_cache(maxsize=64)
def _conv_tables(
    shape: torch.Size, sent: torch.Size, size: int, how: Geometry, sides: Sides
) -> ConvTables:
    """From the shapes of x and g; x lies as one block."""
    channels, space = shape[1] // how.groups, shape[2:]
    wide = bordered(space, sides)
    strides = [math.prod(wide[axis + 1 :]) for axis in range(len(wide))]
    settings = list(zip(wide, strides, how.kernel, how.stride, how.dilation))
    sizes = [((w - (k - 1) * d - 1) // step + 1, step * s) for w, s, k, step, d in settings]
    runs = [(k, d * s) for _, s, k, _, d in settings[:-1]]
    by_channel = (channels, math.prod(wide))
    place, offset, into = _places(sizes), _places([by_channel, *runs]), None
    if sides:
        start = sum(before * s for (before, _), s in zip(sides, strides))
        into = _places([by_channel, *zip(space[:-1], strides)], start=start)
    outputs, window = sent[1] // how.groups, len(offset) * how.kernel[-1]
    width = -(-window // LANE) * LANE
    head = (
        *(size, shape[0] // size, how.groups, len(place), outputs, width),
        *(len(offset), how.kernel[-1], how.dilation[-1]),
        *(math.prod(shape[1:]), channels * math.prod(space)),
        *(place.ctypes.data, offset.ctypes.data),
    )
    border = (channels * math.prod(wide), 0 if into is None else len(into), space[-1])
    covered = most_windows(how.kernel, how.stride, how.dilation)
    kind = torch.float32
    lost = lost_by_number(kind), allowance(kind, window, outputs), smallest(kind)
    rounding = np.array(lost, dtype=np.float64)
    return ConvTables(outputs, width, window, place, offset, into, border, head, covered, rounding)


class Gradients:
    """Per-example gradients of one convolution: x [B·frames, C, *space], g its output's.

    x is padded already, or `sides` says how many zeros go before and after each axis; then each
    example gets its border in the cache, which must be large enough (`fits_cache`).

    Guarantees: `squares` and `total` are sums of products in float32, at most a vector's worth of
    partial sums each, the same bits for any number of threads.
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        *,
        size: int,
        how: Geometry,
        sides: Sides = (),
        built: ctypes.CDLL | None = None,
    ) -> None:
        self._built = library() if built is None else built
        self._size, self._how = size, how
        self._x, self._g = x.contiguous(), g.contiguous()
        self._plan = plan = _conv_tables(x.shape, g.shape, size, how, sides)
        self._job = ConvJob(0, *plan.head, self._x.data_ptr(), self._g.data_ptr())
        self._job.window, self._job.covered = plan.window, plan.covered
        self._job.rounding = plan.rounding.ctypes.data
        if plan.into is not None:
            self._job.padded, self._job.lines, self._job.line = plan.border
            self._job.into = plan.into.ctypes.data
        #: After `squares` or `dense`: the squared norms, as they are and with a tolerance for
        #: rounding (`conv_windows.with_tolerance`), and the sums of g, [B, outputs].
        self.lengths: Tensor | None = None
        self.tolerated: Tensor | None = None
        self.channels: Tensor | None = None

    @property
    def is_small(self) -> bool:
        """Whether the windows of an example fit the cache; else torch's own total is faster."""
        return len(self._plan.place) * self._plan.width <= SCRATCH

    def squares(self) -> Tensor:
        """Squared norm of the gradient of every example, [B], float64."""
        plan = self._plan
        shape = (torch.get_num_threads(), plan.outputs * plan.width)
        return self._measure(torch.empty(shape, dtype=torch.float32, device="cpu"), keep=0)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether gradients are kept between norm and sum: not where one takes more than twice the
        room of g. By pictures and layer alone: a sum of those that are kept is rounded in another
        way, and one more example must not change how all the others are."""
        positions = len(self._plan.place)
        return positions >= MANY_POSITIONS and self._plan.width <= 2 * positions

    def dense(self) -> Tensor:
        """The gradients written out, [B, groups · outputs, channels of a group, *kernel]."""
        plan = self._plan
        shape = (self._size, self._how.groups * plan.outputs, plan.width)
        scratch = torch.empty(shape, dtype=torch.float32, device="cpu")
        self._measure(scratch, keep=1)
        return self._shaped(scratch)

    def _measure(self, scratch: Tensor, *, keep: int) -> Tensor:
        job, many = self._job, self._how.groups * self._plan.outputs
        both = torch.empty((2, self._size), dtype=torch.float64, device="cpu")
        self.lengths, self.tolerated = both
        self.channels = torch.empty((self._size, many), dtype=torch.float32, device="cpu")
        job.squares, job.tolerated = self.lengths.data_ptr(), self.tolerated.data_ptr()
        job.channels = self.channels.data_ptr()
        job.scratch, job.taken, job.keep = scratch.data_ptr(), 0, keep
        self._run("squares", torch.get_num_threads())
        return self.lengths

    def total(self, factors: Tensor) -> Tensor:
        """Σ_b factors[b] · gradient of b, [groups · outputs, channels of a group, *kernel]."""
        job, plan = self._job, self._plan
        weights = factors.to(torch.float32).contiguous()
        shape = (SLICES, self._how.groups * plan.outputs, plan.width)
        slices = torch.zeros(shape, dtype=torch.float32, device="cpu")
        job.factors, job.total = weights.data_ptr(), slices.data_ptr()
        self._run("total", min(SLICES, torch.get_num_threads()))
        return self._shaped(slices.sum(0))

    def _shaped(self, rows: Tensor) -> Tensor:
        """Without the zeros behind each window, in the shape of the weight."""
        shape = (self._x.shape[1] // self._how.groups, *self._how.kernel)
        return rows[..., : self._plan.window].reshape(*rows.shape[:-1], *shape)

    def _run(self, name: str, threads: int) -> None:
        self._job.next = 0
        together(getattr(self._built, name), self._job, threads=threads)


def fits_cache(x: Tensor, how: Geometry, sides: Sides) -> bool:
    """Whether an example of one group fits the cache with its border."""
    return x.shape[1] // how.groups * math.prod(bordered(x.shape[2:], sides)) <= SCRATCH


def may_fit(x: Tensor, g: Tensor, how: Geometry) -> bool:
    """Whether the loops know such tensors, however many examples and positions there are."""
    if x.dtype != torch.float32 or g.dtype != torch.float32 or x.device.type != "cpu":
        return False
    width = x.shape[1] // how.groups * math.prod(how.kernel)
    return width <= WIDEST and width * (g.shape[1] // how.groups) <= LARGEST


def is_fit(x: Tensor, g: Tensor, how: Geometry) -> bool:
    """Whether the loops know these tensors, and are worth it against two Gram matrices.

    By pictures and layer alone, so that a step repeated in another process takes the same path, and
    so does a batch with one more example.
    """
    width, outputs = x.shape[1] // how.groups * math.prod(how.kernel), g.shape[1] // how.groups
    positions = g.shape[2:].numel()
    if not may_fit(x, g, how) or not x.numel() or positions <= 1:
        return False
    # The loops run near the processor's speed, the products of Gram matrices at half of it.
    is_worth = width * outputs <= 2 * positions * (width + outputs)
    return is_worth and library() is not None


def _agrees(built: ctypes.CDLL) -> bool:
    return _finds_gradients(built) and _finds_tolerance(built)


def _finds_gradients(built: ctypes.CDLL) -> bool:
    """Whether the loops find the gradients of a small convolution with groups and dilation."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 9, 20, generator=draw, dtype=torch.float32, device="cpu")
    g = torch.randn(3, 26, 7, 9, generator=draw, dtype=torch.float32, device="cpu")
    x[..., :1] = x[..., -2:] = 0.0  # a border, which the loops may also add themselves
    how = Geometry((2, 3), (1, 2), (2, 1), groups=2)
    shape = (26, 3, 2, 3)
    weight_of: Any = conv2d_weight
    pairs = zip(torch.split(x, 1), torch.split(g, 1))
    each = torch.stack([weight_of(a, shape, b, (1, 2), 0, (2, 1), 2) for a, b in pairs])
    own = Gradients(x, g, size=3, how=how, built=built)
    inner = Gradients(x[..., 1:-2], g, size=3, how=how, sides=((0, 0), (1, 2)), built=built)
    squares, factors = (
        own.squares(),
        torch.tensor([0.5, 0.0, -2.0], dtype=torch.float32, device="cpu"),
    )
    is_close = torch.allclose(squares, each.double().square().sum((1, 2, 3, 4)), rtol=1e-5)
    total = torch.tensordot(factors, each, 1)
    is_close = is_close and torch.allclose(own.total(factors), total, rtol=1e-4, atol=1e-4)
    return is_close and torch.equal(inner.squares(), squares)


def _finds_tolerance(built: ctypes.CDLL) -> bool:
    """Whether the loops find the tolerance of examples that have few positions, few that are not
    zero, many, and none."""
    draw = torch.Generator().manual_seed(0)
    few = nn.Conv2d(8, 40, 3, padding=1, device="meta")
    many = nn.Conv2d(6, 26, (2, 3), (1, 2), dilation=(2, 1), groups=2, device="meta")
    for layer, space, sent in ((few, (2, 4), (2, 4)), (many, (9, 20), (7, 9))):
        x = torch.randn(
            6, layer.in_channels, *space, generator=draw, dtype=torch.float32, device="cpu"
        )
        g = torch.randn(
            6, layer.out_channels, *sent, generator=draw, dtype=torch.float32, device="cpu"
        )
        g[:2, :, 1:] = g[:2, ..., 3:] = g[3:] = 0.0
        how = Geometry(layer.kernel_size, layer.stride, layer.dilation, layer.groups)
        sides = sides_of(layer)
        own = Gradients(x, g, size=3, how=how, sides=sides, built=built)
        squares = own.squares()
        added = with_tolerance(squares, layer, x, g, size=3, sides=sides) - squares
        assert own.tolerated is not None
        if not torch.allclose(own.tolerated - squares, added, rtol=1e-4, atol=0.0):
            return False
    return True


#: Handed out only after they agreed with torch.
library = NativeLoops("convolution.c", "squares", "total", agrees=_agrees)
