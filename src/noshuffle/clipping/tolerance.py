"""How far rounding may have moved the squared norm of Σ_t g_t a_tᵀ, which is increased by as much.

    (√(total + lost)·(1 + growth) + moved·√spread)² + allowance·reach²

`gram` has total, spread, reach and lost, and says what each number of a `RoundingTolerance` is for
a pair of tensors; its kernels take the same record. No state.

>>> RoundingTolerance(tiny=1e-38).moved
0.0
"""

from __future__ import annotations

from typing import NamedTuple


class RoundingTolerance(NamedTuple):
    """`tiny`: products below it vanish (`lost`). `growth`: the part by which sums on tensor cores
    are too small. `moved`: how far an entry is rounded when it is multiplied once more.
    `allowance`: the relative rounding error of a product of inner products. Kernels take them in
    this order."""

    tiny: float
    growth: float = 0.0
    moved: float = 0.0
    allowance: float = 0.0
