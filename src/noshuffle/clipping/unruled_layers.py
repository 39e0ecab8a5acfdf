"""Per-example gradients of one layer without a rule: vmap of that layer alone.

The layer, which must be deterministic, is run again on its recorded inputs, one example at a time,
and pulled back from its recorded output gradients, for its own parameters only:

    grad[b] = (∂ layer(x_b; θ)/∂θ)ᵀ g_b

>>> import torch
>>> layer, x, g = torch.nn.PReLU(), -torch.ones(3, 2), torch.ones(3, 2)
>>> written_out(layer, (x,), {}, (0,), [g], (0,))["weight"].flatten()
tensor([-2., -2., -2.])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp
from torch.utils._pytree import tree_flatten, tree_unflatten

from noshuffle.clipping.forms import DenseGradient
from noshuffle.clipping.layers import NotByLayer, stamp, tensors
from noshuffle.clipping.products import wide
from noshuffle.clipping.stateless import call_with
from noshuffle.clipping.tape import Found, GradientTape, rewritten


def written_out(
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_axes: Sequence[int | None],
    grads: Sequence[Tensor],
    out_axes: Sequence[int],
) -> dict[str, Tensor]:
    """Gradient of every trainable parameter of `layer`, by its name there, [B, *shape]."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    values = [leaves[i].detach() for i in places]
    params = {n: p.detach() for n, p in layer.named_parameters() if p.requires_grad}

    def of_one(inputs: list[Tensor], own: list[Tensor]) -> dict[str, Tensor]:
        filled = list(leaves)
        for i, value, axis in zip(places, inputs, in_axes):
            filled[i] = value if axis is None else value.unsqueeze(axis)
        one_args, one_kwargs = tree_unflatten(filled, spec)

        def outputs(theta: dict[str, Tensor]) -> list[Tensor]:
            out = call_with(layer, theta, one_args, one_kwargs)
            return [t for t in tensors(out) if t.is_floating_point()]

        outs, pull = vjp(outputs, params)  # type: ignore[misc]
        lifted = [g.unsqueeze(axis).to(o.dtype) for g, axis, o in zip(own, out_axes, outs)]
        found: dict[str, Tensor] = pull(lifted)[0]
        return found

    with rewritten(layer, GradientTape(1, is_on=False)):
        mapped = torch.vmap(of_one, in_dims=(list(in_axes), list(out_axes)))(values, list(grads))
    return {name: wide(grad) for name, grad in mapped.items()}


def record(
    tape: GradientTape,
    layer: nn.Module,
    args: Any,
    kwargs: Any,
    ins: Any,
    outs: list[Tensor],
    axes: Any,
) -> None:
    """Ask for the gradients at the outputs of a layer, and write its own out from them."""
    floating = [(t, axis) for t, axis in zip(outs, axes) if t.is_floating_point()]
    if not any(t.requires_grad for t, _ in floating):
        return
    reached = [t.requires_grad for t, _ in floating]
    blanks = [torch.zeros_like(t) for t, _ in floating]
    stamps = list(map(stamp, tensors((args, kwargs))))

    def build(*grads: Tensor | None) -> Found:
        if stamps != list(map(stamp, tensors((args, kwargs)))):
            raise NotByLayer(f"an input of {type(layer).__name__} is changed in place after it")
        given = iter(grads)
        full = [next(given) if is_in else None for is_in in reached]
        filled = [blank if g is None else g for g, blank in zip(full, blanks)]
        found = written_out(layer, args, kwargs, ins, filled, [axis for _, axis in floating])
        own = dict(layer.named_parameters())
        return [(own[name], DenseGradient(grad)) for name, grad in found.items()]

    tape.record(build, *(t for t, _ in floating if t.requires_grad))
