"""Features in which every direction of public images has the same spread, and rows one length.

    φ(x) = unit( (S + λ·tr(S)/C)^{−1/2} (maps(x) − m) )        m, S: mean and covariance of channels

A linear model is trained with noise that is the same in all directions; directions in which images
differ little are learned last, and at a small ε never. Whitening by images that are nobody's data
(`leaves`) makes them equally easy and costs no privacy. Rows of one length are clipped by their
error alone. State: m and the matrix.

>>> maps = torch.randn(50, 4, 2, 2) * torch.tensor([9.0, 3.0, 1.0, 0.1])[:, None, None]
>>> found = Whitening.of(maps)(maps)
>>> found.shape, bool((found.norm(dim=1) - 1).abs().max() < 1e-5)
(torch.Size([50, 16]), True)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as f

#: λ: what is added to every direction, over their mean.
FLOOR = 0.02


@dataclass(frozen=True)
class Whitening:
    """Mean and matrix of channels."""

    mean: Tensor  # [C]
    matrix: Tensor  # [C, C]

    @staticmethod
    @torch.no_grad()
    def of(maps: Tensor) -> Whitening:
        """From maps (rows, channels, height, width) of public images."""
        mean = maps.mean((0, 2, 3))
        apart = (maps - mean[:, None, None]).movedim(1, 3).flatten(0, 2).double()
        values, axes = torch.linalg.eigh(apart.T @ apart / len(apart))
        spread = values.clamp_min(0.0)
        spread = spread + FLOOR * spread.mean().clamp_min(torch.finfo(torch.float32).tiny)
        return Whitening(mean, (axes * spread.rsqrt() @ axes.T).float())

    @torch.no_grad()
    def __call__(self, maps: Tensor) -> Tensor:
        """Rows of length one, [rows, channels · height · width]."""
        apart = (maps - self.mean[:, None, None]).movedim(1, 3)
        return f.normalize((apart @ self.matrix).movedim(3, 1).flatten(1), dim=1)
