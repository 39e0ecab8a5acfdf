"""Matrix products of gradients that never round a result to half precision.

Inputs in half precision are multiplied as they are and added up in float32, where a device can do
that, else widened first. A factor per example goes into the smaller input of Σ_b f_b x_bᵀ y_b and
is rounded once more there; TF32 rounds inside the product: norms on a GPU leave room for `roundoff`
(`factor.slack`). A CPU with matrix units may round to bfloat16; there norms and sums are taken in
full precision (`exactly`). Torch's older and newer names for these settings refuse to tell of each
other: both are read. State: none here; torch's own, put back.

>>> import torch
>>> x = torch.ones(2, 3, 4, dtype=torch.bfloat16)
>>> bmm(x, x.mT).dtype, roundoff(x), roundoff(x.float())
(torch.float32, 0.00390625, 0.0)
>>> with exactly(torch.device("cpu")):
...     float(torch.ones(1, 3) @ torch.ones(3, 1))
3.0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from noshuffle.clipping import gpu_kernels
from noshuffle.triton_shim import KernelTest

HALF = (torch.float16, torch.bfloat16)
#: Numbers from which on a kernel of its own is worth it.
LARGE = 2**20
_ROUNDED = ("tf32", "bf16")
_WIDENED: dict[str, Any] = {"out_dtype": torch.float32}  # an option of products on newer devices


def rounds_products() -> bool:
    """Whether float32 products on a GPU may round their factors."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by its newer name
        matmul: Any = torch.backends.cuda.matmul
        return bool(matmul.fp32_precision != "ieee")


def rounds_convolutions() -> bool:
    """The same of convolutions."""
    cudnn: Any = torch.backends.cudnn
    try:
        return bool(cudnn.allow_tf32)
    except RuntimeError:
        return bool(cudnn.conv.fp32_precision != "ieee")


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Nothing is cast inside the block; free where nothing would be."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Nothing is cast inside the block, and on a CPU float32 products keep all their bits."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    before = getattr(matmul, "fp32_precision", "") if device.type == "cpu" else ""
    if before not in _ROUNDED and not torch.is_autocast_enabled(device.type):
        yield
        return
    with no_autocast(device):
        try:
            if before in _ROUNDED:
                matmul.fp32_precision = "ieee"
            yield
        finally:
            if before in _ROUNDED:
                matmul.fp32_precision = before


@contextmanager
def full_precision() -> Iterator[None]:
    """Products and convolutions of float32 keep all their bits inside the block: no TF32."""
    cudnn: Any = torch.backends.cudnn
    try:
        before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    except RuntimeError:  # set by their newer names
        own: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
        newer = [settings.fp32_precision for settings in own]
        try:
            for settings in own:
                settings.fp32_precision = "ieee"
            yield
        finally:
            for settings, precision in zip(own, newer):
                settings.fp32_precision = precision
        return
    try:
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


@contextmanager
def repeatable() -> Iterator[None]:
    """Convolutions by algorithms that give the same bits every time."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True  # a benchmark would choose by the clock
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def wide(t: Tensor) -> Tensor:
    """At least single precision: norms and sums are never taken in half precision."""
    return t.float() if t.dtype in HALF else t


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that entries of this type are added up in."""
    return torch.float32 if dtype in HALF else dtype


def roundoff(t: Tensor) -> float:
    """Largest relative change of an entry on its way into a weighted product; 0 if none."""
    if t.dtype in HALF:
        return 0.5 * torch.finfo(t.dtype).eps
    if t.dtype == torch.float32 and t.is_cuda:
        return 2.0**-10 if rounds_products() else 0.0
    return 0.0


@lru_cache(maxsize=8)
def _widens(device: torch.device) -> bool:
    """Whether products of half-precision matrices can be had in float32 on this device."""
    if device.type != "cuda":
        return False
    probe = torch.ones(1, 8, 8, device=device, dtype=torch.bfloat16)
    try:
        torch.bmm(probe, probe.mT, **_WIDENED)
        torch.mm(probe[0].mT, probe[0], **_WIDENED)
    except (TypeError, RuntimeError):
        return False
    return True


def _fits(x: Tensor, y: Tensor) -> bool:
    return x.dtype in HALF and x.dtype == y.dtype and _widens(x.device)


def bmm(x: Tensor, y: Tensor) -> Tensor:
    """x[b] @ y[b] for every b, in at least single precision."""
    return torch.bmm(x, y, **_WIDENED) if _fits(x, y) else torch.bmm(wide(x), wide(y))


def mm(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in at least single precision."""
    return torch.mm(x, y, **_WIDENED) if _fits(x, y) else wide(x) @ wide(y)


def aligned(t: Tensor) -> Tensor:
    """The same with zeros at the end of every row, where rows of odd length would be slow.

    Tensor cores read rows that begin at multiples of 16 bytes; a vocabulary of 50257 entries makes
    products several times slower than one of 50304; a copy costs less than one such product.
    """
    width = t.shape[-1]
    if not t.is_cuda or width < 512 or (width * t.element_size()) % 16 == 0 or roundoff(t) == 0.0:
        return t
    out = t.new_empty(*t.shape[:-1], -(-width // 64) * 64)
    out[..., width:] = 0.0
    out[..., :width] = t
    return out


def scaled(t: Tensor, factors: Tensor) -> Tensor:
    """t[b]·factors[b], in at least single precision."""
    t = wide(t)
    return t * factors.to(t.dtype).reshape(-1, *[1] * (t.dim() - 1))


def weighted(x: Tensor, y: Tensor, factors: Tensor) -> Tensor:
    """Σ_b factors[b]·x[b]ᵀ y[b] for x [B, T, o] and y [B, T, i], in at least single precision."""
    is_narrower = x.shape[2] <= y.shape[2]
    if x.dtype not in HALF and y.dtype not in HALF:  # as below, in two operations
        factors = factors.to(x.dtype).reshape(-1, 1, 1)
        if not x.is_contiguous():
            turned = [t.transpose(0, 1) for t in (x, y, factors)]
            if all(t.is_contiguous() for t in turned[:2]):
                x, y, factors = turned  # steps first in memory (recurrent layers): none is copied
        x, y = (x * factors, y) if is_narrower else (x, y * factors)
        return x.reshape(-1, x.shape[2]).mT @ y.reshape(-1, y.shape[2])
    if is_narrower:
        x = _rescaled(x, y, factors)
    else:
        y = _rescaled(y, x, factors)
    return mm(x.reshape(-1, x.shape[2]).mT, y.reshape(-1, y.shape[2]))


@KernelTest
def _rescales(device: torch.device) -> bool:
    """Whether the kernel for it runs here, and agrees."""
    t = torch.arange(96.0, device=device, dtype=torch.bfloat16).reshape(2, 4, 12)
    spoiled, left_out = t.clone(), torch.tensor([0.0, 1.0], device=device)
    spoiled[0] = torch.nan
    factors = torch.tensor([0.3, 1.0], device=device)
    try:
        found, kept = gpu_kernels.rescale(t, factors), gpu_kernels.rescale(spoiled, left_out)
        gpu_kernels.wipe_(spoiled, left_out)
    except Exception:  # a compiler may fail in any way; torch can always do it
        return False
    wanted = t * left_out.bfloat16().reshape(2, 1, 1)
    is_zero = torch.equal(kept, wanted) and torch.equal(spoiled, wanted)
    return is_zero and torch.equal(found, (t.float() * factors.reshape(2, 1, 1)).bfloat16())


def is_rescaled(*tensors: Tensor) -> bool:
    """Whether kernels may multiply examples of these by factors: large ones that lie as they do."""
    if not gpu_kernels.HAS_TRITON or get_proxy_mode() is not None:
        return False
    for t in tensors:
        is_it = t.is_cuda and t.numel() >= LARGE and t.dtype in (*HALF, torch.float32)
        if not is_it or t.dtype != tensors[0].dtype or not t.is_contiguous():
            return False
    return _rescales(tensors[0].device)


def zeroed(t: Tensor, keep: Tensor) -> Tensor:
    """t with the examples outside `keep` replaced by zeros, NaN and ∞ included."""
    if is_rescaled(t):
        return gpu_kernels.rescale(t, keep.float())
    return torch.where(keep.reshape(-1, *[1] * (t.dim() - 1)), t, 0.0)


def _rescaled(t: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    if not _fits(t, other):
        return scaled(t, factors)
    # computed in float32 and rounded once: a rounded factor could be a larger one
    has_kernel = gpu_kernels.HAS_TRITON and get_proxy_mode() is None
    if has_kernel and t.is_contiguous() and _rescales(t.device):
        return gpu_kernels.rescale(t, factors.float())
    return torch.mul(t, factors.float().reshape(-1, 1, 1), out=torch.empty_like(t))
