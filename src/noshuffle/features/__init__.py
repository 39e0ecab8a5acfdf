"""Fixed features of images, for which no private data are looked at.

    scattering, mirrored    wavelets (`scattering`)
    patches[:COUNT]         a dictionary of patches of dead leaves, whitened (`prior`)
    prior                   the same, and an encoder that learned from dead leaves: needs a GPU

The last two do not know left from right in colour images, which are photographs mostly; in grey
ones, digits and signs, they do.

Every image is transformed by itself: a private run on features has the guarantee of a run on the
images. `fixed(name)` makes one of them by name.

>>> import torch
>>> fixed("mirrored", channels=1, side=8)(torch.zeros(2, 1, 8, 8)).shape
torch.Size([2, 81, 2, 2])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from noshuffle.errors import InvalidInput, one_of
from noshuffle.features import scattering as wavelets
from noshuffle.features.kept import kept
from noshuffle.features.prior import Prior, Say

__all__ = ["NAMES", "Features", "Prior", "fixed"]

NAMES = ("scattering", "mirrored", "patches", "prior")
Features = Callable[[Tensor], Tensor]


def fixed(
    name: str, *, channels: int, side: int, device: str = "cpu", say: Say | None = None
) -> Features:
    """The features of that name for images of this size, on this device."""
    kind, _, many = name.partition(":")
    one_of(NAMES, features=kind)
    if many and (kind != "patches" or not many.isdecimal() or int(many) < 1):
        raise InvalidInput(f"features take a number as in patches:512, got {name!r}")
    if kind == "scattering":
        return lambda images: wavelets.normalised(wavelets.scattering(images))
    if kind == "mirrored":
        return wavelets.mirrored
    how: dict[str, Any] = {"channels": channels, "side": side, "mirror": channels > 1}
    how |= {"device": device, "say": say}
    if many:
        how["patches"] = int(many)
    return Prior.of(steps=0, **how) if kind == "patches" else kept(**how)
