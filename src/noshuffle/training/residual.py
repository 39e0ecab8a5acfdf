"""Residual nets for small images, without batch statistics (He et al. 2016; Zagoruyko et al. 2016).

    block(x)   around(x) + conv(relu(norm(conv(relu(norm(x))))))      3 × 3, GroupNorm of 16 groups
    wide(k)    WRN-16-k: a convolution, three groups of two blocks of 16k, 32k and 64k channels

GroupNorm takes the place of BatchNorm, which mixes examples. No state.

>>> sum(p.numel() for p in wide(4, channels=3, classes=10).parameters())
2748890
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as f


class ResidualBlock(nn.Module):
    """Two convolutions with normalisation before them, and a way around."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, inside), nn.GroupNorm(16, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.around = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = f.relu(self.norm1(x))
        moved: Tensor = self.conv2(f.relu(self.norm2(self.conv1(h))))
        around: Tensor = self.around(x)
        return moved + around


def residual(
    groups: Sequence[tuple[int, int, int]], *, first: int, channels: int = 3, classes: int = 10
) -> nn.Module:
    """Groups of blocks (width, how many, stride) after one convolution of `first` channels."""
    parts: list[nn.Module] = [nn.Conv2d(channels, first, 3, 1, 1, bias=False)]
    now = first
    for width, many, stride in groups:
        for place in range(many):
            parts.append(ResidualBlock(now, width, stride if place == 0 else 1))
            now = width
    head = [nn.GroupNorm(16, now), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*parts, *head, nn.Linear(now, classes))


def wide(k: int, *, channels: int = 3, classes: int = 10) -> nn.Module:
    """WRN-16-k."""
    groups = [(16 * k, 2, 1), (32 * k, 2, 2), (64 * k, 2, 2)]
    return residual(groups, first=16, channels=channels, classes=classes)
