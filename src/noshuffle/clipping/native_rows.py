"""Rows of float32 matrices in C: squared lengths, weighted rows and their sums, many at once.

    squares    ‖x[b]‖², and ‖x[b]‖² · ‖y[b]‖² where there is a y        in double precision
    weighted   f[r // span] · x[r, j], and/or Σ_r f[r // span] · x[r, j] in double precision

Torch takes an operation for each matrix, and a copy for each wider type; here a list of matrices is
one call that reads each of them once. Rows are taken in eight slices, each in order, whose sums are
added up in order, so the bits do not depend on the number of threads. Torch is the twin in the
tests. No state.

>>> library() is library()
True
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noshuffle.c_library import together
from noshuffle.clipping.native_loops import NativeLoops

#: Numbers in all matrices of a step below which torch's operations are not worth a compiler's time.
LEAST = 1 << 16
#: Numbers below which a second thread costs more than it saves.
_ALONE = 1 << 15
#: Slices that the rows of a matrix are cut into (as in `native/rows.c`), and the widest summed up.
_SLICES, WIDEST = 8, 1 << 16


class RowsJob(ctypes.Structure):
    """A job as `native/rows.c` declares it."""

    _fields_ = (
        ("next", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("matrices", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
    )


class Matrix(NamedTuple):
    """Rows of numbers, one behind the other: where they begin, how many, how long.

    Whoever makes one keeps its tensor alive.
    """

    place: int
    rows: int
    width: int


def matrix(t: Tensor, rows: int) -> Matrix | None:
    """A tensor as so many rows, or None if the loops cannot read it where it lies."""
    if t.dtype is not torch.float32 or type(t) is not Tensor or t.device.type != "cpu":
        return None
    count = t.numel()
    if not count or not rows or count % rows or not t.is_contiguous():
        return None
    return Matrix(t.data_ptr(), rows, count // rows)


def is_worth(size: int) -> bool:
    """Whether so many numbers are enough to do; a repeated step must take the same path."""
    return size >= LEAST and library() is not None


def squares(
    pairs: Sequence[tuple[Matrix, Matrix | None]], *, built: ctypes.CDLL | None = None
) -> list[Tensor]:
    """For x and y with the same number of rows: [‖x[b]‖², ‖x[b]‖²‖y[b]‖²], [2, rows], float64.

    Without y the second row means nothing. Guarantees: products of two numbers are exact and sums
    are rounded in double precision only; a NaN or an infinity in a row makes its results one.
    """
    found, table, size = [], [], 0
    for (x, rows, width), y in pairs:
        own = torch.empty((2, rows), dtype=torch.float64, device="cpu")
        found.append(own)
        other, _, wide = y or (0, 0, 0)
        table += [rows, width, 1, wide, x, other, own.data_ptr(), 0, 0, 0]
        size += rows * (width + wide)
    _run(built or library(), "squares", table, size)
    return found


class Weighing(NamedTuple):
    """What is wanted of a matrix: its rows times their factors, the sum of those, or both."""

    of: Matrix
    is_kept: bool
    is_summed: bool


def weighted(
    wanted: Sequence[Weighing], factors: Tensor, *, built: ctypes.CDLL | None = None
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Weighted rows [rows, width] and their sum [width], float32, as far as they are wanted.

    There may be several rows to a factor. Guarantees: factors are rounded to float32 once, for
    both; each weighted number is rounded once; the bits are the same for any number of threads.
    """
    built = built or library()
    factors = factors.to(torch.float64).contiguous()
    found: list[tuple[Tensor | None, Tensor | None]] = []
    many, table, size = len(factors), [], 0
    summed_widths = [of.width for of, _, is_summed in wanted if is_summed]
    slices = torch.empty(_SLICES * sum(summed_widths), dtype=torch.float64, device="cpu")
    place = slices.data_ptr()
    for (x, rows, width), is_kept, is_summed in wanted:
        kept = torch.empty((rows, width), dtype=torch.float32, device="cpu") if is_kept else None
        summed = torch.empty(width, dtype=torch.float32, device="cpu") if is_summed else None
        found.append((kept, summed))
        ends = [0 if t is None else t.data_ptr() for t in (kept, summed)]
        table += [rows, width, rows // many, 0, x, 0, 0, place, *ends]
        place += 8 * _SLICES * width if is_summed else 0
        size += rows * width
    _run(built, "weighted", table, size, factors)
    return found


def _run(
    built: Any, name: str, table: Sequence[int], size: int, factors: Tensor | None = None
) -> None:
    rows = array("q", table)
    job = RowsJob(0, len(table) // 10, rows.buffer_info()[0])
    if factors is not None:
        job.factors = factors.data_ptr()
    together(getattr(built, name), job, threads=torch.get_num_threads() if size >= _ALONE else 1)
    if factors is not None:
        built.gather(ctypes.addressof(job))


def _agrees(built: ctypes.CDLL) -> bool:
    """Whether the loops find what torch finds, on rows of several lengths."""
    draw = torch.Generator().manual_seed(0)
    widths, kind = (1, 45, 64, 131), torch.float32
    rows = [torch.randn(18, width, generator=draw, dtype=kind, device="cpu") for width in widths]
    read = [Matrix(t.data_ptr(), *t.shape) for t in rows]
    lengths = [t.double().square().sum(1) for t in rows]
    alone, *others = squares([(read[0], None), *zip(read[1:], read)], built=built)
    is_good = torch.allclose(alone[0], lengths[0], rtol=1e-13)
    for found, own, other in zip(others, lengths[1:], lengths):
        is_good &= torch.allclose(found, torch.stack([own, own * other]), rtol=1e-13)
    factors = torch.rand(9, generator=draw, dtype=kind, device="cpu").double()
    each = factors.float().repeat_interleave(2)
    wanted = [Weighing(m, k != 1, k != 2) for k, m in enumerate(read)]
    for t, (kept, summed) in zip(rows, weighted(wanted, factors, built=built)):
        is_good &= kept is None or torch.equal(kept, t * each.unsqueeze(1))
        truth = (each.double() @ t.double()).float()
        is_good &= summed is None or torch.allclose(summed, truth, rtol=1e-6, atol=1e-7)
    return is_good


#: Handed out only after they agreed with torch.
library = NativeLoops("rows.c", "squares", "weighted", "gather", agrees=_agrees)
