"""Per-example gradients of one batch as forms, read off one forward and one backward pass.

    forward   every layer's input a is kept
    backward  only the gradients g at layer outputs are asked for, no weight gradients
    forms     (a, g) of each layer by its rule: what its norms and its sums are made of (`forms`)

Nothing of size batch × model is written out, but for layers without a rule. What was found out
about the model beforehand (`layers`, the layout of its inputs, the route through its graph) is
given; `ghost` finds it out and checks it. State: what a route learns.

>>> from noshuffle.clipping.layers import find_layout, read
>>> from noshuffle.clipping.isolation_check import probe
>>> model, batch = nn.Linear(2, 3), (torch.randn(5, 2), torch.randint(3, (5,)))
>>> layers = read(model)
>>> with probe(model, nn.CrossEntropyLoss(), batch) as run:
...     layout = find_layout(model, layers, run)
>>> forms, losses = ghost_forms(model, nn.CrossEntropyLoss(), batch, layers=layers, layout=layout)
>>> sorted(forms), losses.shape
(['bias', 'weight'], torch.Size([5]))
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.clipping.check import trainable
from noshuffle.clipping.forms import Dense, Form
from noshuffle.clipping.inputs import as_written, cast_early, no_autocast
from noshuffle.clipping.layers import (
    Layers,
    Layout,
    NotByLayer,
    spread,
    tensors,
)
from noshuffle.clipping.objective import (
    BatchShape,
    Criterion,
    ModelLoss,
    batch_losses,
    must_depend,
    shape_of,
)
from noshuffle.clipping.pooling import pooling_by_channel
from noshuffle.clipping.tape import Found, Route, Tape, watching
from noshuffle.clipping.unruled_layers import record


def ghost_forms(
    model: nn.Module,
    loss_fn: Criterion | ModelLoss,
    batch: tuple[Any, ...],
    *,
    layers: Layers,
    layout: Layout,
    early: bool = False,
    route: Route | None = None,
    names: Mapping[int, str] | None = None,
    shape: BatchShape | None = None,
) -> tuple[dict[str, list[Form]], Tensor]:
    """Per-example gradients as forms, by parameter name, and the losses.

    `early`: norms are wanted of every example by itself, so take them as gradients arrive. A GPU
    then has other work in its queue, and does not wait for many small operations at the end.
    `route`: what an earlier run found out about the graph. `names`: the name of every trainable
    parameter by its id, where it is known, by somebody who lets compiled parts run as written.
    `shape`: that of the batch, where it is known.
    """
    size, _, _, inner = shape_of(batch) if shape is None else shape
    tape = Tape(size, route=route or Route())
    calls = dict.fromkeys(layers.watched, 0)
    is_alike = inner == layout.inner
    is_cast = False

    def seen(name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal is_cast
        if not tape.is_on:
            return
        call, calls[name] = calls[name], calls[name] + 1
        first = args[0] if args and isinstance(args[0], Tensor) else tensors((args, kwargs))[0]
        is_cast = is_cast or torch.is_autocast_enabled(first.device.type)
        ins, outs = layout.checked(name, call, first, out, size=size, is_alike=is_alike)
        rule = layers.rules.get(name)
        if rule is not None:
            a, before = first.detach(), -1 if first.is_inference() else first._version
            lead, back = ins[0] or 0, outs[0] or 0
            a = a if lead == 0 else a.movedim(lead, 0)
            once = early and layout.count(name) == 1

            def build(g: Tensor) -> Found:
                if before != -1 and first._version != before:
                    raise NotByLayer(f"the input of layer {name!r} is changed in place after it")
                kept: list[tuple[Tensor, Form]] = []
                for key, form in rule(
                    layer, a, g if back == 0 else g.movedim(back, 0), size
                ).items():
                    parameter = layer._parameters.get(key)
                    if parameter is None:
                        continue
                    kept.append((parameter, form))
                    if once and parameter.requires_grad and not isinstance(form, Dense):
                        _ = form.square
                return kept

            tape.record(out, build)
        else:
            record(tape, layer, args, kwargs, ins, tensors(out), outs)

    watch = watching(model, layers.watched, seen, tape, inside=layers.rewritten.values())
    write = as_written(model) if names is None else nullcontext()
    cast = cast_early(layers.ruled.values()) if tape.route.is_cast else nullcontext()
    lay = spread(layers, layout.shared, size) if layout.shared else nullcontext()
    pool = pooling_by_channel(layers.pools) if layers.pools else nullcontext()
    with torch.enable_grad(), write, watch, cast, lay, pool:
        losses = batch_losses(model, loss_fn, batch, size=size)
        if not losses.requires_grad:
            must_depend(losses)
        for name, times in calls.items():
            if is_alike and times != len(
                layout.inputs.get(name, ())
            ):  # who decided? perhaps another example
                raise NotByLayer(f"layer {name!r} is called a number of times that changes")
        tape.route.is_cast = is_cast
        if names is None:
            names = {id(p): name for name, p in trainable(model).items()}
        if not torch.is_autocast_enabled(losses.device.type):
            return tape.forms(losses, names), losses.detach()
        with no_autocast(losses.device):  # a checkpoint sets its own
            return tape.forms(losses, names), losses.detach()
