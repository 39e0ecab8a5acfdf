"""What several files ask of noise: its covariance, and the same bits under any default type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def agrees(
    sample: np.ndarray, covariance: np.ndarray, *, errors: float = 5.0, slack: float = 1e-12
) -> bool:
    """Every entry within so many standard errors of a Wishart sample; `slack` for a grid."""
    found = sample @ sample.T / sample.shape[1]
    variance = np.diag(covariance)
    error = np.sqrt((np.outer(variance, variance) + covariance**2) / sample.shape[1])
    return bool((np.abs(found - covariance) <= errors * error + slack).all())


def check_covariance(sample: np.ndarray, covariance: np.ndarray, **how: float) -> None:
    """It agrees, and two thirds or three halves of the scale would be noticed."""
    assert agrees(sample, covariance, **how)
    assert not agrees(sample * 2 / 3, covariance, **how)
    assert not agrees(sample * 3 / 2, covariance, **how)


def check_default_type(drawn: Callable[[], list[Tensor]]) -> None:
    """The same bits whatever torch makes tensors of by default."""
    plain, before = drawn(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        other = drawn()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
