"""What `noshuffle train` learns to predict, and how it is scored on held-out data.

    --task classification   whole numbers below `classes`; cross entropy; accuracy
    --task regression       numbers with a point, one or several a row; squared error, as it comes
    --task module:function  a loss of your own, loss(outputs, targets) → one number; its mean
    --task auto             (the default) by the type of the targets

Nothing is rescaled: targets that are far from 0 need a bias that starts there, or a loss of your
own. The clip norm bounds what one row can do, whatever its target is. No state.

>>> from noshuffle.datasets import load
>>> task_of("auto", load("digits"))[0].name
'classification'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from noshuffle.cli.train_parts import accuracy_of, answers
from noshuffle.datasets import DataSet
from noshuffle.errors import InvalidInput, imported


@dataclass(frozen=True)
class TrainTask:
    """A loss, and the name that its score has in metrics: an accuracy or an error."""

    name: str
    loss_fn: Callable[[Tensor, Tensor], Tensor]

    @property
    def metric(self) -> str:
        return "test_accuracy" if self.name == "classification" else "test_error"

    def score(self, model: nn.Module, data: DataSet) -> float:
        """On held-out data: the share of right answers, or the mean loss."""
        if self.name == "classification":
            return accuracy_of(model, data.x_test, data.y_test)
        pairs = answers(model, data.x_test, data.y_test)
        total = sum(len(y) * float(self.loss_fn(out, y)) for out, y in pairs)
        return total / len(data.x_test) if len(data.x_test) else float("nan")


def task_of(name: str, data: DataSet) -> tuple[TrainTask, DataSet]:
    """The task of that name, and the data as it needs them."""
    is_float = data.y_train.is_floating_point()
    if name == "auto":
        name = "regression" if is_float else "classification"
    if ":" in name:
        return TrainTask(name, imported(task=name)), data
    if name == "classification":
        if is_float:
            raise InvalidInput(
                f"classification needs whole numbers as targets, those of {data.name} are "
                f"{data.y_train.dtype}; use --task regression"
            )
        return TrainTask(name, nn.CrossEntropyLoss()), data
    if name != "regression":
        raise InvalidInput(
            f"task must be auto, classification, regression or module:function, got {name!r}"
        )
    train, test = (y.float().reshape(len(y), -1) for y in (data.y_train, data.y_test))
    if not bool(torch.isfinite(train).all()):
        raise InvalidInput(f"the targets of {data.name} must be finite; leave such rows out")
    made = replace(data, y_train=train, y_test=test, classes=train.shape[1])
    return TrainTask(name, nn.MSELoss()), made
