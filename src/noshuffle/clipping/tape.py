"""What a run of the model leaves behind: where to read output gradients, and what to make of them.

`watching(model, layers, seen)` installs hooks for one run; layers with a rewrite run it in place of
their own forward and write on the tape themselves. A `Site` is a point of the graph whose gradient
is wanted, with a function from that gradient to per-example gradients, called as soon as it
arrives, so that only linear maps and embeddings keep theirs during the backward pass.

Autograd is asked only for the sites that have no other site behind them (`outermost`): no weight
gradient is computed.

>>> import torch
>>> tape = GradientTape(size=2); x = torch.ones(2, 1, requires_grad=True)
>>> tape.record(lambda g: [], x * 3); len(tape.sites)
1
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from noshuffle.clipping.forms import GradientForm
from noshuffle.clipping.forwards import forward_by
from noshuffle.clipping.rules import Rewrite, find_rewrite
from noshuffle.clipping.shared_copies import COPIES

Found = Sequence[tuple[Tensor, GradientForm]]
Seen = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
Build = Callable[..., Found]  # of one gradient, or of as many as were asked for


class Site:
    """Points of the graph, and what their gradients (None: not reached) say about parameters.

    `is_due`: the backward pass of the losses is under way. What arrives before is of one that the
    model makes in its own forward pass (a force as the gradient of an energy), and not for us.
    """

    __slots__ = ("__weakref__", "build", "edges", "found", "grads", "is_due", "missing")

    def __init__(self, edges: tuple[GradientEdge, ...], build: Build) -> None:
        self.edges = edges
        self.build: Build | None = build
        self.grads: list[Tensor | None] = [None] * len(edges)
        self.found: Found = ()
        self.missing = len(edges)
        self.is_due = False

    def finish(self) -> None:
        """Turn the gradients into forms, once, and keep nothing else."""
        if self.build is not None and self.missing < len(self.grads):
            found = []
            for parameter, form in self.build(*self.grads):
                if parameter.requires_grad:
                    found.append((parameter, form))
            self.found = found
        self.build, self.grads = None, []


@dataclass(eq=False)
class GradientTape:
    """The sites of one run, in order; a tape with `is_on=False` stays empty."""

    size: int
    is_on: bool = True
    sites: list[Site] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)

    def record(self, build: Build, *outs: Tensor) -> None:
        """Ask for the gradients at some tensors; either all of them require one or none does."""
        if not self.is_on or not outs[0].requires_grad:
            return
        site = Site(tuple(map(get_gradient_edge, outs)), build)
        self.sites.append(site)
        for place, out in enumerate(outs):
            # The graph must not hold the site, which holds the graph.
            hook: Any = partial(_arrived, ref(site), place)
            self.handles.append(out.register_hook(hook))  # type: ignore[no-untyped-call]

    def forms(self, losses: Tensor, names: Mapping[int, str]) -> dict[str, list[GradientForm]]:
        """One backward pass; forms by parameter name. `names` maps id(parameter) to its name."""
        self.is_on = False  # a checkpointed part runs again now, and must not be recorded twice
        found: dict[str, list[GradientForm]] = {}
        shared = COPIES.set({})
        for handle in self.handles:
            # A hook of the model (`h.register_hook(clamp)`) comes first: weights have what it
            # leaves. Torch reads hooks in the order in which they came into the dictionary.
            hooks = handle.hooks_dict_ref()
            if hooks is not None and len(hooks) > 1:
                hooks[handle.id] = hooks.pop(handle.id)
        try:
            self._backward(losses)
            for site in self.sites:
                if site.build is not None:
                    site.finish()
                for parameter, form in site.found:
                    name = names.get(id(parameter))
                    if name is not None:
                        found.setdefault(name, []).append(form)
        finally:  # let go of the graph
            COPIES.reset(shared)
            for handle in self.handles:
                handle.remove()
            self.handles, self.sites = [], []
        return found

    def _backward(self, losses: Tensor) -> None:
        edges: list[GradientEdge] = []
        for site in self.sites:
            edges += site.edges
            site.is_due = True
        ends = [edges[i] for i in outermost(losses, edges)]
        if ends:
            # Hooks are Python: to hand them to a GPU's own thread takes longer than it saves.
            with torch.autograd.set_multithreading_enabled(False):
                # of the sum: for given gradients torch first loads its compiler's shapes
                torch.autograd.grad(losses.sum(), ends, allow_unused=True)


def _arrived(site: ref[Site], place: int, grad: Tensor) -> None:
    """A gradient has arrived; a site with one point is done then."""
    at = site()
    if at is not None and at.is_due:
        at.grads[place] = grad.resolve_neg()
        at.missing -= 1
        if len(at.grads) == 1:
            at.finish()


def outermost(losses: Tensor, edges: Sequence[GradientEdge]) -> list[int]:
    """Numbers of the edges that the losses reach and that hide no other one from them."""
    if losses.grad_fn is None:
        return []
    wanted = {edge.node for edge in edges}
    hides: dict[Any, bool] = {}  # whether a wanted node lies strictly behind
    stack: list[tuple[Any, list[Any] | None]] = [(losses.grad_fn, None)]
    while stack:
        node, behind = stack.pop()
        if behind is not None:  # all behind it is known by now
            for after in behind:
                if after in wanted or hides[after]:
                    hides[node] = True
                    break
        elif node not in hides:
            hides[node], behind = False, []
            stack.append((node, behind))
            for after, _ in node.next_functions:
                if after is not None:
                    behind.append(after)
                    if after not in hides:
                        stack.append((after, None))
    return [i for i, edge in enumerate(edges) if not hides.get(edge.node, True)]


def rewritten(
    model: nn.Module, tape: GradientTape, *, only: Iterable[nn.Module] | None = None
) -> AbstractContextManager[None]:
    """Run layers that have a rewrite by it (recurrent layers have no vmap rule of their own)."""
    layers = model.modules() if only is None else only
    found = ((layer, find_rewrite(layer)) for layer in layers)
    return forward_by((own, partial(_on, fn, tape)) for own, fn in found if fn is not None)


def _on(fn: Rewrite, tape: GradientTape, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    given = (a.resolve_neg() if isinstance(a, Tensor) else a for a in args)
    return fn(layer, tape, *given, **kwargs)


@contextmanager
def watching(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    seen: Seen,
    tape: GradientTape,
    *,
    inside: Collection[nn.Module] | None = None,
) -> Iterator[None]:
    """Hand every call of `layers` to `seen`, for as long as the block lasts.

    `inside`: the layers with a rewrite, where they are known.
    """
    handles = []
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it would run past the layers' own calls
        for name, layer in layers.items():
            hook = partial(seen, name)
            handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
        with rewritten(model, tape, only=inside) if inside is None or inside else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for handle in handles:
            handle.remove()
