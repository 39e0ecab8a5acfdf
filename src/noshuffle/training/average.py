"""The average of iterates: post-processing of released models, so it costs no privacy.

    a_t = d_t·a_{t−1} + (1 − d_t)·θ_t,      d_t = min(d, t/(t + 10))

The noise of a step moves every later iterate; their average has less of it. The first iterates are
forgotten sooner, as in De et al. 2022 (arXiv 2204.13650), who average DP-SGD that way. State: one
copy of the parameters and the count, saved with the run (`Private.attach`).

>>> model = nn.Linear(1, 1, bias=False)
>>> average = IterateAverage(model, decay=0.5)
>>> for value in (1.0, 3.0):
...     _ = nn.init.constant_(model.weight, value)
...     average.update()
>>> with average.in_place():
...     seen = model.weight.item()
>>> round(seen, 3), model.weight.item()
(2.818, 3.0)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from noshuffle.clipping.check import trainable
from noshuffle.errors import below_one, instance_of, non_negative


class IterateAverage:
    """A moving average of the trainable parameters of a model."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        instance_of(nn.Module, model=model)
        non_negative(decay=decay)
        below_one(decay=decay)
        self._parameters, self._decay, self._count = trainable(model), decay, 0
        self._values = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the present iterate in."""
        decay = min(self._decay, self._count / (self._count + 10))
        for name, parameter in self._parameters.items():
            self._values[name].lerp_(parameter.detach(), 1.0 - decay)
        self._count += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """With the average in the model; then the iterate again."""
        before = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            self._put(self._values)
            yield
        finally:
            self._put(before)

    @torch.no_grad()
    def _put(self, values: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self._values), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["values"].items():
            self._values[name].copy_(value)
        self._count = int(state["count"])
