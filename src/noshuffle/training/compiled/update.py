"""The optimizer's update as something a CUDA graph can hold, or the reason why not.

A graph freezes every plain number that it is captured with. A learning rate that a scheduler moves
must therefore lie on the device, and a rule that counts its steps on the host cannot be captured:

    SGD            torch's fused kernel with the rate in a tensor
    Adam, AdamW    the same, the count of steps in a tensor too, the host's count kept in step
    FTRL           sums and momentum captured, rate in a tensor, the host's weight kept in step
    capturable     any torch optimizer built with capturable=True, whose settings stay as they are
    others         run as they are behind the graph: slower, never wrong

State: the learning rates on the device and the settings that a graph was captured with. The
optimizer's own state stays where `state_dict` looks for it.

>>> model = torch.nn.Linear(2, 1)
>>> update_for(torch.optim.SGD(model.parameters(), lr=0.1)).name
'fused SGD'
>>> update_for(torch.optim.RMSprop(model.parameters(), lr=0.1)).name
'RMSprop, not captured'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.optim import FTRL
from noshuffle.training.hooks import has_hooks

#: The fused kernel takes its rate in single precision.
_FUSED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Of a fused kernel: neither loss scaling nor a flag for infinities.
_NO_SCALER: dict[str, Any] = {"grad_scale": None, "found_inf": None}

#: A dictionary, a key, and the value that a graph was captured with.
FrozenSetting = tuple[dict[Any, Any], Any, Any]


class Update:
    """An update that runs behind the graph, as the optimizer itself does it."""

    #: Whether `run` belongs into the graph.
    is_captured = False
    #: Settings that a graph does not freeze.
    free: tuple[str, ...] = ("params",)

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, name: str, is_for_now: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.name = name
        #: Whether to ask `update_for` again after a step.
        self.is_for_now = is_for_now
        self._seen: tuple[Any, Any, int, int] = (None, None, 0, 0)

    def prepare(self) -> None:
        """Bring about the state that `run` works on."""

    def frozen(self) -> list[FrozenSetting]:
        """What a graph freezes: settings of the groups, and the optimizer's tensors."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        found: list[FrozenSetting] = [
            (g, k, v) for g in groups for k, v in g.items() if k not in self.free
        ]
        for own in state.values():
            found += [(own, k, v) for k, v in own.items() if isinstance(v, Tensor) and v.dim()]
        self._seen = (groups, state, len(groups), len(state))
        return found

    def is_as(self, frozen: list[FrozenSetting]) -> bool:
        """Whether everything is still as it was when a graph was captured."""
        groups, state, *counts = self._seen
        now = self.optimizer.param_groups, self.optimizer.state
        if now[0] is not groups or now[1] is not state or counts != [len(groups), len(state)]:
            return False
        for own, key, value in frozen:
            other = own.get(key)
            if other is not value and (isinstance(value, Tensor) or other != value):
                return False
        return True

    def run(self, grads: Mapping[nn.Parameter, Tensor]) -> None:
        """Move the parameters; `.grad` holds the private gradients already."""
        self.optimizer.step()

    def before(self) -> None:
        """What the host does before each replay."""


class Capturable(Update):
    """A torch optimizer that says it can be captured; its settings are frozen with it."""

    is_captured = True

    def before(self) -> None:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers


class _Rated(Capturable):
    """An update whose learning rates lie on the device, one per group."""

    free = ("params", "lr", "initial_lr", "weight", "weight_velocity")

    def __init__(self, optimizer: torch.optim.Optimizer, *, name: str) -> None:
        super().__init__(optimizer, name=name)
        self._rates: list[Tensor] = []
        self._known: list[float] = []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Loading a state puts new groups into an optimizer, so they are asked for each time."""
        return self.optimizer.param_groups

    def prepare(self) -> None:
        for group in self._groups[len(self._rates) :]:
            device = group["params"][0].device
            self._rates.append(torch.zeros((), dtype=torch.float32, device=device))
            self._known.append(0.0)
        for group in self._groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._begin(p, group, self.optimizer.state[p])

    def _begin(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Make the state of one parameter, if it is not there."""

    def before(self) -> None:
        for i, group in enumerate(self._groups):
            rate = float(group["lr"])
            if rate != self._known[i]:
                # The number travels in the launch itself, so no buffer of the host is read late.
                self._rates[i].fill_(rate)
                self._known[i] = rate
        super().before()

    @torch.no_grad()
    def run(self, grads: Mapping[nn.Parameter, Tensor]) -> None:
        for i, group in enumerate(self._groups):
            self._move(i, group, [p for p in group["params"] if p in grads], grads)

    def _move(self, i: int, group: Any, params: list[Any], grads: Mapping[Any, Tensor]) -> None:
        raise NotImplementedError


class FusedSGD(_Rated):
    """torch.optim.SGD without dampening: velocity ← γ·velocity + g, θ ← θ − η·velocity."""

    def _begin(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if group["momentum"] and state.get("momentum_buffer") is None:
            # γ·0 + g is what SGD takes as the first velocity.
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def _move(self, i: int, group: Any, params: list[Any], grads: Mapping[Any, Tensor]) -> None:
        if not params:
            return
        own = [grads[p] for p in params]
        moved = params if group["momentum"] else []
        buffers = [self.optimizer.state[p]["momentum_buffer"] for p in moved]
        if not params[0].is_cuda:
            _plain_sgd(params, own, buffers, group, self._rates[i])
            return
        names = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
        torch._fused_sgd_(
            params,
            own,
            buffers,
            lr=self._rates[i],
            is_first_step=False,
            **{name: group[name] for name in names},
            **_NO_SCALER,
        )


def _plain_sgd(
    params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], group: Any, rate: Tensor
) -> None:
    """The same arithmetic by plain operations, for a run without a GPU."""
    for i, (p, g) in enumerate(zip(params, grads)):
        g = -g if group["maximize"] else g
        if group["weight_decay"]:
            g = g.add(p, alpha=group["weight_decay"])
        if buffers:
            buffers[i].mul_(group["momentum"]).add_(g)
            g = g.add(buffers[i], alpha=group["momentum"]) if group["nesterov"] else buffers[i]
        p.addcmul_(g, rate.to(g.dtype), value=-1.0)


class FusedAdam(_Rated):
    """torch.optim.Adam and AdamW: m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², θ ← θ − η·m̂/(√v̂ + ε)."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, name: str) -> None:
        super().__init__(optimizer, name=name)
        self._counts: list[Tensor] = []
        self._counted: list[float] = []

    def prepare(self) -> None:
        super().prepare()
        for rate in self._rates[len(self._counts) :]:
            self._counts.append(torch.zeros_like(rate))
            self._counted.append(0.0)

    def _begin(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:  # as torch makes it in the first step
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def before(self) -> None:
        super().before()
        for i, group in enumerate(self._groups):
            steps = [self.optimizer.state[p]["step"] for p in group["params"] if p.requires_grad]
            if not steps:
                continue
            count = float(steps[0])
            if count != self._counted[i]:  # loaded, or an eager step came between
                self._counts[i].fill_(count)
            torch._foreach_add_(steps, 1.0)
            self._counted[i] = count + 1.0

    def _move(self, i: int, group: Any, params: list[Any], grads: Mapping[Any, Tensor]) -> None:
        count = self._counts[i].add_(1.0)
        if not params:
            return
        states = [self.optimizer.state[p] for p in params]
        is_adamw = isinstance(self.optimizer, torch.optim.AdamW)
        decoupled = group.get("decoupled_weight_decay", is_adamw)
        fused: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
        fused(
            params,
            [grads[p] for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [count] * len(params),
            lr=self._rates[i],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            amsgrad=False,
            **{name: group[name] for name in ("weight_decay", "eps", "maximize")},
            **_NO_SCALER,
        )


class CapturedFTRL(_Rated):
    """noshuffle's FTRL without sets and regularizers: θ ← θ₀ − ℓ."""

    optimizer: FTRL

    def _begin(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            self.optimizer._anchor(p, group)

    def _move(self, i: int, group: Any, params: list[Any], grads: Mapping[Any, Tensor]) -> None:
        for p in params:
            p.copy_(self.optimizer._unconstrained(p, {**group, "lr": self._rates[i]}))

    def before(self) -> None:
        super().before()
        for group in self._groups:
            self.optimizer._advance_weight(group)


def _is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an SGD has a plain rate, no dampening, and parameters that the kernel takes."""
    return all(
        not group["dampening"]
        and not group["differentiable"]
        and not isinstance(group["lr"], Tensor)
        and all(p.dtype in _FUSED_TYPES for p in group["params"])
        for group in optimizer.param_groups
    )


def _is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an Adam has the usual settings, and all parameters of a group the same count."""
    for group in optimizer.param_groups:
        kept = [group["lr"], *group["betas"], group["weight_decay"], group["eps"]]
        off = ("amsgrad", "differentiable", "capturable", "fused")
        if any(group.get(name) for name in off) or any(isinstance(v, Tensor) for v in kept):
            return False
        steps = {
            float(optimizer.state[p]["step"]) if optimizer.state.get(p) else 0.0
            for p in group["params"]
            if p.requires_grad
        }
        if len(steps) > 1 or any(p.dtype not in _FUSED_TYPES for p in group["params"]):
            return False
    return True


def update_for(optimizer: torch.optim.Optimizer) -> Update:
    """The best form of an optimizer's update; `.name` says which, and why."""
    kind = type(optimizer)
    if has_hooks(optimizer):
        return Update(optimizer, name=f"{kind.__name__} with hooks, not captured")
    if kind is torch.optim.SGD and _is_plain_sgd(optimizer):
        return FusedSGD(optimizer, name="fused SGD")
    if kind in (torch.optim.Adam, torch.optim.AdamW) and _is_plain_adam(optimizer):
        return FusedAdam(optimizer, name=f"fused {kind.__name__}")
    if isinstance(optimizer, FTRL) and all(rule == (None, None) for rule in optimizer._rules):
        return CapturedFTRL(optimizer, name="captured FTRL")
    groups = optimizer.param_groups
    if all(group.get("capturable") for group in groups):
        # Such optimizers make their state in the first step, which must lie before the capture.
        params = [p for group in groups for p in group["params"]]
        if all(p in optimizer.state for p in params if p.requires_grad):
            return Capturable(optimizer, name=f"captured {kind.__name__}")
        return Update(optimizer, name=f"{kind.__name__}, captured from now on", is_for_now=True)
    return Update(optimizer, name=f"{kind.__name__}, not captured")
