"""Sums are rounded to single precision before they meet noise of single precision.

    released = round32(sum) + noise32,      both multiples of nearby powers of two

Noise is drawn in float32. On a float64 sum it would leave the last 29 bits of the raw sum bare:
whoever guesses a data set can check the guess, since released − guessed sum is a float32 for the
right one and hardly ever for another. Rounded first, the sum lies on the same kind of grid as its
noise, as it does in a model of single precision. Without noise nothing is hidden and nothing is
rounded. (The convex learners, which want double precision, fill the low bits with a second draw
instead: `convex.release`.) No state.

>>> single({"w": torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)}, scale=1.0)["w"].dtype
torch.float32
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def single(values: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """The same sums with nothing finer than float32 in them, if noise of this scale follows."""
    if scale == 0.0:
        return dict(values)
    return {n: v.float() if v.dtype == torch.float64 else v for n, v in values.items()}
