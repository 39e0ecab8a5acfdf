"""Per-example weight gradients of convolutions in C: their norms, and their weighted sum.

In each group, with the input cut into windows of K = channels × kernel numbers at L positions,

    G_b[o, k] = Σ_l g[b, o, l] · window[b, l, k]

The windows of a few positions at a time are written into the first-level cache, where a block of
outer products is summed up in registers; G_b itself stays in a cache too and is never kept:

    squares   Σ_{o,k} G_b[o, k]²  for every example b
    total     Σ_b f_b G_b         examples in eight slices, each in order, added up in order

so the bits do not depend on the number of threads. `native/convolution.c` is built where there is a
compiler, and used only after it agreed with torch's own gradient; `rules_conv` has the torch form,
which is its twin in the tests. No state.

>>> library() is library()
True
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.c_library import build, text_of, together

#: Slices that the examples of a total are cut into, and numbers of windows that are written at a
#: time (64 KiB), as in `native/convolution.c`.
SLICES, SCRATCH = 8, 1 << 14
#: Numbers in a vector, to which windows are padded.
LANE = 16
#: Numbers of gradients that are kept between norm and sum: 2 MiB.
KEPT = 1 << 19
#: Multiplications below which torch's own operations take no time worth a compiler's.
LEAST = 1 << 20
#: The largest G (numbers) and the largest row of a window that fit the caches.
LARGEST, WIDEST = 1 << 17, 4096


class ConvJob(ctypes.Structure):
    """A job as `native/convolution.c` declares it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "examples", "frames", "groups")),
        *((name, ctypes.c_int64) for name in ("positions", "outputs", "width", "runs", "run")),
        *((name, ctypes.c_int64) for name in ("step", "example", "group")),
        *((name, ctypes.c_void_p) for name in ("place", "offset", "x", "g", "factors")),
        *((name, ctypes.c_void_p) for name in ("squares", "total", "scratch")),
        *((name, ctypes.c_int64) for name in ("taken", "keep", "padded", "lines", "line")),
        *((name, ctypes.c_void_p) for name in ("into", "channels")),
    )


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride and dilation by axis, and the number of groups."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@lru_cache(maxsize=64)
def _tables(shape: tuple[int, ...], how: Geometry) -> tuple[Any, Any]:
    """Where in x [channels of a group, *space] every position and every run of the kernel begins.

    A run is the kernel along the last axis.
    """
    channels, *space = shape
    sizes = [
        (s - (k - 1) * d - 1) // t + 1
        for s, k, t, d in zip(space, how.kernel, how.stride, how.dilation)
    ]
    strides = [math.prod(space[axis + 1 :]) for axis in range(len(space))]
    place = np.zeros(1, dtype=np.int64)
    for size, step, stride in zip(sizes, how.stride, strides):
        place = (place[:, None] + np.arange(size) * step * stride).reshape(-1)
    offset = np.arange(channels, dtype=np.int64) * math.prod(space)
    for k, dilation, stride in zip(how.kernel[:-1], how.dilation[:-1], strides[:-1]):
        offset = (offset[:, None] + np.arange(k) * dilation * stride).reshape(-1)
    return np.ascontiguousarray(place), np.ascontiguousarray(offset)


Sides = tuple[tuple[int, int], ...]


def bordered(space: Sequence[int], sides: Sides) -> tuple[int, ...]:
    """The lengths of the axes with zeros before and after them."""
    return tuple(s + a + b for s, (a, b) in zip(space, sides)) if sides else tuple(space)


@lru_cache(maxsize=64)
def _lines(shape: tuple[int, ...], sides: Sides) -> Any:
    """Where every row (last axis) of x [channels, *space] begins once it has a border."""
    wide = bordered(shape[1:], sides)
    into = np.arange(shape[0], dtype=np.int64) * math.prod(wide)
    for axis, (before, _) in enumerate(sides[:-1]):
        steps = (np.arange(shape[1 + axis]) + before) * math.prod(wide[axis + 1 :])
        into = (into[:, None] + steps).reshape(-1)
    return np.ascontiguousarray(into + sides[-1][0])


@dataclass(frozen=True)
class ConvTables:
    """What the loops must know of a convolution but the numbers: `ConvJob` from `examples` on."""

    outputs: int
    width: int
    window: int
    place: Any
    offset: Any
    into: Any
    border: tuple[int, int, int]
    head: tuple[int, ...]


@lru_cache(maxsize=64)
def _conv_tables(
    shape: torch.Size, sent: torch.Size, size: int, how: Geometry, sides: Sides
) -> ConvTables:
    """From the shapes of x and g; x lies as one block."""
    own = (shape[1] // how.groups, *shape[2:])
    inner = (own[0], *bordered(own[1:], sides))
    into = _lines(own, sides) if sides else None
    place, offset = _tables(inner, how)
    outputs, window = sent[1] // how.groups, len(offset) * how.kernel[-1]
    width = -(-window // LANE) * LANE
    head = (
        *(size, shape[0] // size, how.groups, len(place), outputs, width),
        *(len(offset), how.kernel[-1], how.dilation[-1]),
        *(math.prod(shape[1:]), math.prod(own)),
        *(place.ctypes.data, offset.ctypes.data),
    )
    border = (math.prod(inner), 0 if into is None else len(into), own[-1])
    return ConvTables(outputs, width, window, place, offset, into, border, head)


class Gradients:
    """Per-example gradients of one convolution: x [B·frames, C, *space], g its output's.

    x is padded already, or `sides` says how many zeros go before and after each axis; then each
    example gets its border in the cache, which must be large enough (`has_room`).

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
        if plan.into is not None:
            self._job.padded, self._job.lines, self._job.line = plan.border
            self._job.into = plan.into.ctypes.data
        #: After `squares` or `dense`: the squared norms, and the sums of g, [B, outputs].
        self.lengths: Tensor | None = None
        self.channels: Tensor | None = None

    @property
    def is_small(self) -> bool:
        """Whether the windows of an example fit the cache; else torch's own total is faster."""
        return len(self._plan.place) * self._plan.width <= SCRATCH

    def squares(self) -> Tensor:
        """Squared norm of the gradient of every example, [B], float64."""
        threads, job, plan = torch.get_num_threads(), self._job, self._plan
        scratch = torch.empty((threads, plan.outputs * plan.width), dtype=torch.float32)
        job.scratch, job.taken, job.keep = scratch.data_ptr(), 0, 0
        return self._measure(threads)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether the gradients are small beside the work of finding them."""
        plan = self._plan
        few = self._size * self._how.groups * plan.outputs * plan.width <= KEPT
        return few and len(plan.place) >= 64

    def dense(self) -> Tensor:
        """The gradients written out, [B, groups · outputs, channels of a group, *kernel]."""
        plan = self._plan
        shape = (self._size, self._how.groups * plan.outputs, plan.width)
        scratch = torch.empty(shape, dtype=torch.float32)
        self._job.scratch, self._job.keep = scratch.data_ptr(), 1
        self._measure(torch.get_num_threads())
        return self._shaped(scratch)

    def _measure(self, threads: int) -> Tensor:
        job, many = self._job, self._how.groups * self._plan.outputs
        self.lengths = torch.empty(self._size, dtype=torch.float64)
        self.channels = torch.empty((self._size, many), dtype=torch.float32)
        job.squares, job.channels = self.lengths.data_ptr(), self.channels.data_ptr()
        self._run("squares", threads)
        return self.lengths

    def total(self, factors: Tensor) -> Tensor:
        """Σ_b factors[b] · gradient of b, [groups · outputs, channels of a group, *kernel]."""
        job, how = self._job, self._how
        weights = factors.to(torch.float32).contiguous()
        plan = self._plan
        shape = (SLICES, how.groups * plan.outputs, plan.width)
        slices = torch.zeros(shape, dtype=torch.float32)
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


def has_room(x: Tensor, how: Geometry, sides: Sides) -> bool:
    """Whether an example of one group fits the cache with its border."""
    return x.shape[1] // how.groups * math.prod(bordered(x.shape[2:], sides)) <= SCRATCH


def is_fit(x: Tensor, g: Tensor, how: Geometry) -> bool:
    """Whether the loops know these tensors, and are worth it against two Gram matrices."""
    if x.dtype != torch.float32 or g.dtype != torch.float32 or x.device.type != "cpu":
        return False
    return _is_worth(x.shape, g.shape, how, LEAST) and library() is not None


@lru_cache(maxsize=64)
def _is_worth(shape: torch.Size, sent: torch.Size, how: Geometry, least: int) -> bool:
    if not math.prod(shape) or not math.prod(sent):
        return False
    width = shape[1] // how.groups * math.prod(how.kernel)
    outputs, positions = sent[1] // how.groups, math.prod(sent[2:])
    # The loops run near the processor's speed, the products of Gram matrices at half of it.
    is_worth = positions > 1 and width * outputs <= 2 * positions * (width + outputs)
    # By shapes alone, so that a step repeated in another process takes the same path.
    is_worth = is_worth and sent[0] * positions * width * outputs >= least
    return is_worth and width <= WIDEST and width * outputs <= LARGEST


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled loops, or None where they cannot be built or are switched off.

    Guarantees: handed out only after they agreed with torch's own gradients of a convolution.
    """
    built = _build(text_of("convolution.c"))
    return built if built is not None and _agrees(built) else None


def _build(text: str) -> ctypes.CDLL | None:
    built = build(text, flags=("-fno-math-errno",))
    for name in ("squares", "total") if built is not None else ():
        loop = getattr(built, name)
        loop.argtypes, loop.restype = [ctypes.c_void_p], None
    return built


def _agrees(built: ctypes.CDLL) -> bool:
    """Whether the loops find the gradients of a small convolution with groups and dilation."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 9, 20, generator=draw, dtype=torch.float32)
    weight = torch.zeros(26, 3, 2, 3, dtype=torch.float32)
    how = Geometry((2, 3), (1, 2), (2, 1), groups=2)
    settings = ([1, 2], [0, 0], [2, 1], False, [0, 0], 2, [False, True, False])
    g = torch.randn(3, 26, 7, 9, generator=draw, dtype=torch.float32)
    each = torch.stack(
        [
            torch.ops.aten.convolution_backward(
                g[b : b + 1], x[b : b + 1], weight, None, *settings
            )[1]
            for b in range(3)
        ]
    )
    factors = torch.tensor([0.5, 0.0, -2.0], dtype=torch.float32)
    own = Gradients(x, g, size=3, how=how, built=built)
    squares = each.double().square().sum((1, 2, 3, 4))
    is_close = torch.allclose(own.squares(), squares, rtol=1e-5)
    inner = Gradients(
        x[..., 1:-2], g, size=3, how=how, sides=((0, 0), (1, 2)), built=built
    ).squares()
    whole = torch.nn.functional.pad(x[..., 1:-2], (1, 2))
    is_close = is_close and torch.equal(
        inner, Gradients(whole, g, size=3, how=how, built=built).squares()
    )
    total = torch.tensordot(factors, each, 1)
    return is_close and torch.allclose(own.total(factors), total, rtol=1e-4, atol=1e-4)
