"""The clip factor: what one unit's gradient is multiplied by. Everything that clips asks here.

    u ↦ f_u · g_u,   values = Σ_u f_u · g_u,   ‖f_u · g_u‖ ≤ c = bound

    f = min(1, c·(1 − slack)/‖g‖)        so that    f·‖g‖ ≤ c·(1 − slack) < c

`slack` leaves space for rounding in the norm, in the factor and in the product, so that the clipped
gradient is at most c as stored. What becomes of every kind of norm:

    norm                              factor   why
    0, or subnormal                   1        c/0 = ∞, and min(1, ∞) = 1
    at most c·(1 − slack)             1        nothing to clip
    larger                            below 1  f·‖g‖ = c·(1 − slack), to the last bits
    so large that f < 2⁻¹²⁶           0        float32 would hold f to a few bits, perhaps too large
    ∞ (also: its square overflowed)   0        and the gradient must be replaced by zeros, as
    NaN                               0        0·∞ and 0·NaN are not 0
    anything, outside `keep`          0        left out: the same

Norms come in double precision, in which no square of a float32 number overflows or vanishes; those
of half-precision gradients are added up in single precision at least (`products.wide`) and their
own rounding is in the norm already (`forms`). The factor is in double precision, too: at least
2⁻¹²⁶ where it is not 0, so float32 holds it with all its bits.

`Flat` bounds the whole gradient of a unit; `PerLayer` bounds each layer's part by its own c_l, so
that the whole is bounded by √Σ c_l². A `ClippedSum` knows its bound.

`training.compiled.kernels.row_factors` (Triton) is a twin of `clip_factor`, held against it where
there is a GPU; every other clip of the package calls it. No state.

>>> norms = torch.tensor([0.0, 0.5, 4.0, 1e300, torch.inf, torch.nan], dtype=torch.float64)
>>> clip_factor(norms, 2.0, slack=0.0).tolist()
[1.0, 1.0, 0.5, 0.0, 0.0, 0.0]
>>> float(clip_factor(4.0, 2.0, slack=0.0))
0.5
>>> PerLayer({"a": 3.0, "b": 4.0}).bound(("a.weight", "a.bias", "b.weight"))
5.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.clipping.products import rounds_convolutions, rounds_products
from noshuffle.errors import InvalidInput, fits_float32, positive

#: Clip to this much below the bound: rounding in the norm and in the product then stays inside.
SLACK = 2.0**-20
#: The same in double precision.
FINE_SLACK = 2.0**-44
#: The same where matrix products keep only ten bits (TF32).
COARSE_SLACK = 2.0**-9
#: The smallest factor that float32 holds with all its bits; a smaller one counts as zero.
LEAST_FACTOR = 2.0**-126
#: Below this the squares of float32 gradients underflow before the norm reaches the bound.
SMALLEST_NORM = 1e-12

Doubles = NDArray[np.float64]
Groups = list[tuple[tuple[str, ...], float]]


def slack(*references: Tensor) -> float:
    """How far below the bound to aim, by the precision of the gradients on this device.

    Of several parameters the least precise one decides.
    """
    found = FINE_SLACK
    for t in references:
        if t.dtype is torch.float64:
            continue
        found = max(found, SLACK)
        if t.is_cuda and (rounds_products() or (t.dim() > 2 and rounds_convolutions())):
            return COARSE_SLACK
    return found


@overload
def clip_factor(
    norms: Tensor, clip_norm: float | Tensor, *, slack: float, keep: Tensor | None = None
) -> Tensor: ...


@overload
def clip_factor(
    norms: Doubles | float, clip_norm: float, *, slack: float, keep: Any = None
) -> Doubles: ...


def clip_factor(norms: Any, clip_norm: Any, *, slack: float, keep: Any = None) -> Any:
    """min(1, c·(1 − slack)/norm) of every unit, in double precision; zero outside `keep`.

    `norms`: a tensor, or an array or number of NumPy (the same arithmetic on a few hundred numbers
    of a CPU, in a fraction of torch's time). Never waits for a device.

    Guarantees: the table above.
    """
    aim = clip_norm * (1.0 - slack)
    if isinstance(norms, Tensor):
        factor = (aim / norms.double()).clamp_max(1.0)
        is_used = factor >= LEAST_FACTOR  # false for NaN
        return torch.where(is_used if keep is None else is_used & keep, factor, 0.0)
    with np.errstate(all="ignore"):  # a norm may be 0, NaN or infinite: that is no error
        found = np.minimum(aim / np.asarray(norms, dtype=np.float64), 1.0)
        is_held = found >= LEAST_FACTOR
        return np.where(is_held if keep is None else is_held & keep, found, 0.0)


class Clip(Protocol):
    """What to clip to: groups of parameters, each with its own bound."""

    def groups(self, names: Sequence[str]) -> Groups:
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
        fits_float32(**{name: float(value)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Flat:
    """One bound for the whole gradient of a unit."""

    norm: float

    def __post_init__(self) -> None:
        _clip_norm(clip_norm=self.norm)

    def groups(self, names: Sequence[str]) -> Groups:
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

    def groups(self, names: Sequence[str]) -> Groups:
        grouped: dict[str, list[str]] = {}
        for name in names:
            grouped.setdefault(self._key(name), []).append(name)
        norms = self.norms
        if not isinstance(norms, Mapping):
            norms = dict.fromkeys(grouped, float(norms) / math.sqrt(max(1, len(grouped))))
        return [(tuple(group), float(norms[key])) for key, group in grouped.items()]

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
        if not isinstance(self.norms, Mapping):
            return float(self.norms)
        return math.sqrt(sum(c * c for _, c in self.groups(names)))


@dataclass(frozen=True)
class ClippedSum:
    """The sum over units of their clipped gradients, and what one unit can change in it.

    Norms, losses and counts are raw data, not released values: they must not be shown without noise
    of their own.
    """

    values: dict[str, Tensor]  # one per trainable parameter, by name
    bound: float
    norms: Tensor  # before clipping, one per unit
    losses: Tensor  # one per example
    bad: Tensor  # one truth value per unit
    present: Tensor

    @property
    def units(self) -> int:
        """How many units took part (waits for the device)."""
        return int(self.present.sum())

    @property
    def nonfinite(self) -> int:
        """How many units had a NaN or infinite gradient and so contributed zero."""
        return int(self.bad.sum())


def clip_factors(
    squares: Mapping[str, Tensor],
    losses_ok: Tensor,
    present: Tensor | None,
    *,
    clip: Clip,
    slack: float = SLACK,
) -> tuple[list[tuple[tuple[str, ...], Tensor]], Tensor, Tensor]:
    """Factor per unit for every group of parameters, the total norms, and who is non-finite.

    `squares` maps each parameter to its squared norm per unit; `present` may be None where every
    unit is. On a CPU NumPy does it: a few hundred numbers take it a fraction of torch's time; a GPU
    is handed few operations, each of which takes a host longer than the device. Guarantees: those
    of `clip_factor` for every group; a unit with a NaN or infinity anywhere (also a norm whose
    square overflows) or without `present` has factor 0 in every group, and the caller must then
    replace its gradient by zeros, since 0·∞ is not 0.
    """
    lib: Any = torch
    own: Mapping[str, Any] = squares
    ok: Any = losses_ok
    there: Any = present
    add: Callable[..., Any] = _added
    as_tensor: Callable[[Any], Tensor] = _without_graph
    if are_plain((*squares.values(), losses_ok)) and (present is None or are_plain((present,))):
        own = {name: square.detach().numpy() for name, square in squares.items()}
        lib, add, ok = np, _added_on_host, losses_ok.numpy()
        there = None if present is None else present.numpy()
        as_tensor = torch.from_numpy
    with np.errstate(all="ignore"):  # a unit may be NaN or infinite: it is bad, not an error
        norms = lib.sqrt(add(list(own.values()), ok))
        good = (norms < math.inf) & ok  # false for NaN
        keep, bad = (good, ~good) if there is None else (there & good, there & ~good)
        factors = []
        for names, c in clip.groups(tuple(own)):
            is_all = len(names) == len(own)
            norm = norms if is_all else lib.sqrt(add([own[n] for n in names], ok))
            factor = clip_factor(norm, c, slack=slack, keep=keep)
            factors.append((names, as_tensor(factor)))
        shown = norms if there is None else lib.where(there, norms, 0.0)
    return factors, as_tensor(shown), as_tensor(bad)


def _without_graph(t: Tensor) -> Tensor:
    return t.detach() if t.requires_grad else t


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether NumPy can read them where they lie."""
    if torch._C._len_torch_dispatch_stack():  # traced (make_fx): numbers would become constants
        return False
    for t in tensors:
        fits = t.dtype in (torch.float32, torch.float64, torch.bool)
        if type(t) is not Tensor or not fits or t.device.type != "cpu":
            return False
    return True


def _added(squares: Sequence[Tensor], like: Tensor) -> Tensor:
    """Sum of many short tensors in double precision; few operations, since a GPU waits for each."""
    total: Tensor | None = None
    for dtype in dict.fromkeys(s.dtype for s in squares):
        own = torch.stack([s for s in squares if s.dtype == dtype]).sum(0, dtype=torch.float64)
        total = own if total is None else total.add_(own)
    if total is None:
        return torch.zeros(like.shape, dtype=torch.float64, device=like.device)
    return total


def _added_on_host(squares: Sequence[Any], like: Any) -> Any:
    total = np.zeros(like.shape)
    for square in squares:
        total += square
    return total
