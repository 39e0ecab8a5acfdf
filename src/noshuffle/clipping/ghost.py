"""Clipping without per-example gradients: one forward and one backward pass.

    forward   every layer's input a is kept
    backward  only the gradients g at layer outputs are asked for, no weight gradients
    norms     from (a, g) of each layer by its rule, added over layers
    sum       Σ_b f_b g_b a_bᵀ, one ordinary weight gradient per layer with the factors inside

(book-keeping: Bu, Wang, Zha, Karypis 2023.) Layers without a rule have their own gradients
written out and are named in `fallbacks`. Before a model is trusted it is tried on two examples
against plain autograd, once per kind of input; one that fails (parameters used outside their
layers, examples that mix) goes to `PerExample` as a whole, and `fallbacks` says why.

State: what was found out about each model, and the log `fallbacks`; nothing in the model.

>>> import torch
>>> from noshuffle.clipping.clipped import Flat
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
>>> x, y = torch.randn(5, 2), torch.randint(3, (5,))
>>> engine = Ghost()
>>> got = engine.clipped_sum(model, torch.nn.CrossEntropyLoss(), (x, y), clip=Flat(1.0))
>>> sorted(got.values), engine.fallbacks
(['0.bias', '0.weight', '2.bias', '2.weight'], [])
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from noshuffle.clipping.check import original, trainable, validate
from noshuffle.clipping.clipped import Clip, ClippedSum
from noshuffle.clipping.forms import Dense, Form
from noshuffle.clipping.layers import (
    Layers,
    Layout,
    NotByLayer,
    NotNow,
    find_layout,
    read,
    spread,
    tensors,
)
from noshuffle.clipping.members import by_unit, finish, members
from noshuffle.clipping.objective import (
    Criterion,
    ModelLoss,
    batch_losses,
    batch_size,
    is_rowwise,
)
from noshuffle.clipping.opaque import written_out
from noshuffle.clipping.per_example import PerExample, empty_sum
from noshuffle.clipping.rules import find_rule
from noshuffle.clipping.tape import Found, Site, Tape, watching
from noshuffle.clipping.trial import probe, tried
from noshuffle.errors import one_of


def ghost_forms(
    model: nn.Module,
    loss_fn: Criterion | ModelLoss,
    batch: tuple[Any, ...],
    *,
    layers: Layers,
    layout: Layout,
) -> tuple[dict[str, list[Form]], Tensor]:
    """Per-example gradients as forms, by parameter name, and the losses."""
    size = batch_size(batch)
    tape = Tape(size)
    calls = dict.fromkeys(layers.watched, 0)

    def seen(name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if not tape.is_on:
            return
        ins, outs = layout.axes(name, calls[name])
        calls[name] += 1
        if name in layers.ruled:
            rule, a = find_rule(layer), tensors((args, kwargs))[0].detach()
            lead, back = ins[0] or 0, outs[0] or 0
            a = a if lead == 0 else a.movedim(lead, 0)

            def build(g: Tensor) -> Found:
                assert rule is not None
                found = rule(layer, a, g if back == 0 else g.movedim(back, 0), size)
                own = layer._parameters
                return [(own[n], form) for n, form in found.items() if own.get(n) is not None]  # type: ignore[misc]

            tape.record(out, build)
        else:
            _record_opaque(tape, layer, args, kwargs, ins, tensors(out), outs)

    watch = watching(model, layers.watched, seen, tape)
    with torch.enable_grad(), watch, spread(layers, layout.shared, size):
        losses = batch_losses(model, loss_fn, batch)
    names = {id(p): name for name, p in trainable(model).items()}
    return tape.forms(losses, names), losses.detach()


def _record_opaque(
    tape: Tape, layer: nn.Module, args: Any, kwargs: Any, ins: Any, outs: list[Tensor], axes: Any
) -> None:
    floating = [(t, axis) for t, axis in zip(outs, axes) if t.is_floating_point()]
    if not any(t.requires_grad for t, _ in floating):
        return
    reached = [t.requires_grad for t, _ in floating]
    blanks = [torch.zeros_like(t) for t, _ in floating]
    edges = tuple(get_gradient_edge(t) for t, _ in floating if t.requires_grad)

    def build(grads: list[Tensor | None]) -> Found:
        given = iter(grads)
        full = [next(given) if is_in else None for is_in in reached]
        filled = [blank if g is None else g for g, blank in zip(full, blanks)]
        found = written_out(layer, args, kwargs, ins, filled, [axis for _, axis in floating])
        own = dict(layer.named_parameters())
        return [(own[name], Dense(grad)) for name, grad in found.items()]

    tape.sites.append(Site(edges, build))


@dataclass
class _Known:
    """What the trial of a model said."""

    layers: Layers | None
    layout: Layout | None
    reason: str | None = None


@dataclass
class Ghost:
    """Clip by layer rules in one backward pass; `microbatch` is used only when it cannot."""

    microbatch: int | None = None
    why: str = "norms from layer rules in one backward pass: nothing of size batch × model"
    fallbacks: list[str] = field(default_factory=list)
    _known: WeakKeyDictionary[nn.Module, dict[Any, _Known]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    def clipped_sum(
        self,
        model: nn.Module,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        clip: Clip,
        units: Tensor | None = None,
        reduce: str = "sum",
        weights: Tensor | None = None,
    ) -> ClippedSum:
        """Σ over units of the clipped gradient; see `finish` for what is guaranteed."""
        one_of(("sum", "mean"), reduce=reduce)
        model = original(model)
        validate(model)
        like = trainable(model)
        size = batch_size(batch)
        device = next(iter(like.values())).device
        if size == 0:
            return empty_sum(like, clip=clip, device=device)
        known = self._try(model, loss_fn, batch)
        forms = None
        if known.layers is not None and known.layout is not None:
            try:
                forms, losses = ghost_forms(
                    model, loss_fn, batch, layers=known.layers, layout=known.layout
                )
            except NotByLayer as reason:
                known.layers, known.reason = None, str(reason)
                self._say(f"whole model written out per example: {reason}")
        if forms is None:
            engine = PerExample(self.microbatch, fallbacks=self.fallbacks)
            return engine.clipped_sum(
                model, loss_fn, batch, clip=clip, units=units, reduce=reduce, weights=weights
            )
        who = members(units, weights, size=size, device=device)
        grouped = {name: by_unit(own, who, reduce=reduce) for name, own in forms.items()}
        return finish(grouped, like, losses, who, clip=clip)

    def _say(self, note: str) -> None:
        if note not in self.fallbacks:
            self.fallbacks.append(note)

    def _try(
        self, model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]
    ) -> _Known:
        """Look a model up, or find out about it."""
        kinds = tuple(
            (leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in tree_leaves(batch)
        )
        modes = tuple(m.training for m in model.modules())
        key = (kinds, modes, tuple(trainable(model)), _identity(loss_fn))
        seen = self._known.setdefault(model, {})
        if key in seen:
            return seen[key]
        if batch_size(batch) == 1:  # one example cannot show whether examples mix
            return _Known(None, None)
        try:
            seen[key] = self._find_out(model, loss_fn, batch)
        except NotNow as reason:
            self._say(f"one batch written out per example: {reason}")
            return _Known(None, None)
        return seen[key]

    def _find_out(
        self, model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]
    ) -> _Known:
        try:
            if not is_rowwise(loss_fn):
                raise NotByLayer("a ModelLoss without by_row=True is one number for one example")
            layers = read(model)
            with probe(model, loss_fn, batch) as run:
                layout = find_layout(model, layers, run)
            tried(
                model,
                loss_fn,
                batch,
                lambda rows: ghost_forms(model, loss_fn, rows, layers=layers, layout=layout)[0],
            )
        except NotNow:
            raise
        except NotByLayer as reason:
            self._say(f"whole model written out per example: {reason}")
            return _Known(None, None, str(reason))
        for name, layer in layers.opaque.items():
            self._say(
                f"layer {name!r} ({type(layer).__name__}) has no rule: written out per example"
            )
        return _Known(layers, layout)


def _identity(loss_fn: Criterion | ModelLoss) -> Any:
    """A key for the kind of loss that does not keep it alive; a fresh lambda each step is alike."""
    fn = loss_fn.fn if isinstance(loss_fn, ModelLoss) else loss_fn
    return getattr(fn, "__code__", type(fn)), type(loss_fn)
