"""DP-FTRL: follow the regularized leader on released gradients, as in Algorithm 1.

    θ_{t+1} = argmin_{θ∈K} ⟨s_t, θ⟩ + Σ_{i≤t} r_i(θ) + (λ/2)‖θ − θ₀‖²,     s_t = ĝ_1 + … + ĝ_t

Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep) learning without
sampling or shuffling" (2021, arXiv 2103.00039). The learning rate is η = 1/λ, and everything here
is Algorithm 1 multiplied by η:

    S_t = S_{t−1} + η ĝ_t          h_t = h_{t−1} + η            (what the rounds so far ask for)
    V_t = γ V_{t−1} + S_t          w_t = γ w_{t−1} + h_t        (momentum: DP-FTRLM)
    θ_{t+1} = argmin_{θ∈K} ⟨ℓ, θ⟩ + w·r(θ) + ½‖θ − θ₀‖²         ℓ = S, V, or γV + S (Nesterov)

With no K and no r this is θ₀ − ℓ, which telescopes to SGD: the same noise read as residuals
b_t − b_{t−1}, the same heavy ball, the same Nesterov (section 3.2 and the tests). A schedule
weights the gradients that arrive under it and leaves earlier ones alone, again as in SGD. The
regularizers go through the same momentum filter as the gradients, so that where ĝ and ∂r balance
does not depend on γ.

`.grad` must hold the released private gradient; all of this is post-processing of it.

State per parameter: `anchor` θ₀, `total` S with `lost` (what rounding dropped from S: a Kahan sum,
without which float32 drifts over 10⁵ steps), and `velocity` V with momentum.

>>> theta = torch.nn.Parameter(torch.zeros(1))
>>> optimizer = FTRL([theta], lr=0.1, momentum=0.9)
>>> for _ in range(3):
...     theta.grad = torch.ones(1)
...     optimizer.step()
>>> round(theta.item(), 6)
-0.561
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, non_negative
from noshuffle.optim.composite import Composite, check_closed_form, solve
from noshuffle.optim.constraints import Constraint

Sum = TypeVar("Sum", float, Tensor)


def accumulate_(total: Tensor, lost: Tensor, value: Tensor) -> None:
    """total += value, where `lost` carries the rounding error on to the next call (Kahan)."""
    value = value - lost
    new = total + value
    torch.sub(new - total, value, out=lost)
    total.copy_(new)


def filtered(velocity: Sum, total: Sum, group: dict[str, Any]) -> tuple[Sum, Sum]:
    """V ← γV + S (a tensor in place), and ℓ: V, or γV + S for Nesterov."""
    velocity *= group["momentum"]
    velocity += total
    return velocity, velocity * group["momentum"] + total if group["nesterov"] else velocity


def wide(value: Tensor) -> torch.dtype:
    """State is kept in float32 at least, whatever the parameters are stored in."""
    return torch.promote_types(value.dtype, torch.float32)


class FTRL(torch.optim.Optimizer):
    """Algorithm 1 with momentum, constraint sets and composite regularizers.

    Arguments:
        params: parameters or parameter groups; a group may bring its own `lr`, `momentum`,
            `nesterov`, `constraint` and `composite`. Set and regularizer see all tensors of
            their group as one vector.
        lr: the learning rate η = 1/λ.
        momentum: γ in [0, 1).
        nesterov: look one step ahead; needs momentum.
        constraint: a set of `noshuffle.optim.constraints`, or None.
        composite: a regularizer of `noshuffle.optim.composite`, or None.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        constraint: Constraint | None = None,
        composite: Composite | None = None,
    ) -> None:
        self._rules: list[tuple[Constraint | None, Composite | None]] = []
        self._default_rule = (constraint, composite)
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; sets stay out of what is pickled."""
        group = dict(param_group)
        rule = (
            group.pop("constraint", self._default_rule[0]),
            group.pop("composite", self._default_rule[1]),
        )
        settings = {**self.defaults, **group}
        non_negative(lr=settings["lr"], momentum=settings["momentum"])
        if not settings["momentum"] < 1:
            raise InvalidInput(f"momentum must lie in [0, 1), got {settings['momentum']!r}")
        if settings["nesterov"] and settings["momentum"] == 0:
            raise InvalidInput("nesterov needs momentum > 0, got momentum=0")
        check_closed_form(rule[1], rule[0])
        group.update(rule=repr(rule), weight=0.0, weight_velocity=0.0)
        super().add_param_group(group)
        self._rules.append(rule)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One round: add the released gradients to the sums and solve for the new iterate."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, (constraint, composite) in zip(self.param_groups, self._rules, strict=True):
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            weight = self._advance_weight(group)
            points = [self._unconstrained(p, group) for p in params]
            if constraint is not None or composite is not None:
                points = solve(points, weight=weight, composite=composite, constraint=constraint)
            for p, point in zip(params, points, strict=True):
                p.copy_(point)
        return loss

    def _advance_weight(self, group: dict[str, Any]) -> float:
        """Take the learning rate of this step in; a captured step calls it for each replay."""
        group["weight"] += float(group["lr"])
        weight = float(group["weight"])
        if group["momentum"]:
            group["weight_velocity"], weight = filtered(group["weight_velocity"], weight, group)
        return weight

    def _unconstrained(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """θ₀ − ℓ after taking in p.grad."""
        assert p.grad is not None
        state = self.state[p]
        if not state:
            self._anchor(p, group)
        accumulate_(state["total"], state["lost"], p.grad.to(wide(p)) * group["lr"])
        linear = state["total"]
        if group["momentum"]:
            _, linear = filtered(state["velocity"], linear, group)
        return torch.sub(state["anchor"], linear)

    def _anchor(self, p: Tensor, group: dict[str, Any]) -> None:
        anchor = p.detach().to(wide(p), copy=True)
        sums = ("total", "lost", "velocity") if group["momentum"] else ("total", "lost")
        self.state[p].update({name: torch.zeros_like(anchor) for name in sums}, anchor=anchor)

    @torch.no_grad()
    def restart(self, *, reanchor: bool) -> None:
        """What the optimizer does when the noise restarts; both published conventions.

        reanchor=False: θ₀, sum and momentum live on, and with them the last noise of the old tree
            (the centralized experiments of the paper).
        reanchor=True: the same as a fresh optimizer at the current iterate (the federated ones).
        """
        if not reanchor:
            return
        for group in self.param_groups:
            group["weight"] = group["weight_velocity"] = 0.0
            for p in group["params"]:
                if p in self.state:
                    self._anchor(p, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the sums; the sets must be those the state was saved under."""
        for mine, saved in zip(self.param_groups, state_dict["param_groups"]):
            if saved.get("rule") != mine["rule"]:
                raise InvalidInput(
                    f"this state was saved with (constraint, composite) = {saved.get('rule')}, "
                    f"the optimizer has {mine['rule']}; build it with the same ones"
                )
        super().load_state_dict(state_dict)
        # torch casts state to the dtype of its parameter; sums must stay as wide as they were.
        order = [p for group in self.param_groups for p in group["params"]]
        for index, entry in state_dict["state"].items():
            p = order[index]
            self.state[p] = {name: value.to(p.device, copy=True) for name, value in entry.items()}
