"""Write down what other people's code releases: any torch optimizer, any Flower strategy.

    recorder = record_optimizer(optimizer, model.canary.weight)      # Opacus, plain torch, ours
    …train as ever…
    recorder.rows()                                                  # steps × coordinates

An optimizer is heard right before it steps, when every gradient is as private as it will be (the
optimizer inside, where one wraps another as Opacus does). A Flower strategy is heard before and
after it aggregates: what it released is the difference of the global arrays. Nothing is changed.

>>> weight = torch.nn.Parameter(torch.zeros(2))
>>> optimizer = torch.optim.SGD([weight], lr=0.1)
>>> with record_optimizer(optimizer, weight) as recorder:
...     weight.grad = torch.tensor([1.0, 2.0])
...     optimizer.step()
>>> recorder.rows()
array([[1., 2.]], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.errors import InvalidInput, Unsupported


class ReleaseRecorder(ExitStack):
    """Rows that were released so far; `close` (or the end of a with-block) stops listening."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[NDArray[np.float32]] = []

    def hear(self, row: Any) -> None:
        self._rows.append(np.array(row, dtype=np.float32).reshape(-1))

    def rows(self) -> NDArray[np.float32]:
        """Releases × coordinates."""
        if not self._rows:
            raise InvalidInput("nothing was released while the recorder listened")
        return np.array(self._rows)


def record_optimizer(optimizer: Any, parameter: Tensor) -> ReleaseRecorder:
    """Listen to the gradient of a parameter at every step of a torch optimizer."""
    while hasattr(optimizer, "original_optimizer"):  # Opacus 1.x wraps the user's optimizer
        optimizer = optimizer.original_optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput(f"expected a torch optimizer, got {type(optimizer).__name__}")
    if not any(parameter is own for group in optimizer.param_groups for own in group["params"]):
        raise InvalidInput("the parameter is not one of this optimizer's")
    recorder = ReleaseRecorder()

    def before_step(*_: Any) -> None:
        released = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        recorder.hear(released.detach().float().cpu().numpy())

    recorder.callback(optimizer.register_step_pre_hook(before_step).remove)
    return recorder


def record_strategy(strategy: Any, array: str) -> ReleaseRecorder:
    """Listen to one array of a Flower strategy (Message API): after − before every aggregation."""
    if not hasattr(strategy, "aggregate_train") or not hasattr(strategy, "configure_train"):
        raise Unsupported(
            f"expected a Flower strategy with configure_train and aggregate_train, got "
            f"{type(strategy).__name__}"
        )
    recorder, before = ReleaseRecorder(), {}
    configure, aggregate = strategy.configure_train, strategy.aggregate_train

    def configure_train(server_round: int, arrays: Any, *given: Any, **more: Any) -> Any:
        before[server_round] = arrays[array].numpy().copy()
        return configure(server_round, arrays, *given, **more)

    def aggregate_train(server_round: int, replies: Any, *given: Any, **more: Any) -> Any:
        arrays, metrics = aggregate(server_round, replies, *given, **more)
        if arrays is not None and server_round in before:
            recorder.hear(arrays[array].numpy() - before.pop(server_round))
        return arrays, metrics

    for name, heard in (("configure_train", configure_train), ("aggregate_train", aggregate_train)):
        recorder.callback(setattr, strategy, name, getattr(strategy, name))
        setattr(strategy, name, heard)
    return recorder


def traces(rows: NDArray[np.float32], steps: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """What every canary's coordinate received in its own steps: participations × canaries.

    `steps[i]` lists the steps of canary i, or those it would have had if it was not in the data.
    """
    if len(steps) != rows.shape[1] or len({len(own) for own in steps}) != 1:
        raise InvalidInput("give the steps of every coordinate, equally many for all")
    return np.asarray(rows[np.asarray(steps).T, np.arange(len(steps))])
