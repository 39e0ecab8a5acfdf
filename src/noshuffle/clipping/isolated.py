"""Examples apart by construction: forward pass and loss under vmap, the layer rules as ever.

    losses = vmap(loss of one example)(batch)         no example can see another one
    (a, g) = input and output gradient of each layer, as the batched tensors behind it hold them

One backward pass through the batched operations asks for the gradients g at layer outputs, and
(a, g) go to the same rules as in `ghost_forms`. A parameter without a rule comes in as one copy an
example, whose gradients are the per-example gradients. Nothing is assumed about where a layer has
its example axis: whatever a layer sees of one example is that example's. No state.

>>> from noshuffle.clipping.layers import read
>>> model, batch = nn.Linear(2, 3), (torch.randn(5, 2), torch.randint(3, (5,)))
>>> forms, losses = isolated_forms(model, nn.CrossEntropyLoss(), batch, layers=read(model))
>>> sorted(forms), losses.shape
(['bias', 'weight'], torch.Size([5]))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from noshuffle.clipping.check import as_written, trainable
from noshuffle.clipping.forms import DenseGradient, GradientForm
from noshuffle.clipping.layers import Layers, NotByLayer, tensors
from noshuffle.clipping.objective import (
    Batch,
    Loss,
    batch_axes,
    batch_size,
    must_depend,
    one,
    single_loss,
)
from noshuffle.clipping.products import no_autocast, wide
from noshuffle.clipping.state import restored
from noshuffle.clipping.stateless import call_with
from noshuffle.clipping.tape import Found, GradientTape, watching

_functorch: Any = torch._C._functorch


class Bound(nn.Module):
    """The model and its loss as one module, so that the loss may call any part of the model."""

    def __init__(self, model: nn.Module, loss_fn: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *single: Any) -> Tensor:
        return single_loss(self.model, self.loss_fn, single)


def isolated_forms(
    model: nn.Module, loss_fn: Loss, batch: Batch, *, layers: Layers
) -> tuple[dict[str, list[GradientForm]], Tensor]:
    """Per-example gradients as forms, by parameter name, and the losses.

    Guarantees: the forms of example i depend on example i alone, whatever the model does.
    """
    size, bound, params = batch_size(batch), Bound(model, loss_fn), trainable(model)
    ruled = {id(p) for layer in layers.ruled.values() for p in layer.parameters()}
    copies = {
        f"model.{name}": p.detach().expand(size, *p.shape).requires_grad_()
        for name, p in params.items()
        if id(p) not in ruled
    }
    like: Any = next(iter(params.values()))
    zeros = torch.zeros(size, dtype=torch.long, device=like.device)
    tape = GradientTape(size)

    def loss(own: dict[str, Tensor], zero: Tensor, example: Batch) -> Tensor:
        with _given_rows(layers.ruled.values(), zero):
            value: Tensor = call_with(bound, own, one(example))
        return value

    def seen(name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        given = _rows(args[0] if args else tensors((args, kwargs))[0])
        build = partial(_build, layers, name, layer, given.detach(), out, size)
        tape.record(build, _value(out))

    off = GradientTape(size, is_on=False)
    with (
        restored(model, loss_fn), torch.enable_grad(), as_written(model),
        watching(model, layers.ruled, seen, off), sdpa_kernel(SDPBackend.MATH),
    ):  # fmt: skip
        axes = (0, 0, batch_axes(batch))
        losses = torch.vmap(loss, in_dims=axes, randomness="different")(copies, zeros, batch)
        must_depend(losses)
        for name, copy in copies.items():
            own = params[name.removeprefix("model.")]
            tape.record(lambda g, own=own: [(own, DenseGradient(wide(g)))], copy)
        with no_autocast(losses.device):
            forms = tape.forms(losses, {id(p): name for name, p in params.items()})
    return forms, losses.detach()


def _build(
    layers: Layers, name: str, layer: nn.Module, a: Tensor, out: Tensor, size: int, g: Tensor
) -> Found:
    """What the gradient at the output says about the parameters of a layer."""
    g = _in_front(g, _functorch.maybe_get_bdim(out))
    found = layers.rules[name](layer, a, g, size)
    own = ((layer._parameters.get(key), form) for key, form in found.items())
    return [(p, form) for p, form in own if p is not None]


@contextmanager
def _given_rows(layers: Iterable[nn.Module], zero: Tensor) -> Iterator[None]:
    """Add a zero of each example to inputs that are the same for all, such as positions."""

    def add(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor) or _functorch.is_batchedtensor(args[0]):
            return None
        return (args[0] + zero.to(args[0].dtype), *args[1:])

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(add).remove)
        yield


def _value(t: Tensor) -> Tensor:
    """The batched tensor behind one that vmap shows."""
    if not isinstance(t, Tensor) or not _functorch.is_batchedtensor(t):
        raise NotByLayer("a layer is called outside of the forward pass of one example")
    value: Tensor = _functorch.get_unwrapped(t)
    if _functorch.is_batchedtensor(value):
        raise NotByLayer("a layer is called under a vmap of the model's own")
    return value


def _rows(t: Tensor) -> Tensor:
    return _in_front(_value(t), _functorch.maybe_get_bdim(t)).resolve_neg()


def _in_front(value: Tensor, axis: int) -> Tensor:
    """[B, k, …] → [B·k, …]: examples in front, with what a layer takes for its own first axis."""
    value = value.movedim(axis, 0)
    return value.flatten(0, 1) if value.dim() > 1 else value
