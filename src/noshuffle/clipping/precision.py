"""How precisely torch multiplies float32 matrices, and products that keep all their bits.

A clipped sum is a product, and so are most norms. Where torch may round the factors of a product
(TF32 on a GPU, bfloat16 on a CPU with matrix units after `set_float32_matmul_precision("medium")`),
an example could pass the clip norm. On a GPU norms leave room for that (`products.roundoff`,
`factor.slack`); on a CPU norms and sums are taken in full precision, whatever model and loss run
in. Torch's older and newer names for these settings refuse to tell of each other: both are read.
State: none here; torch's own setting, put back.

>>> with exactly(torch.device("cpu")):
...     float(torch.ones(1, 3) @ torch.ones(3, 1))
3.0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from noshuffle.clipping.inputs import no_autocast

_ROUNDED = ("tf32", "bf16")


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


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Nothing is cast inside the block, and on a CPU float32 products keep all their bits."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    before = getattr(matmul, "fp32_precision", "") if device.type == "cpu" else ""
    if before not in _ROUNDED and not torch.is_autocast_enabled(device.type):
        yield
        return
    with no_autocast(device):
        if before not in _ROUNDED:
            yield
            return
        try:
            matmul.fp32_precision = "ieee"
            yield
        finally:
            matmul.fp32_precision = before
