"""Dead leaves: images of a random process, which are nobody's data.

Shapes of random place, size, form, colour and texture fall on each other until the ground is
covered (Matheron 1968; Lee, Mumford and Huang 2001). They have the edges, corners and occlusions of
photographs, and sizes by a power law, so that no scale is special:

    P(radius > r) ∝ r⁻²        between the smallest radius of an image (1 to 6 pixels) and 14

What is learned from such images about images (Baradad et al. 2021, arXiv 2106.05963) costs no
privacy. Numbers come from a seed, which is public, and differ between kinds of devices. No state.

>>> images = leaves(2, side=8, seed=1)
>>> images.shape, bool(images.abs().max() <= 1)
(torch.Size([2, 3, 8, 8]), True)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, whole

#: Shapes of an image; those that fall first are large, so that nothing stays bare.
SHAPES, GROUND = 48, 4
#: Largest radius by the power law, in pixels of a side of 32.
LARGEST = 14.0
#: Images of one chunk: what is drawn depends on it, so it is fixed.
CHUNK = 2000
Draw = Callable[..., Tensor]


@torch.no_grad()
def leaves(
    count: int, *, side: int = 32, channels: int = 3, seed: int, device: str = "cpu"
) -> Tensor:
    """Images (count, channels, side, side) between −1 and 1, grey where they have one channel."""
    whole(count=count, side=side)
    if channels not in (1, 3):
        raise InvalidInput(f"leaves are grey (1 channel) or in colour (3), got {channels} channels")
    draw = torch.Generator(device=device).manual_seed(seed)
    parts = [_fallen(min(CHUNK, count - at), side, draw) for at in range(0, count, CHUNK)]
    images = torch.cat(parts)
    return images.mean(1, keepdim=True) if channels == 1 else images


def _wide(values: Tensor) -> Tensor:
    return values[:, None, None]


def _fallen(count: int, side: int, draw: torch.Generator) -> Tensor:
    """A ground whose brightness rises in one direction, then one shape after the other."""
    place = draw.device

    def even(*size: int) -> Tensor:
        return torch.rand(*size, generator=draw, device=place)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, device=place)

    unit = 32.0 / side
    line = (torch.arange(side, device=place) + 0.5) * unit
    y, x = torch.meshgrid(line, line, indexing="ij")
    mean = 0.25 * normal(count, 3) + 0.5 * normal(count, 1)
    contrast, chroma = 0.35 + 0.9 * even(count, 1), 0.15 + 0.6 * even(count, 1)
    smallest = torch.exp(even(count) * math.log(6.0))
    turn = _wide(2 * math.pi * even(count))
    rise = (x * torch.cos(turn) + y * torch.sin(turn)) / 32.0 * _wide(0.6 * normal(count))
    image = mean[:, :, None, None] + rise[:, None]
    for k in range(SHAPES):
        if k < GROUND:
            radius = 6.0 + 12.0 * even(count)
        else:
            radius = (smallest**-2 + even(count) * (LARGEST**-2 - smallest**-2)) ** -0.5
        cover, own = _shape(x, y, _wide(radius), even, normal)
        colour = mean + contrast * (normal(count, 1) + chroma * normal(count, 3))
        image = torch.lerp(image, colour[:, :, None, None] + own[:, None], cover[:, None])
    grain = normal(count, 3, side, side) * even(count)[:, None, None, None]
    return torch.tanh(0.7 * (image + 0.03 * grain))


def _shape(x: Tensor, y: Tensor, radius: Tensor, even: Draw, normal: Draw) -> tuple[Tensor, Tensor]:
    """What one shape an image covers (0 to 1), and the brightness of its gradient and stripes."""
    count = len(radius)
    across, down = (_wide(32.0 * (1.2 * even(count) - 0.1)) for _ in range(2))
    turn = _wide(math.pi * even(count))
    slim = _wide(torch.exp(0.6 * normal(count)).clamp(0.25, 4.0).sqrt())
    u = ((x - across) * torch.cos(turn) + (y - down) * torch.sin(turn)) / slim
    v = ((y - down) * torch.cos(turn) - (x - across) * torch.sin(turn)) * slim
    kind = even(count)  # ellipses, rectangles, and forms between a diamond and an ellipse
    power = torch.where(kind < 0.7, 8.0, 1.0 + even(count))
    power = _wide(torch.where(kind < 0.4, 2.0, power))
    far = ((u.abs() + 1e-3) ** power + (v.abs() + 1e-3) ** power) ** (1 / power)
    soft = _wide(torch.exp(0.8 * normal(count) - 1.2).clamp(max=3.0))
    cover = torch.sigmoid(2 * (radius - far) / soft)
    rise = (u * _wide(0.35 * normal(count)) + v * _wide(0.35 * normal(count))) / radius
    wave = u * _wide(0.9 * torch.exp(0.6 * normal(count))) + _wide(2 * math.pi * even(count))
    stripes = _wide(torch.where(even(count) < 0.25, 0.5 * normal(count), 0.0))
    return cover, rise + stripes * torch.sin(wave)
