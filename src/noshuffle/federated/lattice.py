"""Sums on a lattice, so that the low bits of a noisy sum say nothing about the sum.

    deltas    x ↦ g·trunc(x/g)                       sum s: exact, a multiple of g
    release   s + n ↦ g·round((s + n)/g) = s + g·round(n/g),      g ≈ 2⁻²⁰ of the noise

Noise n in float32 has finer steps the smaller it is. If s + n were published as it comes, a fine
low bit would show that n was small and so where s is: whoever knows two candidates for s finds, in
some per cent of the coordinates, that one of them could not have given this answer (Mironov 2012;
Jin et al. 2022). On the lattice every answer is possible for every sum: moving s by a multiple of g
moves the answer by as much, and all noise below 16 deviations has steps no coarser than g, a power
of two. What is published is a function of the real number s + n, hence covered by its guarantee,
and as no sum is rounded, one user moves it by no more than the clip norm. Truncation only shortens.

No state. Without noise (g = 0) everything passes unchanged.

>>> lattice_step(3.0) == 2.0 ** -19, lattice_step(0.0)
(True, 0.0)
>>> toward_zero(torch.tensor([0.7, -0.7, 1.2]), 0.5)
tensor([ 0.5000, -0.5000,  1.0000])
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: The lattice as a power of two below the noise: float32 keeps 23 bits, and 16 deviations take 4.
BITS = 20


def lattice_step(scale: float) -> float:
    """g for noise of this standard deviation; zero without noise."""
    return 2.0 ** (math.floor(math.log2(scale)) - BITS) if scale > 0 else 0.0


def toward_zero(values: Tensor, step: float) -> Tensor:
    """The nearest multiples of `step` that are no longer."""
    return torch.trunc(values / step).mul_(step) if step else values


def nearest_(values: Tensor, step: float) -> None:
    """Round to multiples of `step`, in place."""
    if step:
        values.div_(step).round_().mul_(step)
