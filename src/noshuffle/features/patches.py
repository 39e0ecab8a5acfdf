"""Responses to a dictionary of small patches, averaged over quarters of the image.

A window of an image, less its mean and over its own contrast, is whitened and compared with K
patches w_k of unit length; both signs are kept beyond a threshold (Coates and Ng 2011):

    p = (window − mean) / √(variance + c₀)        z = w_k · Σ^{−1/2}(p − μ)
    responses   relu(z − α), relu(−z − α)         averaged over a grid of pool × pool fields

Patches, μ and Σ come from images that are nobody's data (`leaves`). Each image is transformed by
itself, so privacy is not touched. State: the dictionary.

>>> from noshuffle.features.leaves import leaves
>>> made = Patches.of(leaves(20, side=16, seed=1), count=8, seed=2)
>>> made(leaves(3, side=16, seed=3)).shape
torch.Size([3, 16, 2, 2])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as f

from noshuffle.errors import InvalidInput, whole

#: Windows that mean and covariance are taken of.
WINDOWS = 400_000
#: c₀ in squared steps of a pixel of 8 bits, for images between −1 and 1; what is added to Σ; α.
CONTRAST, RIDGE, THRESHOLD = 40.0 / 255**2, 0.1, 0.25
#: Numbers of one chunk of responses: what fits the cache of a CPU, or keeps a GPU busy.
CHUNKS = {"cpu": 2**21, "cuda": 2**29}


@dataclass(frozen=True)
class Patches:
    """A dictionary: K filters over windows, what they say of the mean window, and the grid."""

    filters: Tensor  # [K, channels, size, size]
    offset: Tensor  # [K]
    pool: int = 2

    @staticmethod
    @torch.no_grad()
    def of(images: Tensor, *, count: int, size: int = 6, pool: int = 2, seed: int) -> Patches:
        """Random windows of these images, whitened, as a dictionary."""
        whole(count=count, size=size, pool=pool)
        if images.dim() != 4 or min(images.shape[2:]) < size + pool - 1:
            raise InvalidInput(
                f"images must be (rows, channels, height, width) with sides of at least "
                f"{size + pool - 1}, got {tuple(images.shape)}"
            )
        draw = torch.Generator(device=images.device).manual_seed(seed)
        windows = _windows(images, size, WINDOWS, draw)
        if len(windows) < count:
            raise InvalidInput(f"{count} patches were asked for, there are {len(windows)} windows")
        windows = windows - windows.mean(1, keepdim=True)
        windows = windows / (windows.var(1, keepdim=True) + CONTRAST).sqrt()
        mean = windows.mean(0)
        apart = (windows - mean).double()
        values, axes = torch.linalg.eigh(apart.T @ apart / len(apart))
        whiten = (axes * (values.clamp_min(0.0) + RIDGE).rsqrt() @ axes.T).float()
        chosen = torch.randperm(len(windows), generator=draw, device=images.device)[:count]
        words = f.normalize((windows[chosen] - mean) @ whiten, dim=1) @ whiten
        shape = (count, images.shape[1], size, size)
        return Patches(words.reshape(shape), words @ mean, pool)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Responses (rows, 2K, pool, pool)."""
        count, channels, size, _ = self.filters.shape
        if not images.is_floating_point():
            raise InvalidInput(
                f"images must be numbers between −1 and 1, got {images.dtype}; "
                "of bytes take images / 127.5 - 1"
            )
        if images.dim() != 4 or images.shape[1] != channels or min(images.shape[2:]) < size:
            raise InvalidInput(
                f"images must be (rows, {channels}, height, width) with sides of at least {size}, "
                f"got {tuple(images.shape)}"
            )
        places = (images.shape[2] - size + 1) * (images.shape[3] - size + 1)
        most = CHUNKS.get(images.device.type, CHUNKS["cpu"])
        chunk = max(1, most // (2 * count * places))
        parts = [self._responses(part.float()) for part in torch.split(images, chunk)]
        return torch.cat(parts) if parts else images.new_zeros(0, 2 * count, self.pool, self.pool)

    def _responses(self, x: Tensor) -> Tensor:
        entries = self.filters[0].numel()
        ones = torch.ones_like(self.filters[:1])
        mean = f.conv2d(x, ones) / entries
        variance = (f.conv2d(x * x, ones) - entries * mean * mean) / (entries - 1)
        scale = (variance.clamp_min(0.0) + CONTRAST).rsqrt()
        sums = self.filters.sum((1, 2, 3))[:, None, None]
        z = (f.conv2d(x, self.filters) - mean * sums) * scale - self.offset[:, None, None]
        fields = (f.adaptive_avg_pool2d(f.relu(s * z - THRESHOLD), self.pool) for s in (1, -1))
        return torch.cat(list(fields), 1)


def _windows(images: Tensor, size: int, most: int, draw: torch.Generator) -> Tensor:
    """Windows at random places, [windows, channels · size²]."""
    rows, _, high, wide = images.shape
    high, wide = high - size + 1, wide - size + 1
    count = min(most, rows * high * wide)
    place = torch.randint(rows * high * wide, (count,), generator=draw, device=images.device)
    seen = images.unfold(2, size, 1).unfold(3, size, 1)  # a view [rows, channels, high, wide, …]
    row, rest = place // (high * wide), place % (high * wide)
    return seen[row, :, rest // wide, rest % wide].flatten(1)
