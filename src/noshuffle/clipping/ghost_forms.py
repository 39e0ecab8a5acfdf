"""Per-example gradients of one batch as forms, read off one forward and one backward pass.

    forward   every layer's input a is kept
    backward  only the gradients g at layer outputs are asked for, no weight gradients
    forms     (a, g) of each layer by its rule: what its norms and its sums are made of (`forms`)

Nothing of size batch × model is written out, but for layers without a rule. What the pass writes
into the model is undone after it (`state`). The layers, and where each has its example axis, come
from a trial of the model (`trial`). No state.

>>> from noshuffle.clipping.layers import find_layout, read
>>> from noshuffle.clipping.objective import take
>>> model, batch = nn.Linear(2, 3), (torch.randn(5, 2), torch.randint(3, (5,)))
>>> loss = nn.CrossEntropyLoss()
>>> layers = read(model)
>>> layout = find_layout(model, layers, lambda n: batch_losses(model, loss, take(batch, slice(n))))
>>> forms, losses = ghost_forms(model, loss, batch, layers=layers, layout=layout)
>>> sorted(forms), losses.shape
(['bias', 'weight'], torch.Size([5]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.utils._pytree import tree_flatten, tree_unflatten

from noshuffle.clipping.check import as_written, trainable
from noshuffle.clipping.conv_input import inputs_by_convolution
from noshuffle.clipping.forms import DenseGradient, GradientForm
from noshuffle.clipping.isolated import isolated_forms
from noshuffle.clipping.layers import (
    CallAxes,
    ExampleAxes,
    Layers,
    NotByLayer,
    spread,
    stamp,
    tensors,
)
from noshuffle.clipping.objective import (
    Batch,
    Loss,
    batch_losses,
    must_depend,
    shape_of,
)
from noshuffle.clipping.pooling import pooling_by_channel
from noshuffle.clipping.products import no_autocast, wide
from noshuffle.clipping.state import restored
from noshuffle.clipping.stateless import call_with
from noshuffle.clipping.tape import Found, GradientTape, rewritten, watching


class RecordedPass:
    """One forward pass whose layers are recorded, and the backward pass that reads their gradients.

        with recorded.hooks():
            losses = …                    # one number per example, of one forward pass
            forms = recorded.forms(losses)

    The block may end behind the forward pass and be entered again for `forms`: a checkpointed part
    runs once more there. `names`: the name of every trainable parameter by its id. What the pass
    writes into the model is the caller's concern (`state.restored`).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        size: int,
        inner: Sequence[torch.Size],
        layers: Layers,
        layout: ExampleAxes,
        names: Mapping[int, str],
    ) -> None:
        self.model, self.layers, self.layout, self.names = model, layers, layout, names
        self.tape = GradientTape(size)
        self.is_alike = tuple(inner) == layout.inner[: len(inner)]
        self.calls = dict.fromkeys(layers.watched, 0)

    def hooks(self) -> ExitStack:
        """Record the calls of the layers, for as long as the block lasts."""
        layers, tape = self.layers, self.tape
        with ExitStack() as stack:
            inside = layers.rewritten.values()
            hooks = watching(self.model, layers.watched, self.seen, tape, inside=inside)
            stack.enter_context(hooks)
            if self.layout.shared:
                stack.enter_context(spread(layers, self.layout.shared, tape.size))
            if layers.pools:
                stack.enter_context(pooling_by_channel(layers.pools))
            if torch.backends.cudnn.deterministic:
                stack.enter_context(inputs_by_convolution(layers.ruled.values()))
            return stack.pop_all()

    def forms(self, losses: Tensor) -> dict[str, list[GradientForm]]:
        """Per-example gradients by parameter name, of one backward pass of these losses.

        Raises NotByLayer if a layer was called a number of times that examples may have decided.
        """
        must_depend(losses)
        for name, times in self.calls.items():
            if self.is_alike and times != len(self.layout.calls.get(name, ())):
                raise NotByLayer(f"layer {name!r} is called a number of times that changes")
        with no_autocast(losses.device):  # a checkpoint sets its own
            return self.tape.forms(losses, self.names)

    def seen(self, name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A layer was called."""
        tape = self.tape
        if not tape.is_on:
            return
        number, self.calls[name] = self.calls[name], self.calls[name] + 1
        first = args[0] if args and isinstance(args[0], Tensor) else tensors((args, kwargs))[0]
        call = self._axes(name, number, first, out)
        if name in self.layers.rules:
            version = -1 if first.is_inference() else first._version
            seen = (first, first.detach(), version, call)
            tape.record(partial(self._build, name, layer, *seen), out)
        else:
            self._record_unruled(name, layer, args, kwargs, call, tensors(out))

    def _axes(self, name: str, number: int, first: Tensor, out: Any) -> CallAxes:
        """Example axes of a call that holds as many rows of every example as in the trial.

        Where examples do not have the shapes of the trial's, longer ones may have more rows if the
        trial saw a flattened batch. Rows that lie otherwise would be given to another example.
        """
        known, size = self.layout.calls.get(name, ()), self.tape.size
        call = known[number] if number < len(known) else self.layout.call_beyond(name)
        for t, axes, many in (
            (first, call.inputs, call.input_rows),
            (out, call.outputs, call.output_rows),
        ):
            if not isinstance(t, Tensor):
                continue
            found = t.shape[axes[0] or 0] if t.shape else 0
            if found != size * many and (many == 1 or self.is_alike or found % size):
                raise NotByLayer(f"layer {name!r} sees its examples in another way than before")
        return call

    def _build(
        self,
        name: str,
        layer: nn.Module,
        given: Tensor,
        a: Tensor,
        version: int,
        call: CallAxes,
        g: Tensor,
    ) -> Found:
        """What the gradient at the output says about the parameters of a layer."""
        if version != -1 and given._version != version:
            raise NotByLayer(f"the input of layer {name!r} is changed in place after it")
        lead, back = call.inputs[0] or 0, call.outputs[0] or 0
        a = a.resolve_neg()  # compiled loops and kernels read memory, where no sign is
        a = a if lead == 0 else a.movedim(lead, 0)
        g = g if back == 0 else g.movedim(back, 0)
        found = self.layers.rules[name](layer, a, g, self.tape.size)
        own: list[tuple[Tensor, GradientForm]] = []
        for key, form in found.items():
            parameter = layer._parameters.get(key)
            if parameter is not None:
                own.append((parameter, form))
        return own

    def _record_unruled(
        self,
        name: str,
        layer: nn.Module,
        args: Any,
        kwargs: Any,
        call: CallAxes,
        outs: list[Tensor],
    ) -> None:
        """Ask for the gradients at the outputs of a layer, and write its own out from them."""
        axes = [d or 0 for t, d in zip(outs, call.outputs) if t.is_floating_point()]
        outs = [t for t in outs if t.is_floating_point()]
        reached = [t.requires_grad for t in outs]
        blanks = [torch.zeros_like(t) for t in outs]
        stamps, own = list(map(stamp, tensors((args, kwargs)))), self.layers.unruled(name)

        def build(*grads: Tensor | None) -> Found:
            if stamps != list(map(stamp, tensors((args, kwargs)))):
                raise NotByLayer(f"an input of {type(layer).__name__} is changed in place after it")
            given = iter(grads)
            full = [next(given) if is_in else None for is_in in reached]
            filled = [blank if g is None else g for g, blank in zip(full, blanks)]
            found = written_out(layer, args, kwargs, call.inputs, filled, axes, list(own))
            return [(own[key], DenseGradient(grad)) for key, grad in found.items()]

        if any(reached):
            self.tape.record(build, *(t for t in outs if t.requires_grad))


def written_out(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: Sequence[int | None],
    grads: Sequence[Tensor],
    out_axes: Sequence[int],
    names: Sequence[str],
) -> dict[str, Tensor]:
    """Gradient of some parameters of a layer without a rule for them, by name, [B, *shape].

    grad[b] = (∂ layer(x_b; θ)/∂θ)ᵀ g_b by vmap of the layer alone, which must be deterministic.
    """
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    values = [leaves[i].detach() for i in places]
    held = {name: p.detach() for name, p in layer.named_parameters()}
    params = {name: held[name] for name in names}

    def of_one(inputs: list[Tensor], own: list[Tensor]) -> dict[str, Tensor]:
        filled = list(leaves)
        for i, value, axis in zip(places, inputs, in_axes):
            filled[i] = value if axis is None else value.unsqueeze(axis)
        one_args, one_kwargs = tree_unflatten(filled, spec)

        def outputs(theta: dict[str, Tensor]) -> list[Tensor]:
            out = call_with(layer, {**held, **theta}, one_args, one_kwargs)
            return [t for t in tensors(out) if t.is_floating_point()]

        outs, pull = vjp(outputs, params)  # type: ignore[misc]
        lifted = [g.unsqueeze(axis).to(o.dtype) for g, axis, o in zip(own, out_axes, outs)]
        found: dict[str, Tensor] = pull(lifted)[0]
        return found

    with rewritten(layer, GradientTape(1, is_on=False)):
        mapped = torch.vmap(of_one, in_dims=(list(in_axes), list(out_axes)))(values, list(grads))
    return {name: wide(grad) for name, grad in mapped.items()}


def ghost_forms(
    model: nn.Module, loss_fn: Loss, batch: Batch, *, layers: Layers, layout: ExampleAxes
) -> tuple[dict[str, list[GradientForm]], Tensor]:
    """Per-example gradients as forms, by parameter name, and the losses.

    Raises NotByLayer where a layer sees its examples in another way than in the trial.
    """
    size, _, _, inner = shape_of(batch)
    names = {id(p): name for name, p in trainable(model).items()}
    one = RecordedPass(model, size=size, inner=inner, layers=layers, layout=layout, names=names)
    with restored(model, loss_fn), torch.enable_grad(), as_written(model), one.hooks():
        losses = batch_losses(model, loss_fn, batch, size=size)
        return one.forms(losses), losses.detach()


@dataclass(frozen=True)
class Reading:
    """How per-example gradients of a model are had: by rules in one pass over the whole batch, or,
    without a layout, by rules with the examples kept apart by vmap."""

    layers: Layers
    layout: ExampleAxes | None

    def forms(
        self, model: nn.Module, loss_fn: Loss, batch: Batch
    ) -> tuple[dict[str, list[GradientForm]], Tensor]:
        """Per-example gradients as forms, by parameter name, and the losses."""
        if self.layout is None:
            return isolated_forms(model, loss_fn, batch, layers=self.layers)
        return ghost_forms(model, loss_fn, batch, layers=self.layers, layout=self.layout)
