"""Sums that do not depend on the order of their terms: fixed point in 64-bit integers.

Floating-point addition depends on the order, so a sum over ranks would change with their number.
Integer addition does not. With a clip norm ζ ≤ 2^e every term is rounded once to the grid

    x ↦ round(x · 2^(40−e)),     at most 2^22 units of norm ζ:  |Σ| ≤ 2^62

and everything after that is exact, whoever adds it in whatever order. The grid is 2^−40 of the clip
norm, 2^16 times finer than float32 at that size. Small parameters lie side by side in one tensor
(a `Run`), so that a GPU takes a few operations for all of them. No state but the sum.

>>> total = FixedSum({"w": (2,)}, bound=1.0, device="cpu")
>>> for value in (0.1, 0.2, 0.3):
...     total.add({"w": torch.tensor([value, -value])}, units=1)
>>> [round(v, 6) for v in total.to_float(total.values["w"], torch.float32).tolist()]
[0.6, -0.6]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, positive

BITS = 40
MAX_UNITS = 2**22
#: Elements that are worked on together on a CPU, small enough to stay in its cache.
_CHUNK = 2**15
#: Parameters are put side by side up to this many elements, each at a multiple of `_ALIGNED`.
_LONGEST, _ALIGNED = 2**22, 32


@dataclass(frozen=True)
class Run:
    """Some parameters side by side in one tensor: where each begins, and how long all are."""

    starts: dict[str, int]
    length: int


def runs_of(shapes: Mapping[str, Sequence[int]]) -> list[Run]:
    """Consecutive parameters in runs of at most `_LONGEST`; a longer one is alone.

    >>> [(run.starts, run.length) for run in runs_of({"w": (5, 8), "b": (5,), "v": (2**22,)})]
    [({'w': 0, 'b': 64}, 96), ({'v': 0}, 4194304)]
    """
    runs: list[Run] = []
    for name, shape in shapes.items():
        size = -(-math.prod(shape) // _ALIGNED) * _ALIGNED
        if runs and runs[-1].length + size <= _LONGEST:
            last = runs.pop()
            runs.append(Run({**last.starts, name: last.length}, last.length + size))
        else:
            runs.append(Run({name: 0}, size))
    return runs


class FixedSum:
    """A sum of clipped sums, by name, as 64-bit integers.

    Guarantees: rounding changes what one unit can add by at most √d·2^−40 of the clip norm for d
    parameters, inside the 2^−20 that clipping leaves below its bound up to d = 2^40. A value beyond
    what its units can add (infinite, or out of range) is cut to it, and NaN counts as zero, so that
    no integer ever wraps.
    """

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], *, bound: float, device: torch.device | str
    ) -> None:
        positive(bound=bound)
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.runs = runs_of(shapes)
        self._totals = [
            torch.zeros(run.length, dtype=torch.int64, device=device) for run in self.runs
        ]
        self._gap = torch.zeros(_ALIGNED, device=device)
        self.values = {
            name: self._view(total, start, name)
            for run, total in zip(self.runs, self._totals)
            for name, start in run.starts.items()
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
        if self._gap.device.type != "cpu" and len(values) == len(self._shapes):
            for run, total in zip(self.runs, self._totals):
                total.add_(_rounded(self._side_by_side(values, run), scale, most))
            return
        for name, value in values.items():
            flat, total = value.detach().reshape(-1), self.values[name].view(-1)
            chunk = _CHUNK if flat.device.type == "cpu" else max(1, flat.numel())
            for at in range(0, flat.numel(), chunk):
                part = _rounded(flat[at : at + chunk], scale, most)
                total[at : at + chunk].add_(part)

    def reduced(
        self, reduce: Callable[[Tensor], None], dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        """Every sum in ordinary numbers, after `reduce` has added up each run over the ranks.

        The integers are let go run by run.
        """
        self.values.clear()
        found: dict[str, Tensor] = {}
        for run in self.runs:
            total = self._totals.pop(0)
            reduce(total)
            kinds = {
                dtype: self.to_float(total, dtype) for dtype in {dtypes[n] for n in run.starts}
            }
            for name, start in run.starts.items():
                found[name] = self._view(kinds[dtypes[name]], start, name)
        return {name: found[name] for name in self._shapes}

    def to_float(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A sum in ordinary numbers, rounded once to `dtype`."""
        return (value.double() * 2.0 ** (self.exponent - BITS)).to(dtype)

    def _view(self, total: Tensor, start: int, name: str) -> Tensor:
        shape = self._shapes[name]
        return total[start : start + math.prod(shape)].view(shape)

    def _side_by_side(self, values: Mapping[str, Tensor], run: Run) -> Tensor:
        """The values of a run as they lie in its total, zeros between them."""
        pieces = []
        for name in run.starts:
            flat = values[name].detach().reshape(-1)
            gap = -flat.numel() % _ALIGNED
            pieces += [flat, self._gap[:gap]] if gap else [flat]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _rounded(values: Tensor, scale: float, most: float) -> Tensor:
    """Multiples of the grid; NaN is zero, and nothing lies beyond `most`."""
    scaled = values.double().mul_(scale) if values.dtype != torch.float64 else values * scale
    return scaled.nan_to_num_(nan=0.0).clamp_(-most, most).round_().to(torch.int64)


def check_units(units: int) -> None:
    """Refuse a step with more units than the integers have room for."""
    if units > MAX_UNITS:
        raise InvalidInput(
            f"a step over several ranks holds at most {MAX_UNITS:,} units, got {units:,}; use "
            "smaller batches"
        )
