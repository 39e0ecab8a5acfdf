"""What becomes of a clipped sum that stays where it is, as a CUDA graph: noise, division, update.

Nothing here decides anything: `Release.use` must have let the step through. State: what was
captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.training.compiled.graphs import Captured
from noshuffle.training.compiled.update import FrozenSetting, Update
from noshuffle.training.step_parts import Parts


def _as_it_lies(value: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the type and the order of memory of its parameter, as optimizers want it."""
    if value.stride() == parameter.stride():
        return value.to(parameter.dtype)
    return torch.empty_like(parameter.detach()).copy_(value)


class CapturedRelease:
    """Noise, division and update for the sum that `values_fn` gives; what a graph was captured with
    stays where it is. The private gradient takes the place of the sum.

    Guarantees: `release` adds the noise of the next step of the stream, once.
    """

    def __init__(
        self,
        parts: Parts,
        values_fn: Callable[[], dict[str, Tensor]],
        *,
        captures: bool,
        pool: Any = None,
    ) -> None:
        self.parts, self.captures = parts, captures
        self._values_fn, self._pool = values_fn, pool
        self._grads: dict[nn.Parameter, Tensor] = {}
        self.update: Update | None = None
        self._frozen: list[FrozenSetting] = []
        self._release = Captured(lambda: None, captures=False)

    def capture(self, update: Update) -> None:
        """Ready noise, division and this update."""
        self.update = update
        update.prepare()
        if self.captures:
            self.parts.noise.prepare(self._values_fn(), counts_itself=True)
        self._release = Captured(self._do, captures=self.captures, pool=self._pool)
        self._frozen = update.frozen()

    # -- what the graphs hold ------------------------------------------------------------------

    @torch.no_grad()
    def _do(self) -> None:
        assert self.update is not None
        values = self._values_fn()
        self.parts.noise.add_(values, times=1.0 / self.parts.planned_batch)
        self._grads = {p: _as_it_lies(values[n], p) for n, p in self.parts.parameters.items()}
        self._give()
        if self.update.is_captured:
            self.update.run(self._grads)

    def _give(self) -> None:
        for parameter, grad in self._grads.items():
            if parameter.grad is not grad:
                parameter.grad = grad

    # -- one step ------------------------------------------------------------------------------

    def release(self) -> None:
        """Noise, division, update."""
        assert self.update is not None
        self.update.before()
        if self.captures:
            self.parts.noise.announce(counts_itself=True)
        self._release()
        self._give()
        if not self.update.is_captured:
            self.update.run({})

    def has_moved(self) -> bool:
        """Whether the optimizer's settings or tensors are no longer those that were captured."""
        update = self.update
        assert update is not None
        if not update.is_captured or not self.captures:
            return update.is_for_now and self.captures
        return not update.is_as(self._frozen)
