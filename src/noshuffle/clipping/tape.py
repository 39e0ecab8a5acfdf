"""What a run of the model leaves behind: where to read output gradients, and what to make of them.

`watching(model, layers, seen)` installs hooks for one run and takes them away again, so that no
state stays in the user's model. Each layer call is handed to `seen`; layers with a rewrite run it
in place of their own forward and write on the tape themselves. A `Site` is a point of the graph
whose gradient is wanted, with a function from that gradient to per-example gradients; the point is
held as a graph edge, so a later in-place change of the output does no harm.

>>> import torch
>>> tape = Tape(size=2); x = torch.ones(2, 1, requires_grad=True)
>>> tape.record(x * 3, lambda g: []); len(tape.sites)
1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from noshuffle.clipping.forms import Form
from noshuffle.clipping.rules import find_rewrite

Found = Sequence[tuple[Tensor, Form]]
Seen = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


@dataclass(frozen=True)
class Site:
    """Points of the graph, and what their gradients (None: not reached) say about parameters."""

    edges: tuple[GradientEdge, ...]
    build: Callable[[list[Tensor | None]], Found]


@dataclass
class Tape:
    """The sites of one run, in order; a tape with `is_on=False` stays empty."""

    size: int
    is_on: bool = True
    sites: list[Site] = field(default_factory=list)

    def record(self, out: Tensor, build: Callable[[Tensor], Found]) -> None:
        """Ask for the gradient at `out`."""
        if self.is_on and out.requires_grad:

            def only(grads: list[Tensor | None]) -> Found:
                return [] if grads[0] is None else build(grads[0])

            self.sites.append(Site((get_gradient_edge(out),), only))

    def forms(self, losses: Tensor, names: Mapping[int, str]) -> dict[str, list[Form]]:
        """One backward pass; forms by parameter name. `names` maps id(parameter) to its name."""
        self.is_on = False  # a checkpointed part runs again now, and must not be recorded twice
        edges = [edge for site in self.sites for edge in site.edges]
        found: dict[str, list[Form]] = {}
        if not edges or not losses.requires_grad:
            return found
        grads = torch.autograd.grad(losses, edges, torch.ones_like(losses), allow_unused=True)
        place = 0
        for site in self.sites:
            own: list[Tensor | None] = list(grads[place : place + len(site.edges)])
            place += len(site.edges)
            for parameter, form in site.build(own):
                name = names.get(id(parameter))
                if name is not None:
                    found.setdefault(name, []).append(form)
        return found


@contextmanager
def rewritten(model: nn.Module, tape: Tape) -> Iterator[None]:
    """Run layers that have a rewrite by it (recurrent layers have no vmap rule of their own)."""
    changed = []
    try:
        for layer in model.modules():
            fn = find_rewrite(layer)
            if fn is not None and "forward" not in layer.__dict__:
                layer.__dict__["forward"] = partial(fn, layer, tape)
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            layer.__dict__.pop("forward", None)


@contextmanager
def watching(
    model: nn.Module, layers: Mapping[str, nn.Module], seen: Seen, tape: Tape
) -> Iterator[None]:
    """Hand every call of `layers` to `seen`, for as long as the block lasts."""
    handles = []
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it would run past the layers' own calls
        for name, layer in layers.items():

            def hook(layer: nn.Module, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                seen(name, layer, args, kwargs, out)

            handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
        with rewritten(model, tape):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for handle in handles:
            handle.remove()
