"""Sums that do not depend on the order of their terms: fixed point in 64-bit integers.

Floating-point addition depends on the order, so a sum over ranks would change with their number.
Integer addition does not. With a clip norm ζ ≤ 2^e every term is rounded once to the grid

    x ↦ round(x · 2^(40−e)),     at most 2^22 units of norm ζ:  |Σ| ≤ 2^62

and everything after that is exact, whoever adds it in whatever order. The grid is 2^−40 of the clip
norm, 2^16 times finer than float32 at that size. No state but the sum.

>>> total = FixedSum({"w": (2,)}, bound=1.0, device="cpu")
>>> for value in (0.1, 0.2, 0.3):
...     total.add({"w": torch.tensor([value, -value])}, units=1)
>>> [round(v, 6) for v in total.to_float(total.values["w"], torch.float32).tolist()]
[0.6, -0.6]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, positive

BITS = 40
MAX_UNITS = 2**22
#: Elements that are worked on together on a CPU, small enough to stay in its cache.
_CHUNK = 2**15


class FixedSum:
    """A sum of clipped sums, by name, as 64-bit integers.

    Guarantees: rounding changes what one unit can add by at most √d·2^−40 of the clip norm for d
    parameters, which stays inside the room of 2^−20 that clipping leaves below its bound up to
    2^40 parameters. A value beyond what its units can add (infinite, or out of range) is
    cut to it, and NaN counts as zero, so that no integer ever wraps.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], *, bound: float, device: torch.device | str
    ) -> None:
        positive(bound=bound)
        self.values = {
            name: torch.zeros(tuple(shape), dtype=torch.int64, device=device)
            for name, shape in shapes.items()
        }
        # A power of two, so that scaling is exact: bound ≤ 2^exponent.
        mantissa, exponent = math.frexp(bound)
        self.exponent = exponent - 1 if mantissa == 0.5 else exponent
        self.units = 0

    def add(self, values: Mapping[str, Tensor], *, units: int) -> None:
        """Add the clipped sum of `units` units."""
        self.units += units
        check_units(self.units)
        most, scale = float(units) * 2.0**BITS, 2.0 ** (BITS - self.exponent)
        for name, value in values.items():
            flat, total = value.detach().reshape(-1), self.values[name].view(-1)
            chunk = _CHUNK if flat.device.type == "cpu" else max(1, flat.numel())
            for at in range(0, flat.numel(), chunk):
                scaled = flat[at : at + chunk].double().mul_(scale)
                scaled = scaled.nan_to_num_(nan=0.0).clamp_(-most, most).round_()
                total[at : at + chunk].add_(scaled.to(torch.int64))

    def to_float(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A sum in ordinary numbers, rounded once to `dtype`."""
        return (value.double() * 2.0 ** (self.exponent - BITS)).to(dtype)


def check_units(units: int) -> None:
    """Refuse a step with more units than the integers have room for."""
    if units > MAX_UNITS:
        raise InvalidInput(
            f"a step over several ranks holds at most {MAX_UNITS:,} units, got {units:,}; use "
            "smaller batches"
        )
