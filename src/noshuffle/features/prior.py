"""What images look like, learned from random processes: features for private linear models.

    φ(x) = LENGTH · (√½ · patches(x), √⅙ · stage₁(x), √⅙ · stage₂(x), √⅙ · stage₃(x))

with responses to a dictionary of `patches` and the three stages of an `encoder`, each whitened by
public images and of length one (`whitening`); before that, with `mirror`, the mean over an image
and its mirror image (photographs do not know left from right, digits do). Without an encoder the
patches stand alone: nothing is trained then. All of it comes from dead leaves (`leaves`) and a
public seed, and each image is transformed by itself, so a private run on φ(x) has the guarantee of
a run on x. The idea of such a prior for private training is that of Tang et al. 2023 (arXiv
2306.06076). State: the parts.

>>> made = Prior.of(channels=3, side=16, patches=8, steps=0, images=40, seed=1)
>>> made(torch.zeros(2, 3, 16, 16)).shape
torch.Size([2, 64])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noshuffle.errors import whole
from noshuffle.features.encoder import Encoder, learned
from noshuffle.features.leaves import leaves
from noshuffle.features.patches import Patches
from noshuffle.features.whitening import Whitening

#: Length of a row: gradients of a linear model are then longer than 1 while it errs, and clipped.
LENGTH = 30.0
#: Public images that dictionary and whitening are made of, and those that an encoder learns from.
IMAGES, LEARNED_FROM = 10_000, 400_000
#: Pixels of a side: a grid of two fields of windows of six.
SMALLEST = 7
#: Rows whose maps are whitened at a time.
ROWS = 5_000
Say = Callable[[str], None]


@dataclass(frozen=True)
class Prior:
    """A dictionary and perhaps an encoder, with the whitening of each of their maps."""

    patches: Patches
    encoder: Encoder | None
    whitenings: tuple[Whitening, ...]
    mirror: bool = True

    @staticmethod
    def of(
        *,
        channels: int = 3,
        side: int = 32,
        patches: int = 2048,
        steps: int = 4000,
        width: int = 96,
        images: int = IMAGES,
        mirror: bool = True,
        seed: int = 0,
        device: str = "cpu",
        say: Say | None = None,
    ) -> Prior:
        """Made for images of this size; `steps` of the encoder, none if 0."""
        whole(at_least=0, steps=steps)
        whole(channels=channels, patches=patches, images=images)
        whole(at_least=SMALLEST, side=side)
        how: dict[str, Any] = {"side": side, "channels": channels, "device": device}
        public = leaves(images, seed=seed, **how)
        words = Patches.of(public, count=patches, seed=seed + 1)
        net = None
        if steps:
            more = torch.cat(
                [
                    ((leaves(IMAGES, seed=seed + 2 + k, **how) + 1) * 127.5).round().byte()
                    for k in range(LEARNED_FROM // IMAGES)
                ]
            )
            net = learned(
                more,
                steps=steps,
                width=width,
                seed=seed,
                say=lambda step, loss: say and say(f"prior: step {step} of {steps}, {loss:.3f}"),
            )
        bare = Prior(words, net, (), mirror)
        found = bare.maps(public[: max(1, 2 * images // 5)])
        return Prior(words, net, tuple(map(Whitening.of, found)), mirror)

    def maps(self, images: Tensor) -> list[Tensor]:
        """Maps of every part, with `mirror` the mean of an image's and its mirror image's."""
        if not self.mirror:
            return self._maps(images)
        both = [self._maps(images), self._maps(images.flip(3))]
        return [(one + other) / 2 for one, other in zip(*both)]

    def _maps(self, images: Tensor) -> list[Tensor]:
        return [self.patches(images), *([] if self.encoder is None else self.encoder.maps(images))]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features (rows, numbers), every row of length `LENGTH`."""
        later = len(self.whitenings) - 1
        shares = [0.5, *[0.5 / later] * later] if later else [1.0]
        parts = []
        for own in torch.split(images, ROWS):
            found = [white(one) for white, one in zip(self.whitenings, self.maps(own))]
            scaled = [LENGTH * math.sqrt(share) * one for share, one in zip(shares, found)]
            parts.append(torch.cat(scaled, 1))
        return torch.cat(parts)
