"""The client's part: train locally, send the clipped difference of the whole model.

    θ_{s+1} = θ_s − η (∇ mean loss(θ_s; batch s) + μ (θ_s − θ₀)),     Δ = θ_S − θ₀
    sent:   Δ · min(1, ζ/‖Δ‖)

FedAvg (McMahan et al. 2017, arXiv 1602.05629) takes several steps, FedSGD one step with all of a
user's examples; μ is the proximal term of FedProx (Li et al. 2020, arXiv 1812.06127). The norm is
one L2 norm over all tensors, 0-d ones included. Local batches come in the order of the data. Server
and client clip by the same function. No state is kept between rounds.

>>> delta = {"w": torch.tensor([3.0, 0.0]), "scale": torch.tensor(4.0), "seen": torch.tensor(7)}
>>> sent = clip_delta(delta, clip_norm=1.0)
>>> sorted(sent.values), round(float(sent.values["scale"]), 4), sent.norm
(['scale', 'w'], 0.8, 5.0)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from noshuffle.clipping.factor import SLACK, Flat, clip_factor
from noshuffle.clipping.stateless import call_with
from noshuffle.errors import (
    InvalidInput,
    instance_of,
    non_negative,
    positive,
    whole,
)
from noshuffle.federated.own_copy import Copies

#: A target that counts for nothing, as in torch's cross-entropy.
NO_TARGET = -100
#: Beyond so many clip norms the factor might count as zero (`clip_factor`).
_FAR = 2.0**64

#: Scores and targets of a batch → one loss per example.
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """What every client does in a round.

    Arguments:
        learning_rate: η of the local steps.
        steps: the largest number of local steps; a user with fewer batches goes through the data
            again up to `epochs` times and then stops. FedSGD: steps=1, batch_size=None.
        batch_size: examples of a local step; None takes all of the user's.
        epochs: how often the data are gone through at most.
        proximal: μ of FedProx, zero for FedAvg.
        most_examples: examples of a user beyond this many are left alone; None uses all.
    """

    learning_rate: float
    steps: int = 1
    batch_size: int | None = None
    epochs: int = 1
    proximal: float = 0.0
    most_examples: int | None = None

    def __post_init__(self) -> None:
        positive(learning_rate=self.learning_rate)
        given = {"batch_size": self.batch_size, "most_examples": self.most_examples}
        stated = {name: value for name, value in given.items() if value is not None}
        whole(steps=self.steps, epochs=self.epochs, **stated)
        non_negative(proximal=self.proximal)
        most = torch.finfo(torch.float32).max
        for name in ("learning_rate", "proximal"):
            if getattr(self, name) > most:
                came = getattr(self, name)
                raise InvalidInput(f"{name} must be at most {most:.3g} (float32), got {came:g}")

    def batches(self, examples: int) -> list[slice]:
        rows = examples if self.most_examples is None else min(examples, self.most_examples)
        if not rows:
            return []
        size = rows if self.batch_size is None else self.batch_size
        once = [slice(at, min(at + size, rows)) for at in range(0, rows, size)]
        return (once * self.epochs)[: self.steps]


@dataclass(frozen=True)
class ClippedDelta:
    """What a client contributes, and its norm before clipping (raw: for the noisy count only)."""

    values: dict[str, Tensor]
    norm: float
    is_nonfinite: bool


def squared_error(answers: Tensor, targets: Tensor) -> Tensor:
    """One loss per example: the mean of (answer − target)² over its numbers."""
    gaps = answers.reshape(len(answers), -1) - targets.reshape(len(targets), -1)
    return gaps.square().mean(1)


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """One loss per example: the mean over its targets, those marked `NO_TARGET` left out.

    A label that is no class makes the loss of its example NaN, and so the update of its owner,
    which then counts as zero (`clip_flat`): torch would end the training of everybody.
    """
    _check_kind(scores, targets)
    spoiled: Tensor | None = None
    if not targets.is_floating_point():
        is_class = (targets >= 0) & (targets < scores.shape[1])
        spoiled = torch.where(is_class | (targets == NO_TARGET), 1.0, math.nan).to(scores.dtype)
        targets = torch.where(spoiled == 1.0, targets, 0)
    losses = nn.functional.cross_entropy(scores, targets, reduction="none", ignore_index=NO_TARGET)
    losses = losses if spoiled is None else losses * spoiled
    if losses.dim() == 1:
        return losses
    counted = (targets != NO_TARGET).flatten(1).sum(1).clamp_min(1)
    return losses.flatten(1).sum(1) / counted


def check_classes(scores: Tensor, targets: Tensor, *, first: int) -> None:
    """Raise unless all targets of held-out rows (from `first` on) are classes of the model.

    torch would end in an error that does not say where, and on a GPU takes the process with it.
    """
    _check_kind(scores, targets)
    classes = scores.shape[1]
    wrong = ((targets < 0) | (targets >= classes)) & (targets != NO_TARGET)
    if not targets.is_floating_point() and bool(wrong.any()):
        row, label = int(wrong.nonzero()[0, 0]), int(targets[wrong][0])
        raise InvalidInput(
            f"label {label} in row {first + row} of the held-out users is none of the model's "
            f"{classes} classes (0 to {classes - 1}); correct it, or leave the row out"
        )


def _check_kind(scores: Tensor, targets: Tensor) -> None:
    if targets.is_floating_point() and targets.shape != scores.shape:
        raise InvalidInput(
            f"classes are whole numbers, and these targets are {targets.dtype}; give y.long(), or "
            "a loss_fn for numbers (squared_error)"
        )


def clip_flat(flat: Tensor, *, clip_norm: float) -> tuple[Tensor, float, bool]:
    """A whole delta as one vector, clipped; its norm before; whether it was NaN or infinite.

    Guarantees: the result has norm at most `clip_norm` after rounding. A vector with a NaN or an
    infinity, or whose norm overflows double precision, becomes zeros; a zero vector stays zero. A
    vector that was clipped before is left as it is, bit for bit. The slack is that of single
    precision for all types: the norm of many doubles is itself rounded, and tensors of both types
    may travel in one delta.
    """
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    if not math.isfinite(norm):
        return torch.zeros_like(flat), norm, True
    if norm <= clip_norm * (1.0 - SLACK / 2):
        return flat, norm, False
    if norm < clip_norm * _FAR:
        return flat * float(clip_factor(norm, clip_norm, slack=SLACK)), norm, False
    # Scaled by a power of two first, where nothing is lost, to about the clip norm.
    down = 0.5 ** (math.frexp(norm)[1] - math.frexp(clip_norm)[1] - 1)
    factor = float(clip_factor(norm * down, clip_norm, slack=SLACK))
    return (flat.double() * down * factor).to(flat.dtype), norm, False


def clip_delta(delta: Mapping[str, Tensor], *, clip_norm: float) -> ClippedDelta:
    """Clip a client's whole update to one L2 norm.

    Guarantees: those of `clip_flat`, over all floating-point tensors together, whatever their
    number of dimensions. Integer and truth-value buffers are left out, not summed. Tensors in
    half precision are raised to float32, where the bound holds.
    """
    Flat(clip_norm)  # checks the number
    instance_of(Mapping, delta=delta)
    instance_of(Tensor, **{f"{name!r} of the delta": value for name, value in delta.items()})
    kept = {
        name: value.detach().to(torch.promote_types(value.dtype, torch.float32))
        for name, value in delta.items()
        if value.is_floating_point()
    }
    if not kept:
        return ClippedDelta({}, 0.0, False)
    wide = torch.float64 if any(v.dtype == torch.float64 for v in kept.values()) else torch.float32
    flat = torch.cat([value.reshape(-1).to(wide) for value in kept.values()])
    clipped, norm, is_bad = clip_flat(flat, clip_norm=clip_norm)
    pieces = torch.split(clipped, [value.numel() for value in kept.values()])
    values = {
        name: piece.reshape(value.shape).to(value.dtype)
        for (name, value), piece in zip(kept.items(), pieces)
    }
    return ClippedDelta(values, norm, is_bad)


@contextmanager
def own_draws(seed: int, device: torch.device) -> Iterator[None]:
    """The generators of torch, NumPy and Python as this seed sets them; then as they were.

    One process serves many clients: how much one draws (dropout, a layer that is left out) moves
    the draws of all after it, so nobody may know what they begin with.
    """
    before, is_cuda = (random.getstate(), np.random.get_state()), device.type == "cuda"  # noqa: NPY002
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.default_generator.manual_seed(seed)
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002


#: A client's examples → the named parameters after its local steps.
TrainFn = Callable[[Tensor, Tensor], dict[str, Tensor]]


def training_of(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    *,
    local: LocalTraining,
    loss_fn: LossFn = cross_entropy,
) -> TrainFn:
    """What each client of a round does; without examples, parameters are as they came.

    `model` and `loss_fn` stay untouched: every client trains copies as they are now (`Copies`).
    """
    instance_of(nn.Module, model=model)
    instance_of(Mapping, parameters=parameters)
    instance_of(LocalTraining, local=local)
    models, losses = Copies(model, parameters), Copies(loss_fn, {})

    def train(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        instance_of(Tensor, x=x, y=y)
        if len(x) != len(y):
            raise InvalidInput(f"x and y must have one row per example, got {len(x)} and {len(y)}")
        own, own_loss = models(), losses()
        now = {name: value.detach().clone() for name, value in parameters.items()}
        for rows in local.batches(len(x)):
            leaves = {name: value.requires_grad_() for name, value in now.items()}
            loss = own_loss(call_with(own, leaves, (x[rows],)), y[rows]).mean()
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            now = {
                name: stepped(value.detach(), grad, start=parameters[name], local=local)
                for (name, value), grad in zip(leaves.items(), grads)
            }
        return now

    return train


def local_train(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    *,
    local: LocalTraining,
    loss_fn: LossFn = cross_entropy,
) -> dict[str, Tensor]:
    """One client's round: Δ of the named parameters, not yet clipped; zero without examples.

    A loss with a NaN runs through to the delta, where clipping turns it to zero.
    """
    train = training_of(model, parameters, local=local, loss_fn=loss_fn)
    return moved(train(x, y), parameters)


def moved(now: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Δ: what local steps did to the named parameters."""
    return {name: value - start[name].detach() for name, value in now.items()}


def stepped(value: Tensor, grad: Tensor | None, *, start: Tensor, local: LocalTraining) -> Tensor:
    pull = torch.zeros_like(value) if grad is None else grad
    if local.proximal:
        pull = pull + local.proximal * (value - start.detach())
    return value - local.learning_rate * pull
