"""Per-example gradients of one batch as forms, read off one forward and one backward pass.

    forward   every layer's input a is kept
    backward  only the gradients g at layer outputs are asked for, no weight gradients
    forms     (a, g) of each layer by its rule: what its norms and its sums are made of (`forms`)

Nothing of size batch × model is written out, but for layers without a rule. `ghost` finds out about
the model beforehand (`layers`, layout, route) and checks it. State: what a route learns.

>>> from noshuffle.clipping.layers import find_layout, read
>>> from noshuffle.clipping.trial_runs import probe
>>> model, batch = nn.Linear(2, 3), (torch.randn(5, 2), torch.randint(3, (5,)))
>>> layers = read(model)
>>> layout = find_layout(model, layers, probe(model, nn.CrossEntropyLoss(), batch))
>>> forms, losses = ghost_forms(model, nn.CrossEntropyLoss(), batch, layers=layers, layout=layout)
>>> sorted(forms), losses.shape
(['bias', 'weight'], torch.Size([5]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.utils._pytree import tree_flatten, tree_unflatten

from noshuffle.clipping.check import as_written, trainable
from noshuffle.clipping.conv_input import inputs_by_convolution
from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient
from noshuffle.clipping.kept_inputs import cast_early, ordered_early
from noshuffle.clipping.layers import (
    CallAxes,
    ExampleAxes,
    Layers,
    NotByLayer,
    spread,
    stamp,
    tensors,
)
from noshuffle.clipping.objective import Batch, Loss, batch_losses, must_depend, shape_of
from noshuffle.clipping.pooling import pooling_by_channel
from noshuffle.clipping.products import no_autocast, wide
from noshuffle.clipping.stateless import call_with
from noshuffle.clipping.tape import Found, GradientTape, Route, rewritten, watching


class RecordedPass:
    """One forward pass whose layers are recorded, and the backward pass that reads their gradients.

        with recorded.hooks():
            losses = …                    # one number per example, of one forward pass
            forms = recorded.forms(losses)

    The block may end behind the forward pass and be entered again for `forms`: a checkpointed part
    runs once more there. `names`: the name of every trainable parameter by its id. For the other
    options see `ghost_forms`.
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
        early: bool = False,
        route: Route | None = None,
    ) -> None:
        self.model, self.layers, self.layout, self.names = model, layers, layout, names
        self.tape = GradientTape(size, route=route or Route())
        self.is_alike = tuple(inner) == layout.inner[: len(inner)]
        self.early, self.is_cast = early, False
        self.calls = dict.fromkeys(layers.watched, 0)
        self.read: list[tuple[str, Tensor, int]] = []  # what norms were taken of, as it was then

    def hooks(self) -> ExitStack:
        """Record the calls of the layers, for as long as the block lasts."""
        layers, tape = self.layers, self.tape
        with ExitStack() as stack:
            how: dict[str, Any] = {"inside": layers.rewritten.values()}
            stack.enter_context(watching(self.model, layers.watched, self.seen, tape, **how))
            if tape.route.is_cast:
                stack.enter_context(cast_early(layers.ruled.values()))
            if layers.norms:
                stack.enter_context(ordered_early(layers.norms))
            if self.layout.shared:
                stack.enter_context(spread(layers, self.layout.shared, tape.size))
            if layers.pools:
                stack.enter_context(pooling_by_channel(layers.pools))
            if torch.backends.cudnn.deterministic:
                stack.enter_context(inputs_by_convolution(layers.ruled.values()))
            return stack.pop_all()

    def forms(self, losses: Tensor, asked: Tensor | None = None) -> dict[str, list[GradientForm]]:
        """Per-example gradients by parameter name, of one backward pass of these losses."""
        if not losses.requires_grad:
            must_depend(losses)
        for name, times in self.calls.items():
            if self.is_alike and times != len(self.layout.calls.get(name, ())):
                raise NotByLayer(f"layer {name!r} is called a number of times that changes")
        self.tape.route.is_cast = self.is_cast
        with no_autocast(losses.device):  # a checkpoint sets its own
            read = losses if asked is None else losses[asked.to(losses.device)]
            forms = self.tape.forms(read, self.names)
            if self.read:
                self.check_read()
        return forms

    def seen(self, name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """A layer was called."""
        tape = self.tape
        if not tape.is_on:
            return
        number, self.calls[name] = self.calls[name], self.calls[name] + 1
        first = args[0] if args and isinstance(args[0], Tensor) else tensors((args, kwargs))[0]
        self.is_cast = self.is_cast or torch.is_autocast_enabled(first.device.type)
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
        is_alone = self.early and len(self.layout.calls.get(name, ())) == 1
        kept: list[tuple[Tensor, GradientForm]] = []
        for key, form in self.layers.rules[name](layer, a, g, self.tape.size).items():
            parameter = layer._parameters.get(key)
            if parameter is not None:
                kept.append((parameter, form))
                if is_alone and parameter.requires_grad and not isinstance(form, DenseGradient):
                    if type(form) is not OuterGradient or form.a.shape[1] != 1:
                        _ = form.square  # those are taken together (`take_squares_of_rows`)
                    of = [t for t in vars(form).values() if isinstance(t, Tensor)]
                    self.read += [(name, t, stamp(t)) for t in of]
        return kept

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

    def check_read(self) -> None:
        """Raise if something was written to after its norm was taken: the sum reads it anew."""
        for name, t, then in self.read:
            if stamp(t) != then:
                raise NotByLayer(f"the gradient at layer {name!r} is changed in place by a hook")
        self.read = []


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
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    *,
    layers: Layers,
    layout: ExampleAxes,
    early: bool = False,
    route: Route | None = None,
    names: Mapping[int, str] | None = None,
    asked: Tensor | None = None,
) -> tuple[dict[str, list[GradientForm]], Tensor]:
    """Per-example gradients as forms, by parameter name, and the losses.

    `early`: norms are wanted of every example by itself, so take them as gradients arrive. A GPU
    then has other work in its queue, and does not wait for many small operations at the end.
    `route`: what an earlier run found out about the graph. `names`: the name of every trainable
    parameter by its id, where it is known, by somebody who lets compiled parts run as written.
    `asked`: the examples whose losses have their gradient taken, if not all (`row_check`).
    """
    size, _, _, inner = shape_of(batch)
    write = as_written(model) if names is None else nullcontext()
    if names is None:
        names = {id(p): name for name, p in trainable(model).items()}
    how: dict[str, Any] = {"layers": layers, "layout": layout, "early": early, "route": route}
    recorded = RecordedPass(model, size=size, inner=inner, names=names, **how)
    with torch.enable_grad(), write, recorded.hooks():
        losses = batch_losses(model, loss_fn, batch, size=size)
        return recorded.forms(losses, asked), losses.detach()
