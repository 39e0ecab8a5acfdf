"""The unchanged loop: `loss = criterion(model(x), y); loss.backward(); optimizer.step()`.

By the chain rule the gradient of example i is a vector-Jacobian product with what the loss sends
back into the model's output,

    ∇_θ ℓ_i = (∂ model(x_i) / ∂θ)ᵀ c_i,      c_i = ∂ℓ_i/∂output_i = B · ∂(mean loss)/∂output_i,

so a forward hook keeps the inputs, a hook on the output keeps c, and `step` runs the clipping
engine on the linear loss ⟨model(x_i), c_i⟩, whose gradient is the same. The raw `.grad` of the
backward pass is thrown away. This costs a second pass; `private.step` is faster, checks
participation before any gradient, and never trusts the reduction of a loss.

Several backward passes before one `step` are parts of one batch (do not divide their losses).
The loss must be a mean or sum of terms that each depend on one example: a mean over valid tokens
of the whole batch, or a contrastive loss, would couple examples. The statement says so. Gradients
that do not come through the model's output (a penalty on weights) are not in c: the first step
compares the raw gradient with that of the passes, and refuses a loop in which something is missing.
State: the passes since the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from noshuffle.clipping import ModelLoss
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.training.hooks import Listener, Pass
from noshuffle.training.step import Parts, Step


def linear_loss(model: Any, args: Any, kwargs: Any, sent_back: Tensor) -> Tensor:
    """⟨model(x_i), c_i⟩ for every row."""
    out: Tensor = model(*args, **kwargs)
    return (out * sent_back).reshape(out.shape[0], -1).sum(1)


class PrivateOptimizer(torch.optim.Optimizer):
    """Stands in for the user's optimizer; `step` makes the gradient private first.

    `accumulate` opens the next step of the run and releases it at the end of its block.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        listener: Listener,
        accumulate: Callable[[], AbstractContextManager[Step]],
    ) -> None:
        # Not calling Optimizer.__init__, which would give it groups of its own.
        self._parts = parts
        self._listener = listener
        self._accumulate = accumulate
        self._inner = parts.optimizer
        self._is_compared = False
        self._optimizer_step_pre_hooks: dict[int, Any] = {}
        self._optimizer_step_post_hooks: dict[int, Any] = {}

    # Groups, state and defaults are those of the optimizer inside; nobody sets them here.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Unsupported("parameters cannot join a private run; add them before privatize")

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget raw gradients and the passes they came from."""
        self._listener.clear()
        self._inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, *, ids: Any = None) -> Any:
        """One private step from the backward passes since the last one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        passes, refusal = self._listener.passes, self._listener.refusal
        self._listener.clear()
        if refusal:
            raise Unsupported(refusal)
        if not passes:
            raise InvalidInput(
                "no backward pass through the model since the last step; call loss.backward() "
                "first (private.step takes an empty batch)"
            )
        self._parts.ledger.bind("unchanged_loop", "yes")
        given = ids if ids is None or hasattr(ids, "__getitem__") else list(ids)
        at = 0
        with self._accumulate() as step:
            if not self._is_compared:
                _check_raw(self._parts, passes, is_mean=self._listener.is_mean)
                self._is_compared = True
            for one in passes:
                assert one.sent_back is not None
                size = one.sent_back.shape[0]
                part = None if given is None else given[at : at + size]
                at += size
                step.add(
                    ModelLoss(linear_loss, by_row=True),
                    (one.args, one.kwargs, one.sent_back),
                    ids=part,
                    data=(one.args, one.kwargs),
                )
            if given is not None and at != len(given):
                raise InvalidInput(f"ids must name each of the {at} examples, got {len(given)}")
        return loss


def _check_raw(parts: Parts, passes: list[Pass], *, is_mean: bool) -> None:
    """Raise unless the passes give the raw gradient, up to a factor (its norm may be clipped).

    Of a gradient that is zero or not finite nothing can be said.
    """
    own = list(parts.parameters.values())
    raw = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in own]
    found = [torch.zeros_like(p) for p in own]
    is_exact = all(not p.is_cuda and p.dtype in (torch.float32, torch.float64) for p in own)
    for one in passes:
        assert one.sent_back is not None
        is_exact = is_exact and not one.is_cast
        with torch.enable_grad():
            out = parts.model(*one.args, **one.kwargs)
        back = one.sent_back.to(out.dtype) / (len(out) if is_mean else 1)
        for total, g in zip(found, torch.autograd.grad(out, own, back, allow_unused=True)):
            if g is not None:
                total += g
    dot, size, other = (
        sum(float((a.double() * b.double()).sum()) for a, b in zip(left, right))
        for left, right in ((raw, found), (raw, raw), (found, found))
    )
    if size == 0.0 or not math.isfinite(size + other):
        return
    sine2 = 1.0 - dot * abs(dot) / (size * other) if other else 1.0
    if sine2 > (1e-6 if is_exact else 2.5e-3):
        raise Unsupported(
            "loss.backward() gave gradients beyond those of the passes through the model (a "
            "penalty on weights, parts of it called by themselves, random numbers), and they would "
            "be lost; use private.step with a ModelLoss, or weight_decay of the optimizer"
        )
