"""Parts: everything a private step is made of, and what is asked of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from noshuffle.clipping import Clip, ClippedSum, ModelLoss
from noshuffle.clipping.objective import Criterion
from noshuffle.errors import InvalidInput, callables
from noshuffle.release.batches import RowNames
from noshuffle.release.release import Release
from noshuffle.training.hooks import ParameterGuard
from noshuffle.training.streams import StreamOrder


class Engine(Protocol):
    """What a clipping engine offers."""

    def clipped_sum(
        self,
        model: nn.Module,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        clip: Clip,
        units: Tensor | None = None,
        reduce: str = "sum",
        weights: Tensor | None = None,
    ) -> ClippedSum: ...


@dataclass
class Parts:
    """Everything a step is made of."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    engine: Engine
    release: Release
    groups_users: bool
    reduce: str
    drop: bool
    #: Who the rows of the next step are, where `private.batches` names them.
    names: RowNames = field(init=False, repr=False, compare=False)
    guard: ParameterGuard = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.guard = ParameterGuard(self.model, self.parameters, self.optimizer)
        self.device = next(iter(self.parameters.values())).device
        self.streams = StreamOrder() if self.device.type == "cuda" else None
        self.names = RowNames(self.release)
        self.noise, self.threshold = self.release.noise, self.release.threshold

    @property
    def planned_batch(self) -> float:
        """What every noisy sum is divided by."""
        return self.release.divisor


def check_call(loss_fn: Any, batch: tuple[Any, ...]) -> None:
    """Raise unless there are a loss function and a batch."""
    if isinstance(loss_fn, Tensor):
        raise InvalidInput(
            "loss_fn must be a function, got a tensor; private.step(loss_fn, x, y) computes the "
            "loss itself (for loss.backward(); private.optimizer.step() see private.criterion)"
        )
    if not isinstance(loss_fn, ModelLoss):
        callables(loss_fn=loss_fn)
    if not batch:
        raise InvalidInput(
            "private.step needs a batch beside the loss: private.step(loss_fn, x, y)"
        )


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load its state; torch itself takes that of any other optimizer, and fails when it steps."""
    groups = optimizer.param_groups
    needed = [name for name in optimizer.defaults if all(name in group for group in groups)]
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        if missing := [name for name in needed if name not in group]:
            raise InvalidInput(
                f"this state was saved with another optimizer: {type(optimizer).__name__} needs "
                f"{missing[0]}, which it does not have; build the run with the one that it had"
            )
