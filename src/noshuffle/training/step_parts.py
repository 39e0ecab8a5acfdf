"""Parts: everything a private step is made of, and the run that hears of looks at its model.

State: whether the run is over, and whether the model was found to mix examples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from noshuffle.clipping import Clip, ClippedSum, ModelLoss
from noshuffle.clipping.looks import Listeners, Look
from noshuffle.clipping.objective import Criterion
from noshuffle.errors import InvalidInput
from noshuffle.release.release import Release
from noshuffle.training.hooks import ParameterGuard


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
    #: Whether a released step whose sum comes out otherwise is passed over instead of refused.
    skips_replays: bool = False
    #: Inputs of the first batch of a loader that was checked, until the first step has seen them.
    first_rows: Tensor | None = field(default=None, repr=False)
    #: Whether the run was closed: an engine may go on elsewhere.
    is_over: bool = field(default=False, init=False)
    #: Whether the model was found to mix examples.
    is_mixing: bool = field(default=False, init=False)
    guard: ParameterGuard = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.guard = ParameterGuard(self.model, self.parameters)
        self.device = next(iter(self.parameters.values())).device
        self.ledger, self.noise = self.release.ledger, self.release.noise
        self.threshold, self.secret = self.release.threshold, self.release.secret
        if isinstance(listeners := getattr(self.engine, "listeners", None), Listeners):
            listeners.add(self.heard)

    def check_open(self) -> None:
        """Raise where the run was closed."""
        if self.is_over:
            raise InvalidInput(
                "this run was closed; an unfinished one in a folder goes on after privatize(…, "
                "run=…) and resume(), and without a folder a new run adds up with this one"
            )

    def heard(self, model: nn.Module, look: Look) -> None:
        """Write down what a look at the model found.

        Guarantees: where examples mixed in steps that may have been released, the ledger has it on
        the disk when this returns, and statement.json and the budget say so.
        """
        if model is self.model and not self.is_over:
            self.is_mixing = self.is_mixing or bool(look.mixes)
            if self.ledger.look(look.kind, mixes=look.mixes, size=look.size):
                self.release.tell_not_private()

    @property
    def planned_batch(self) -> float:
        """What the coming step is divided by."""
        return self.release.divisor_now
