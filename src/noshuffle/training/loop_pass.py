"""Pass: one forward pass of an unchanged loop, and what came back to its outputs.

    c = ∂ℓ/∂output      factor and reduction of the loss taken out (`loss_reading`)

Gradients of several losses on one output add up where all have one factor; anything else is refused
in words. A pass whose output is the loss itself keeps its inputs alone. State: of a pass, its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from noshuffle.clipping.objective import batch_size, cuttable
from noshuffle.errors import InvalidInput
from noshuffle.training.loss_reading import LossReading

#: What a Trainer tells a model about the whole batch: it would divide by what all examples have.
ABOUT_THE_BATCH = "num_items_in_batch"


def versions(tensors: Iterable[Any]) -> list[int]:
    """How often each of these tensors was written to."""
    own = (one for one in tensors if isinstance(one, Tensor) and not one.is_inference())
    return [one._version for one in own]


class Pass:
    """One forward pass whose output received a gradient."""

    def __init__(self, args: Any, kwargs: Any, *, seed: int) -> None:
        self.args, self.kwargs, self.seed = args, kwargs, seed
        self.is_random, self.refusal = False, ""
        self.cast = ""  # the type of an autocast that it ran under, and its device
        self.reading: LossReading | None = None
        #: By number of the output: gradients as they came, and of the examples' own losses.
        self.raw: dict[str, Tensor] = {}
        self.sent_back: dict[str, Tensor] = {}
        self.inner: Tensor | None = None  # ⟨output_i, c_i⟩, which the second pass must find again
        #: Tensors of the model that it wrote into, unlike passes before it.
        self.written: list[str] = []
        #: How often inputs and weights had been written to when the pass was over.
        self.inputs_at: list[int] = []
        self.weights_at: list[int] = []

    def forget(self) -> None:
        """The gradients that came back so far were thrown away."""
        self.reading, self.raw, self.sent_back, self.inner = None, {}, {}, None

    @property
    def is_overwritten(self) -> bool:
        """Whether an input was written to since."""
        return versions(tree_leaves((self.args, self.kwargs))) != self.inputs_at

    @property
    def own_loss(self) -> str | None:
        """The number of the output that is a loss by itself, if it was sent back from there."""
        return next((key for key, grad in self.raw.items() if not grad.dim()), None)

    def hear(self, key: str, out: Tensor, grad: Tensor, reading: LossReading | None) -> str:
        """A gradient has arrived at an output that the loss uses; why it is refused, if it is."""
        if reading is None:
            return (
                "gradients came through the model other than by loss.backward(); use private.step"
            )
        if self.refusal:
            return self.refusal
        if grad.dim() and not len(grad):
            return "an empty batch has no loss; leave it out, or use private.step, which takes one"
        self.raw[key] = self.raw[key] + grad if key in self.raw else grad.detach()
        if self.own_loss is not None:
            if len(self.raw) > 1:
                return "a loss of the model and another one on its outputs; use a ModelLoss of both"
            return "" if float(grad) > 0 else f"the loss was multiplied by {float(grad):g}"
        before, self.reading = self.reading, reading.settled(len(grad))
        reading = self.reading
        refusal = reading.refused(len(grad))
        if refusal:
            return refusal
        if before is not None and before.factor != reading.factor:
            return "two losses on one output with different factors; add them up before backward()"
        c = reading.by_row(grad)
        self.sent_back[key] = self.sent_back[key] + c if key in self.sent_back else c
        inner = (out * c).reshape(len(c), -1).sum(1)
        self.inner = inner if self.inner is None else self.inner + inner
        return ""


def inputs_of(one: Pass) -> tuple[Any, Any]:
    """What the model was given, as far as it belongs to single examples."""
    kwargs = {k: v for k, v in one.kwargs.items() if k != ABOUT_THE_BATCH}
    return cuttable((one.args, kwargs if one.own_loss is not None else one.kwargs))


def size_of(one: Pass) -> int:
    """The number of examples of a pass."""
    if one.sent_back:
        return len(next(iter(one.sent_back.values())))
    return batch_size(inputs_of(one))


def check_factors(passes: list[Pass], before: float | None) -> float | None:
    """The factor of the losses of a step; raises unless all have one, and earlier steps had it too.

    A GradScaler changes it by powers of two between steps.
    """
    found = {one.reading.factor for one in passes if one.reading and one.own_loss is None}
    if not found:
        return before
    smallest, largest = min(found), max(found)
    if largest > smallest * (1 + 1e-6):
        raise InvalidInput(
            f"the losses of one step were multiplied by different numbers ({smallest:g} to "
            f"{largest:g}); leave the factors out: parts of a batch are added up as they are"
        )
    ratio = torch.tensor(
        1.0 if before is None else largest / before, dtype=torch.float64, device="cpu"
    )
    half = float(torch.frexp(ratio).mantissa)
    if min(abs(half - 0.5), abs(half - 1.0)) > 1e-6:
        raise InvalidInput(
            f"the loss was multiplied by {before:g} and is now by {largest:g}: a factor that "
            "changes with the batch (its number of tokens) belongs inside each example's loss, one "
            "that changes with time into the learning rate; use private.step"
        )
    return largest
