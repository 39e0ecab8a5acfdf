"""Gradients of scale and shift of a layer norm in C, per example.

    scales[b] = Σ_t u[b,t] · g[b,t],    u = (x − mean) / √(variance + ε) over the last axis
    shifts[b] = Σ_t g[b,t]

Torch takes six operations, each with a reading of x or g; here both are read once, and added up in
double precision. Examples are taken by threads as they come, and each is added up in one order, so
the bits do not depend on the number of threads. Torch is the twin in the tests. No state.

>>> library() is library()
True
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from noshuffle.c_library import together
from noshuffle.clipping.native_loops import NativeLoops
from noshuffle.clipping.state import is_wrapped

#: The widest row (as in `native/norms.c`).
WIDEST = 4096
#: Numbers below which torch is as fast, and below which a second thread costs more than it saves.
LEAST, _ALONE = 1 << 12, 1 << 15


class NormsJob(ctypes.Structure):
    """A job as `native/norms.c` declares it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "examples", "steps", "width")),
        *((name, ctypes.c_void_p) for name in ("x", "g", "scales", "shifts")),
        ("eps", ctypes.c_double),
    )


def fits(x: Tensor, g: Tensor, width: int) -> bool:
    """Whether the loops can read both where they lie, and it is worth it."""
    for t in (x, g):
        if t.dtype is not torch.float32 or t.device.type != "cpu" or not t.is_contiguous():
            return False
    if x.shape != g.shape or x.numel() < LEAST or width > WIDEST:
        return False
    if is_wrapped(x) or is_wrapped(g) or get_proxy_mode() is not None:
        return False
    return library() is not None


def layer_sums(
    x: Tensor, g: Tensor, *, size: int, eps: float, built: ctypes.CDLL | None = None
) -> tuple[Tensor, Tensor]:
    """Scales and shifts, [size, width] each, of what `fits`.

    Guarantees: a NaN or an infinity in an example makes its own results one, and no other's.
    """
    width = x.shape[-1]
    scales, shifts = torch.empty((2, size, width), dtype=torch.float32, device="cpu")
    places = [t.data_ptr() for t in (x, g, scales, shifts)]
    job = NormsJob(0, size, x.numel() // (size * width), width, *places, eps)
    threads = torch.get_num_threads() if x.numel() >= _ALONE else 1
    together((built or library()).layer_sums, job, threads=threads)  # type: ignore[union-attr]
    return scales, shifts


def _agrees(built: ctypes.CDLL) -> bool:
    """Whether the loop finds what torch finds, on rows of several lengths."""
    draw, is_good = torch.Generator().manual_seed(0), True
    for size, steps, width in ((3, 2, 5), (2, 7, 16), (4, 1, 131)):
        x, g = (
            torch.randn(size, steps, width, generator=draw, device="cpu").double() for _ in range(2)
        )
        found = layer_sums(x.float(), g.float(), size=size, eps=0.1, built=built)
        unit = F.layer_norm(x, (width,), eps=0.1)
        for own, truth in zip(found, ((unit * g).sum(1), g.sum(1))):
            is_good &= torch.allclose(own.double(), truth, rtol=1e-5, atol=1e-5)
    return is_good


#: Handed out only after they agreed with torch.
library = NativeLoops("norms.c", "layer_sums", agrees=_agrees)
