"""A constant clip norm, and a private histogram of the gradient norms that it cuts.

Raw norms tell of single people, and a run shows none. Here every unit of a step adds one to the bin
that its norm (before clipping) lies in, and the bins leave with noise of their own,

    bins = Σ_u e_bin(‖g_u‖) + N(0, σ² I),     edges  ζ · 2^(j/2),  j = −8 … 8.

One unit moves the bins by 1 in L2 (zero-out neighbours), and by √2 ≤ 2 under replacement. `share`
is the part of the plan's μ² that they may use over all participations k of a unit,

    k/σ² = share · S²/z²   ⇔   σ = z √k / (S √share),     gradients: z_Δ = z / √(1 − share),

so that ε is the plan's, under any mechanism, and the gradients pay: 0.5 % more noise for one
percent. The clip norm stays as it is; who changes it by what a histogram shows does so in another
run, which the statement of this one does not count.

>>> clip = HistogramClip(norm=1.0)
>>> bins = NormHistogram.of([0.0] * 8 + [60.0, 30.0] + [0.0] * 8, clip=clip, deviation=5.0)
>>> round(bins.above, 3), bins.quantile(0.5), round(bins.error, 3)
(0.333, 1.0, 0.111)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, open_unit, positive

#: Edges of the bins in units of the clip norm; the first and the last bin are open.
EDGES: NDArray[np.float64] = 2.0 ** (np.arange(-8, 9) / 2)
#: With less of the guarantee the noise of a bin is thousands of units: nothing can be read off it.
LEAST_SHARE = 1e-6


@dataclass(frozen=True, kw_only=True)
class HistogramClip:
    """Clip to `norm`, and spend this `share` of the guarantee on a histogram of the norms."""

    norm: float
    share: float = 0.01

    def __post_init__(self) -> None:
        positive(norm=self.norm)
        open_unit(share=self.share)
        if self.share < LEAST_SHARE:
            raise InvalidInput(
                f"share must be at least {LEAST_SHARE:g}, or a histogram of norms is nothing but "
                f"noise; got {self.share:g}"
            )
        for name in ("norm", "share"):  # one way to write a number, which a ledger holds
            object.__setattr__(self, name, float(getattr(self, name)))

    def bins(self, norms: Tensor, *, present: Tensor | None = None) -> NDArray[np.float64]:
        """How many of the present units lie in each bin, before noise.

        Guarantees: one unit adds one to one bin, whatever its norm is; NaN and infinity lie in the
        last. Not private by itself.
        """
        values = norms.detach().cpu().double().numpy()
        if present is not None:
            values = values[present.cpu().numpy()]
        values = np.nan_to_num(values, nan=np.inf, posinf=np.inf)
        places = np.searchsorted(self.norm * EDGES, values, side="left")  # at most ζ: not cut
        return np.bincount(places, minlength=len(EDGES) + 1).astype(np.float64)


#: What counts norms, and pays for it.
CountingClip = QuantileClip | HistogramClip


@dataclass(frozen=True)
class NormHistogram:
    """Noisy counts between edges, over all steps so far; `deviation` is that of their noise."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    clip_norm: float
    deviation: float

    @staticmethod
    def of(counts: Sequence[float], *, clip: HistogramClip, deviation: float) -> NormHistogram:
        edges = tuple(float(edge) for edge in clip.norm * EDGES)
        return NormHistogram(edges, tuple(map(float, counts)), clip.norm, deviation)

    @staticmethod
    def from_dict(record: dict[str, Any]) -> NormHistogram:
        edges, counts = (tuple(map(float, record[name])) for name in ("edges", "counts"))
        if len(counts) != len(edges) + 1:
            raise InvalidInput(f"a histogram of {len(edges)} edges has {len(edges) + 1} counts")
        return NormHistogram(edges, counts, float(record["clip_norm"]), float(record["deviation"]))

    @property
    def units(self) -> float:
        """How many contributions were counted, about."""
        return max(sum(self.counts), self.deviation, 1e-300)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of the units in every bin; what noise brought below zero is taken as none."""
        return np.maximum(self.counts, 0.0) / self.units

    @property
    def above(self) -> float:
        """Share of the units whose gradient was cut."""
        cut = self.counts[self.edges.index(self.clip_norm) + 1 :]
        return min(max(sum(cut) / self.units, 0.0), 1.0)

    @property
    def error(self) -> float:
        """Two deviations of the noise of one bin, as a share of all units."""
        return 2 * self.deviation / self.units

    def quantile(self, level: float) -> float:
        """The edge that at least this share of the norms lies below; infinite beyond the last."""
        open_unit(level=level)
        below = np.cumsum(self.shares)
        place = int(np.searchsorted(below, level * below[-1]))
        return self.edges[place] if place < len(self.edges) else math.inf
