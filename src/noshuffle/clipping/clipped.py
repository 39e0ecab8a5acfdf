"""A clipped sum that knows its own bound, and what to clip to.

    u ↦ f_u · g_u,   f_u = min(1, c/‖g_u‖),   values = Σ_u f_u · g_u,   ‖f_u · g_u‖ ≤ c = bound

`Flat` bounds the whole gradient of a unit; `PerLayer` bounds each layer's part by its own c_l, so
that the whole is bounded by √Σ c_l². No state.

>>> Flat(1.0).bound(("a.weight", "a.bias"))
1.0
>>> PerLayer({"a": 3.0, "b": 4.0}).bound(("a.weight", "a.bias", "b.weight"))
5.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping.factor import SLACK, clip_factor
from noshuffle.errors import InvalidInput, positive

#: Below this the squares of float32 gradients underflow before the norm reaches the bound.
SMALLEST_NORM = 1e-12


class Clip(Protocol):
    """What to clip to: groups of parameters, each with its own bound."""

    def groups(self, names: Sequence[str]) -> list[tuple[tuple[str, ...], float]]:
        """Disjoint groups that cover every name, with the norm that each is clipped to."""
        ...

    def bound(self, names: Sequence[str]) -> float:
        """The largest norm that one unit can contribute over all groups."""
        ...


def _clip_norm(**values: object) -> None:
    positive(**values)
    for name, value in values.items():
        if float(value) < SMALLEST_NORM:  # type: ignore[arg-type]
            raise InvalidInput(f"{name} must be at least {SMALLEST_NORM}, got {value!r}")


@dataclass(frozen=True)
class Flat:
    """One bound for the whole gradient of a unit."""

    norm: float

    def __post_init__(self) -> None:
        _clip_norm(clip_norm=self.norm)

    def groups(self, names: Sequence[str]) -> list[tuple[tuple[str, ...], float]]:
        return [(tuple(names), float(self.norm))]

    def bound(self, names: Sequence[str]) -> float:
        return float(self.norm)


@dataclass(frozen=True)
class PerLayer:
    """One bound per layer: a mapping from layer (or parameter) names, or one number to share.

    A number c is shared equally: each of L layers gets c/√L, so the whole is bounded by c. A
    layer is a module that holds parameters; its name is the part before the last dot.
    """

    norms: Mapping[str, float] | float

    def __post_init__(self) -> None:
        if isinstance(self.norms, Mapping):
            _clip_norm(**{f"clip_norm[{name!r}]": c for name, c in self.norms.items()})
        else:
            _clip_norm(clip_norm=self.norms)

    def groups(self, names: Sequence[str]) -> list[tuple[tuple[str, ...], float]]:
        grouped: dict[str, list[str]] = {}
        for name in names:
            grouped.setdefault(self._key(name), []).append(name)
        if not isinstance(self.norms, Mapping):
            share = float(self.norms) / math.sqrt(max(1, len(grouped)))
            return [(tuple(group), share) for group in grouped.values()]
        return [(tuple(group), float(self.norms[key])) for key, group in grouped.items()]

    def _key(self, name: str) -> str:
        layer = name.rpartition(".")[0]
        if not isinstance(self.norms, Mapping):
            return layer
        for key in (name, layer):
            if key in self.norms:
                return key
        raise InvalidInput(
            f"PerLayer must name every layer with trainable parameters, {name!r} is missing; add "
            f"{layer or name!r} to the mapping"
        )

    def bound(self, names: Sequence[str]) -> float:
        groups = self.groups(names)
        if not isinstance(self.norms, Mapping):
            return float(self.norms)
        return math.sqrt(sum(c * c for _, c in groups))


@dataclass(frozen=True)
class ClippedSum:
    """The sum over units of their clipped gradients, and what one unit can change in it.

    `values` holds one tensor per trainable parameter, by name. `norms` are the norms before
    clipping, one per unit; `losses` one per example, `bad` and `present` one truth value per
    unit; `shown` are the losses in ordinary memory, where they came along while a device was waited
    for. Norms, losses and counts are raw data, not released values: they must not be shown without
    noise of their own.
    """

    values: dict[str, Tensor]
    bound: float
    norms: Tensor
    losses: Tensor
    bad: Tensor
    present: Tensor
    shown: Tensor | None = None

    @property
    def units(self) -> int:
        """How many units took part (waits for the device)."""
        return int(self.present.sum())

    @property
    def nonfinite(self) -> int:
        """How many units had a NaN or infinite gradient and so contributed zero."""
        return int(self.bad.sum())


def _added(squares: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum of many short tensors in double precision; few operations, since a GPU waits for each."""
    total = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
    for dtype in dict.fromkeys(s.dtype for s in squares):
        total += torch.stack([s for s in squares if s.dtype == dtype]).sum(0, dtype=torch.float64)
    return total


def clip_factors(
    squares: Mapping[str, Tensor],
    losses_ok: Tensor,
    present: Tensor,
    *,
    clip: Clip,
    slack: float = SLACK,
) -> tuple[list[tuple[tuple[str, ...], Tensor]], Tensor, Tensor]:
    """Factor per unit for every group of parameters, the total norms, and who is non-finite.

    `squares` maps each parameter to its squared norm per unit. Guarantees: those of `clip_factor`
    for every group; a unit with a NaN or infinity anywhere (also a norm whose square overflows) or
    without `present` has factor 0 in every group, and the caller must then replace its gradient by
    zeros, since 0·∞ is not 0.
    """
    if _are_plain((*squares.values(), losses_ok, present)):
        return _host_factors(squares, losses_ok, present, clip=clip, slack=slack)
    norms = _added(list(squares.values()), losses_ok).sqrt()
    bad = present & ~(torch.isfinite(norms) & losses_ok)
    keep = present & ~bad
    factors = []
    for names, c in clip.groups(tuple(squares)):
        is_all = len(names) == len(squares)
        norm = norms if is_all else _added([squares[n] for n in names], bad).sqrt()
        factors.append((names, clip_factor(norm, c, slack=slack, keep=keep)))
    return factors, torch.where(present, norms, 0.0), bad


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether NumPy can read them where they lie."""
    for t in tensors:
        fits = t.dtype in (torch.float32, torch.float64, torch.bool)
        if type(t) is not Tensor or not fits or t.device.type != "cpu":
            return False
    return True


def _host_factors(
    squares: Mapping[str, Tensor],
    losses_ok: Tensor,
    present: Tensor,
    *,
    clip: Clip,
    slack: float,
) -> tuple[list[tuple[tuple[str, ...], Tensor]], Tensor, Tensor]:
    """`clip_factors` on a CPU: a few hundred numbers take NumPy a fraction of torch's time."""
    there, ok = present.numpy(), losses_ok.numpy()

    def norm_of(names: Iterable[str]) -> Any:
        total = np.zeros(len(ok))
        for name in names:
            total += squares[name].detach().numpy()
        return np.sqrt(total)

    with np.errstate(all="ignore"):  # a unit may be NaN or infinite: it is bad, not an error
        norms = norm_of(squares)
        bad = there & ~(np.isfinite(norms) & ok)
        keep = there & ~bad
        factors = []
        for names, c in clip.groups(tuple(squares)):
            norm = norms if len(names) == len(squares) else norm_of(names)
            factor = clip_factor(norm, c, slack=slack, keep=keep)
            factors.append((names, torch.from_numpy(factor)))
        shown = np.where(there, norms, 0.0)
    return factors, torch.from_numpy(shown), torch.from_numpy(bad)
