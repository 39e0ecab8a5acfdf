"""Norms of Σ_t g_t a_tᵀ in C, of many linear maps at once, and the sums of g over steps.

    squares    ‖Σ_t g[b,t] a[b,t]ᵀ‖²      from inner products of steps, as `gram.bounded`
    sums       Σ_t g[b,t]                 the gradients of a bias
    and        ‖Σ_t g[b,t]‖²

Torch takes two products and some twenty small operations for each map, reads g once more for the
bias, and is slow at matrices of a few rows; here all maps of a step are one call that reads a and g
once. Examples are taken by threads as they come, and each is added up in one order, so the bits do
not depend on the number of threads. `gram.bounded` is the twin in the tests. No state.

>>> library() is library()
True
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from noshuffle.c_library import together
from noshuffle.clipping import gram, native_rows
from noshuffle.clipping.native_loops import NativeLoops

#: The most steps of an example (as in `native/steps.c`); products of longer ones are fast in torch.
LONGEST = 64
#: Numbers below which a second thread costs more than it saves.
_ALONE = 1 << 14


class StepsJob(ctypes.Structure):
    """A job as `native/steps.c` declares it."""

    _fields_ = (
        ("next", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("maps", ctypes.c_void_p),
        ("unit", ctypes.c_double),
        ("tiny", ctypes.c_double),
    )


class StepMap(NamedTuple):
    """A linear map: inputs a [B, T, i] and output gradients g [B, T, o]; are sums of g wanted?"""

    a: Tensor
    g: Tensor
    is_summed: bool


class StepNorms(NamedTuple):
    """Per example, in double precision but for the sums."""

    squares: Tensor
    sums: Tensor | None
    sum_squares: Tensor | None


def fits(a: Tensor, g: Tensor) -> bool:
    """Whether the loops can read both where they lie."""
    for t in (a, g):
        if t.dtype is not torch.float32 or type(t) is not Tensor or t.device.type != "cpu":
            return False
        if not t.numel() or t.stride(2) != 1:
            return False
    return a.shape[:2] == g.shape[:2] and 1 < a.shape[1] <= LONGEST


def is_worth(size: int) -> bool:
    """Whether so many numbers are enough to do; a repeated step must take the same path."""
    return size >= native_rows.LEAST and library() is not None


def squares(maps: Sequence[StepMap], *, built: ctypes.CDLL | None = None) -> list[StepNorms]:
    """What is wanted of each map that `fits`.

    Guarantees: squares are never too small, by the rounding model of `forms`; a NaN or an infinity
    in an example makes its results one.
    """
    found, table, size = [], [], 0
    for a, g, is_summed in maps:
        many, steps, width = g.shape
        lengths = torch.empty((2, many), dtype=torch.float64, device="cpu")
        sums = torch.empty((many, width), dtype=torch.float32, device="cpu") if is_summed else None
        found.append(StepNorms(lengths[0], sums, lengths[1] if is_summed else None))
        table += [many, steps]
        for t in (a, g):
            table += [t.data_ptr(), t.shape[2], t.stride(0), t.stride(1)]
            size += t.numel()
        table += [lengths[0].data_ptr(), 0 if sums is None else sums.data_ptr()]
        table.append(lengths[1].data_ptr())
    rows = array("q", table)
    unit = 0.5 * torch.finfo(torch.float32).eps
    tiny = gram.smallest(torch.float32)
    job = StepsJob(0, len(maps), rows.buffer_info()[0], unit, tiny)
    threads = torch.get_num_threads() if size >= _ALONE else 1
    together((built or library()).steps, job, threads=threads)  # type: ignore[union-attr]
    return found


def _agrees(built: ctypes.CDLL) -> bool:
    """Whether the loops find what torch finds, on maps of several lengths and layouts."""
    draw, maps = torch.Generator().manual_seed(0), []
    for steps, inputs, outputs in ((2, 3, 70), (5, 130, 9), (9, 64, 1100)):
        a, g = (
            torch.randn(steps, 3, n, generator=draw, device="cpu").float()
            for n in (inputs, outputs)
        )
        maps.append(StepMap(a.transpose(0, 1), g.transpose(0, 1).contiguous(), outputs != 9))
    a, g, _ = maps[-1]
    g[1] = g[1, :1].clone()  # all steps alike: the largest sum
    for own, found in zip(maps, squares(maps, built=built)):
        a, g = own.a.double(), own.g.double()
        truth = (g.mT @ a).square().sum((1, 2))
        reach = (a.norm(dim=2) * g.norm(dim=2)).sum(1).square()
        moved = gram.allowance(torch.float32, a.shape[2], g.shape[2]) * reach
        is_good = bool((found.squares >= truth).all())
        is_good &= torch.allclose(found.squares, truth + moved, rtol=1e-6)
        if found.sums is not None and found.sum_squares is not None:
            is_good &= torch.allclose(found.sums, g.sum(1).float(), rtol=1e-6, atol=1e-6)
            lengths = found.sums.double().square().sum(1)
            is_good &= torch.allclose(found.sum_squares, lengths, rtol=1e-12)
        if not is_good:
            return False
    return True


#: Handed out only after they agreed with torch.
library = NativeLoops("steps.c", "steps", agrees=_agrees)
