"""A small residual net that learns from nobody's images which views belong together.

Of a batch of B images two `views` each are taken; every view must find its fellow among the 2B − 1
others by the inner product of unit vectors z (contrastive learning, Chen et al. 2020, arXiv
2002.05709):

    loss = −mean log  exp(⟨z_i, z_i'⟩/τ) / Σ_{j≠i} exp(⟨z_i, z_j⟩/τ)

BatchNorm mixes images while it learns, which is allowed: they are nobody's. Afterwards its numbers
are fixed, so that an image is encoded by itself. `maps` then gives three maps of features, averaged
over a grid. State: the weights.

>>> net = Encoder(width=8).eval()
>>> [tuple(part.shape) for part in net.maps(torch.zeros(2, 3, 32, 32))]
[(2, 8, 4, 4), (2, 16, 4, 4), (2, 32, 4, 4)]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from noshuffle.errors import InvalidInput, whole
from noshuffle.features.views import view

BATCH, TEMPERATURE = 1024, 0.2
RATE, WARM, DECAY = 2e-3, 100, 1e-4
#: Maps are averaged over a grid of so many fields a side.
FIELDS = 4
#: Images of one chunk.
CHUNK = 500
Say = Callable[[int, float], None]


class _Block(nn.Module):
    """Two convolutions with batch statistics, and a way around (He et al. 2016)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.around: nn.Module = nn.Identity()
        if inside != outside:
            around = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.around = nn.Sequential(around, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        h = f.relu(self.norm1(self.conv1(x)))
        return f.relu(self.norm2(self.conv2(h)) + self.around(x))


class Encoder(nn.Module):
    """Three stages of two blocks, of `width`, twice and four times that many channels."""

    def __init__(self, *, width: int = 96, channels: int = 3) -> None:
        super().__init__()
        whole(width=width, channels=channels)
        first = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU())
        sizes = (width, width, 2 * width, 4 * width)
        self.stages = nn.ModuleList(
            nn.Sequential(_Block(i, o, 1 if i == o else 2), _Block(o, o, 1))
            for i, o in pairwise(sizes)
        )
        hidden = nn.Linear(4 * width, 512), nn.BatchNorm1d(512), nn.ReLU()
        self.head = nn.Sequential(*hidden, nn.Linear(512, 128))

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        h, found = self.stem(2 * images), []
        for stage in self.stages:
            h = stage(h)
            found.append(h)
        return found

    def forward(self, images: Tensor) -> Tensor:
        """Unit vectors z, by which views are compared."""
        last = self.stage_maps(images)[-1].mean((2, 3))
        return f.normalize(self.head(last).float(), dim=1)

    @torch.no_grad()
    def maps(self, images: Tensor) -> list[Tensor]:
        """The maps of the three stages over a grid of fields, each image encoded by itself."""
        if self.training:
            raise InvalidInput("an encoder that is still learning mixes images: call eval() first")
        parts = []
        for own in torch.split(images, CHUNK):
            with _half(images.device):
                found = self.stage_maps(_placed(own))
            parts.append([f.adaptive_avg_pool2d(one.float(), FIELDS) for one in found])
        return [torch.cat(stage) for stage in zip(*parts)]


def _half(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 on a GPU, where it is fast."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def place(net: Encoder, device: torch.device) -> None:
    """Weights on a device, in the order of memory that is fast there."""
    net.to(device)
    if device.type == "cuda":
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _placed(images: Tensor) -> Tensor:
    is_gpu = images.is_cuda
    return images.contiguous(memory_format=torch.channels_last) if is_gpu else images


def contrast(z: Tensor) -> Tensor:
    """The loss above; fellows are half of the rows apart."""
    alike = (z @ z.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return f.cross_entropy(alike, torch.arange(len(z), device=z.device).roll(len(z) // 2))


def learned(
    images: Tensor,
    *,
    steps: int,
    width: int = 96,
    batch: int | None = None,
    seed: int,
    say: Say | None = None,
) -> Encoder:
    """An encoder after so many steps on these images (bytes, as `leaves` rounded), ready to use."""
    batch = BATCH if batch is None else batch
    whole(steps=steps, batch=batch)
    if images.dtype != torch.uint8:
        raise InvalidInput(f"images must be bytes, got {images.dtype}")
    device = images.device
    draw = torch.Generator(device=device).manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Encoder(width=width, channels=images.shape[1])
    place(net, device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    for step in range(steps):
        falling = 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = RATE * falling * min(1.0, (step + 1) / WARM)
        chosen = torch.randint(len(images), (batch,), generator=draw, device=device)
        x = images[chosen].float() / 127.5 - 1
        both = _placed(torch.cat([view(x, draw), view(x, draw)]))
        with _half(device):
            z = net(both)
        loss = contrast(z)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if say is not None and (step + 1) % 500 == 0:
            say(step + 1, float(loss.detach()))
    net.eval()
    return net
