"""Two views of an image that should look alike to an encoder: cut, mirrored, recoloured.

A field of a quarter to all of the image, stretched a little, is brought to the full size; then
brightness, contrast, saturation and the balance of colours are changed in four of five images, and
one in five loses its colours (Chen et al. 2020, arXiv 2002.05709). Drawn by a generator of the
device. No state.

>>> draw = torch.Generator().manual_seed(1)
>>> view(torch.zeros(2, 3, 8, 8), draw).shape
torch.Size([2, 3, 8, 8])
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as f


@torch.no_grad()
def view(images: Tensor, draw: torch.Generator) -> Tensor:
    """One view of each of these images between −1 and 1."""
    rows = len(images)

    def even(*size: int) -> Tensor:
        return torch.rand(*size, generator=draw, device=images.device)

    x = (_cut(images, even(rows, 5)) + 1) / 2
    is_changed = (even(rows) < 0.8).float()
    light, contrast, colour = (1 + is_changed * 0.8 * (even(rows) - 0.5) for _ in range(3))
    x = x * light[:, None, None, None]
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * contrast[:, None, None, None] + mean
    if x.shape[1] > 1:
        colour = torch.where(even(rows) < 0.2, 0.0, colour)
        grey = x.mean(1, keepdim=True)
        x = (x - grey) * colour[:, None, None, None] + grey
        balance = 0.2 * (even(rows, x.shape[1]) - 0.5) * is_changed[:, None]
        x = x * (1 + balance[:, :, None, None])
    return 2 * x.clamp(0, 1) - 1


def _cut(images: Tensor, chance: Tensor) -> Tensor:
    """A field of each image, every other one mirrored; `chance` is [rows, 5], even in 0 to 1."""
    size, form, side, across, down = chance.unbind(1)
    length, stretch = (0.25 + 0.75 * size).sqrt(), torch.exp(0.3 * (form - 0.5))
    wide, high = (length * stretch).clamp(max=1), (length / stretch).clamp(max=1)
    where = torch.zeros(len(images), 2, 3, device=images.device)
    where[:, 0, 0] = torch.where(side < 0.5, -wide, wide)
    where[:, 0, 2], where[:, 1, 2] = (2 * across - 1) * (1 - wide), (2 * down - 1) * (1 - high)
    where[:, 1, 1] = high
    grid = f.affine_grid(where, list(images.shape), align_corners=False)
    return f.grid_sample(images, grid, align_corners=False, padding_mode="reflection")
