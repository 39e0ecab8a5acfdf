"""Composite regularizers for FTRL, in closed form, alone or inside a constraint set.

Every round adds its own copy of r, so after weight h (the sum of the learning rates so far) the
step is

    θ = argmin_{θ∈K}  h·r(θ) + ½‖θ − u‖²,          u = θ₀ − ℓ

and the threshold grows with time (Kairouz et al. 2021, section 3; Xiao 2010, "dual averaging").

    lasso(κ)             r = κ‖θ‖₁                      soft threshold of u by hκ
    group_lasso(κ)       r = κ Σ_g ‖θ_g‖₂               each group shrunk towards 0 by hκ in norm
    elastic_net(κ₁, κ₂)  r = κ₁‖θ‖₁ + (κ₂/2)‖θ‖²        soft threshold, then divide by 1 + hκ₂

Inside K the step is "prox, then project" where the conditions of Karush, Kuhn and Tucker say so:

    l2 ball around 0    all three. A multiplier ν adds (ν/2)‖θ‖²; r is homogeneous (plus a
                        quadratic), so ν only rescales the unconstrained answer.
    box                 lasso, elastic net: the problem separates, and a convex function of one
                        variable takes its minimum over an interval at the clamped minimizer.
    l1 ball             lasso, elastic net: the multiplier adds to the threshold, and thresholds
                        add up: shrink(shrink(u, a), b) = shrink(u, a + b).
    simplex             lasso (constant there: no effect), elastic net (only κ₂ acts).

Anything else (a group penalty in a box, a simplex or an l1 ball) has no closed form and is refused.

>>> import torch
>>> lasso(0.5).prox([torch.tensor([2.0, -0.3])], 2.0)[0]
tensor([1., -0.])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from noshuffle.errors import Unsupported, non_negative
from noshuffle.optim.constraints import Box, Constraint, Everywhere, L1Ball, L2Ball, Simplex, shrink


class Composite:
    """A convex regularizer r; `prox` minimises weight·r(θ) + ½‖θ − u‖²."""

    def prox(self, values: Sequence[Tensor], weight: float) -> list[Tensor]:
        """The minimizer, as new tensors."""
        raise NotImplementedError


@dataclass(frozen=True)
class ElasticNet(Composite):
    """r = l1·‖θ‖₁ + (l2/2)·‖θ‖²; with l1 = 0 it is the weight decay of ridge regression."""

    l1: float
    l2: float

    def __post_init__(self) -> None:
        non_negative(l1=self.l1, l2=self.l2)

    def prox(self, values: Sequence[Tensor], weight: float) -> list[Tensor]:
        return [shrink(v, weight * self.l1) / (1.0 + weight * self.l2) for v in values]


@dataclass(frozen=True)
class GroupLasso(Composite):
    """r = strength · Σ_g ‖θ_g‖₂; a group is a row of a matrix (a filter), or a whole vector."""

    strength: float

    def __post_init__(self) -> None:
        non_negative(strength=self.strength)

    def prox(self, values: Sequence[Tensor], weight: float) -> list[Tensor]:
        out = []
        for value in values:
            norms = group_norms(value)
            # A group below the threshold becomes exactly zero; 0/0 cannot occur.
            kept = (norms - weight * self.strength).clamp_min(0.0)
            factor = kept / norms.clamp_min(1e-300 if value.dtype.itemsize == 8 else 1e-38)
            out.append(value * factor)
        return out


def group_norms(value: Tensor) -> Tensor:
    """Norm of every group, shaped to broadcast against the tensor."""
    if value.dim() < 2:
        return value.square().sum().sqrt()
    flat = value.reshape(value.shape[0], -1).square().sum(1).sqrt()
    return flat.reshape((-1,) + (1,) * (value.dim() - 1))


def lasso(strength: float) -> ElasticNet:
    """κ‖θ‖₁."""
    return ElasticNet(strength, 0.0)


group_lasso, elastic_net = GroupLasso, ElasticNet


def check_closed_form(composite: Composite | None, constraint: Constraint | None) -> None:
    """Refuse the pairs for which `solve` has no exact answer."""
    if composite is None or constraint is None or isinstance(constraint, L2Ball | Everywhere):
        return
    if isinstance(composite, ElasticNet) and isinstance(constraint, Box | L1Ball | Simplex):
        return
    raise Unsupported(
        f"{type(composite).__name__} inside {type(constraint).__name__} has no closed form; use an "
        "l2 ball, drop one of the two, or put the parameters into separate groups"
    )


def solve(
    values: Sequence[Tensor],
    *,
    weight: float,
    composite: Composite | None = None,
    constraint: Constraint | None = None,
) -> list[Tensor]:
    """argmin_{θ∈K} weight·r(θ) + ½‖θ − values‖², exactly; see the module's table of pairs."""
    check_closed_form(composite, constraint)
    points = list(values)
    if composite is not None:
        if isinstance(constraint, Simplex) and isinstance(composite, ElasticNet):
            composite = ElasticNet(0.0, composite.l2)  # ‖θ‖₁ is constant on the simplex
        points = composite.prox(points, weight)
    return points if constraint is None else constraint.project(points)
