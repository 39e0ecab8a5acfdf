"""Norms of Σ_t g_t a_tᵀ from inner products, without the sum itself.

    total    Σ_{t,s} ⟨a_t, a_s⟩⟨g_t, g_s⟩ = ‖Σ_t g_t a_tᵀ‖²
    spread   Σ_t ‖a_t‖²‖g_t‖²                 the squared norm if steps were orthogonal
    reach    Σ_t ‖a_t‖‖g_t‖                   the norm if they all pointed the same way

The last two say how much rounding can have moved the first (see `forms`); `squares` adds that much.
On a GPU with Triton, where products run on tensor cores anyway (half precision, or TF32 allowed),
two kernels do all of it; elsewhere they do what comes after the inner products. State: whether they
agreed with the plain form, per device and type.

>>> import torch
>>> a, g = torch.randn(3, 4, 5), torch.randn(3, 4, 2)
>>> truth = torch.bmm(g.mT, a).square().sum((1, 2))
>>> torch.allclose(squares(a, g).float(), truth, rtol=1e-4)
True
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from noshuffle.clipping import gpu_kernels
from noshuffle.clipping.products import HALF, bmm, roundoff
from noshuffle.clipping.state import is_wrapped
from noshuffle.clipping.tolerance import RoundingTolerance
from noshuffle.triton_shim import KernelTest

#: Shorter sequences, or narrower maps, are no work for a kernel of their own.
SHORTEST, NARROWEST = 2, 64
#: Tensor cores round towards zero at every 16th addition: sums come out too small by this a term.
TENSOR_CORE = 2.0**-27
_HAS_MKL = bool(torch._C.has_mkl)
#: Steps up to which NumPy takes products of a matrix with its own transpose, on one thread.
FEW_STEPS = 32


def allowance(dtype: torch.dtype, *lengths: int) -> float:
    """κu: relative rounding error of products of inner products of these lengths."""
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    return 0.5 * eps * (2.0 + sum(math.sqrt(n) for n in lengths))


#: Of single (False) and double precision (True): see `smallest`.
SMALLEST = {False: torch.finfo(torch.float32).tiny, True: torch.finfo(torch.float64).tiny}


def smallest(dtype: torch.dtype) -> float:
    """Numbers below this lose digits where entries of this type are multiplied."""
    return SMALLEST[dtype is torch.float64]


def inner(x: Tensor) -> Tensor:
    """⟨x_t, x_s⟩ of every example, [B, T, T], in at least single precision.

    NumPy knows a matrix times its own transpose, which is half the work; torch 2.13 takes more than
    twice as long for few steps, with MKL, and for all of them without it.
    """
    if x.device.type != "cpu" or x.dtype in HALF or (_HAS_MKL and x.shape[1] > FEW_STEPS):
        return bmm(x, x.mT)
    if type(x) is not Tensor or get_proxy_mode() is not None or is_wrapped(x):
        return bmm(x, x.mT)
    rows = x.detach().numpy()
    with np.errstate(all="ignore"):  # an example may hold infinities: its norm is one, or NaN
        return torch.from_numpy(np.matmul(rows, rows.transpose(0, 2, 1)))


def sums(a: Tensor, g: Tensor, *, tiny: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """total, spread, reach and lost from two T×T matrices per example, float64; at least 0 each.

    lost: products of entries vanish below `tiny`, by at most that much each, so that ⟨a_t, a_s⟩ may
    lack i·tiny and ⟨g_t, g_s⟩ o·tiny; where the other factor is huge, that matters. Their
    product may vanish as well. Squared lengths are increased by the same before they are used.
    """
    tables = [inner(x) for x in (a, g)]
    lengths = [t.diagonal(dim1=1, dim2=2).double().clamp_min(0.0).sqrt() for t in tables]
    beside = _beside(*lengths, widths=(a.shape[2], g.shape[2]), tiny=tiny)
    total = tables[0].mul_(tables[1]).sum((1, 2), dtype=torch.float64).clamp_min(0.0)
    return total, *beside


def _beside(
    long_a: Tensor, long_g: Tensor, *, widths: tuple[int, int], tiny: float
) -> tuple[Tensor, Tensor, Tensor]:
    """spread, reach and lost from the lengths of the steps, [B, T] in float64."""
    long_a, long_g = (
        (own.square() + width * tiny).sqrt() for own, width in zip((long_a, long_g), widths)
    )
    sizes, steps = long_a * long_g, long_a.shape[1]
    lost = widths[0] * long_g.sum(1).square() + widths[1] * long_a.sum(1).square()
    return sizes.square().sum(1), sizes.sum(1), tiny * (lost + steps**2)


def rounding_tolerance(a: Tensor, g: Tensor) -> RoundingTolerance:
    """What rounding can have done: in the sums, and when the factors go in."""
    moved = roundoff(g)
    growth = TENSOR_CORE * (a.shape[2] + g.shape[2]) if moved > 0.0 else 0.0
    share = allowance(g.dtype, a.shape[2], g.shape[2])
    return RoundingTolerance(smallest(g.dtype), growth, moved, share)


def raised(a: Tensor, g: Tensor, tolerance: RoundingTolerance) -> Tensor:
    """The squared norm from inner products, increased by what rounding may have taken."""
    if has_kernel(a, g):
        return gpu_kernels.squares(a, g, tolerance)
    if _reads_tables(a, g):
        return gpu_kernels.of_tables(inner(a), inner(g), (a.shape[2], g.shape[2]), tolerance)
    return bounded(a, g, tolerance)


def bounded(a: Tensor, g: Tensor, tolerance: RoundingTolerance) -> Tensor:
    """The same by operations of torch."""
    total, spread, reach, lost = sums(a, g, tiny=tolerance.tiny)
    return _increased(total + lost, spread, reach, tolerance)


def _increased(
    total: Tensor, spread: Tensor, reach: Tensor, tolerance: RoundingTolerance
) -> Tensor:
    """(√total·(1 + growth) + moved·√spread)² + allowance·reach²."""
    _, growth, moved, share = tolerance
    if moved > 0.0:
        total = (total.sqrt() * (1.0 + growth) + moved * spread.sqrt()).square()
    return total + share * reach.square()


def of_written(squared: Tensor, a: Tensor, g: Tensor, lengths: tuple[Tensor, Tensor]) -> Tensor:
    """What `squares` would say of examples whose gradients were written out, from their norms.

    Which of the two ways is shorter depends on the longest example of a batch, or on the user with
    most rows. Increased on one way only, all other norms would change with that one.
    """
    run = gpu_kernels.of_written if _is_added_up(a, g) else _of_written
    return run(squared, lengths, (a.shape[2], g.shape[2]), rounding_tolerance(a, g))


def _is_added_up(a: Tensor, g: Tensor) -> bool:
    """Whether a kernel does that, in the place of thirty operations.

    It takes numbers in single precision, which the smallest of double precision are not.
    """
    is_it = _is_for_kernels(a) and torch.float64 not in (a.dtype, g.dtype)
    return is_it and _adds_up(a.device)


def _of_written(
    squared: Tensor,
    lengths: tuple[Tensor, Tensor],
    widths: tuple[int, int],
    tolerance: RoundingTolerance,
) -> Tensor:
    long_a, long_g = (own.double() for own in lengths)
    spread, reach, lost = _beside(long_a, long_g, widths=widths, tiny=tolerance.tiny)
    return _increased(squared.double() + lost, spread, reach, tolerance)


@KernelTest
def _adds_up(device: torch.device) -> bool:
    """Whether the kernel of written gradients runs here and agrees with the plain form."""
    draw = torch.Generator(device=device).manual_seed(7)
    squared, long_a, long_g = torch.rand(3, 3, 300, device=device, generator=draw)
    squared, lengths, widths = squared[:, 0], (long_a, long_g), (72, 200)
    how = RoundingTolerance(smallest(torch.float32), growth=3e-7, moved=2.0**-9, allowance=1e-6)
    try:
        found = gpu_kernels.of_written(squared, lengths, widths, how)
    except Exception:  # as below
        return False
    wanted = _of_written(squared, lengths, widths, how)
    return torch.allclose(found, wanted, rtol=1e-5, atol=0.0)


@KernelTest
def _is_good(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run here and agree with the plain form."""
    draw = torch.Generator(device=device).manual_seed(7)
    for steps in (150, 40, 20, 3):  # every tile that there is
        a, g = (torch.randn(3, steps, w, device=device, generator=draw) for w in (72, 200))
        a, g = a.to(dtype), g.to(dtype)
        a[1], g[1] = a[1, :1].clone(), g[1, :1].clone()  # all steps alike: the largest sum
        if dtype != torch.float16:  # squares that vanish, and would have mattered
            a[2], g[2] = a[2] * 1e-21, g[2] * 1e15
        try:
            found = gpu_kernels.squares(a, g, rounding_tolerance(a, g))
        except Exception:  # a compiler may fail in any way; the plain form is always there
            return False
        if not torch.allclose(found, bounded(a, g, rounding_tolerance(a, g)), rtol=4e-3, atol=0.0):
            return False
    return True


def _reads_tables(a: Tensor, g: Tensor) -> bool:
    """Whether a kernel reads the inner products; those of double precision are left to torch."""
    if not _is_for_kernels(a) or torch.float64 in (a.dtype, g.dtype) or not a.shape[1]:
        return False
    return not (is_wrapped(a) or is_wrapped(g)) and _reads(a.device)


@KernelTest
def _reads(device: torch.device) -> bool:
    """Whether that kernel runs here and agrees with the plain form."""
    draw = torch.Generator(device=device).manual_seed(7)
    for steps in (2, 5, 130):  # less than a block, and more than a program takes
        a, g = (torch.randn(3, steps, w, device=device, generator=draw) for w in (9, 70))
        a[1], g[1] = a[1] * 1e-21, g[1] * 1e15  # squares that vanish, and would have mattered
        how = RoundingTolerance(smallest(a.dtype), growth=3e-7, moved=2.0**-9, allowance=1e-6)
        try:
            found = gpu_kernels.of_tables(inner(a), inner(g), (9, 70), how)
        except Exception:  # a compiler may fail in any way; the plain form is always there
            return False
        if not torch.allclose(found, bounded(a, g, how), rtol=1e-6, atol=0.0):
            return False
    return True


def _is_for_kernels(a: Tensor) -> bool:
    """Whether there are kernels for a batch; one that is launched leaves no trace (make_fx)."""
    has_room = len(a) <= gpu_kernels.MOST_EXAMPLES
    return gpu_kernels.HAS_TRITON and a.is_cuda and has_room and get_proxy_mode() is None


def has_kernel(a: Tensor, g: Tensor) -> bool:
    """Whether these two are work for the kernels of inner products."""
    is_it = _is_for_kernels(a) and a.dtype == g.dtype and roundoff(a) > 0.0
    if not is_it or a.shape[1] < SHORTEST or min(a.shape[2], g.shape[2]) < NARROWEST:
        return False
    return _is_good(a.device, a.dtype)


def squares(a: Tensor, g: Tensor) -> Tensor:
    """‖Σ_t g_t a_tᵀ‖² for a [B, T, i] and g [B, T, o], in float64 and never too small.

    Guarantees: with f ≤ c/√squares, the example's part of a product weighted by f has norm at most
    c, in exact arithmetic up to the rounding model of `forms`.
    """
    return raised(a, g, rounding_tolerance(a, g))
