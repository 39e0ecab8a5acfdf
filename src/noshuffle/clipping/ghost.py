"""Clipping without per-example gradients: one forward and one backward pass.

    forms     inputs a and output gradients g of every layer, of one pass (`ghost_forms`)
    norms     from (a, g) of each layer by its rule, added over layers
    sum       Σ_b f_b g_b a_bᵀ, one ordinary weight gradient per layer with the factors inside

(book-keeping: Bu, Wang, Zha, Karypis 2023.) Layers without a rule have their own gradients written
out. A model is tried on two examples against plain autograd, once per kind of input; one that fails
goes to `PerExample` as a whole. `fallbacks` and `why` say so. Only the first batch of a kind is
tried.

State: what was found out about each model, and the log `fallbacks`; nothing in the model.

>>> import torch
>>> from noshuffle.clipping.factor import Flat
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
>>> x, y = torch.randn(5, 2), torch.randint(3, (5,))
>>> engine = Ghost()
>>> got = engine.clipped_sum(model, torch.nn.CrossEntropyLoss(), (x, y), clip=Flat(1.0))
>>> sorted(got.values), engine.fallbacks
(['0.bias', '0.weight', '2.bias', '2.weight'], [])
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from noshuffle.clipping import check
from noshuffle.clipping.factor import Clip, ClippedSum
from noshuffle.clipping.ghost_forms import ghost_forms
from noshuffle.clipping.layers import ExampleAxes, Layers, NotByLayer, NotNow, read
from noshuffle.clipping.microbatches import MODES, Chosen, choose_parts, in_parts
from noshuffle.clipping.objective import (
    Batch,
    BatchShape,
    Loss,
    cuttable,
    identity_of,
    is_rowwise,
    shape_of,
    take,
)
from noshuffle.clipping.per_example import REDUCTIONS, PerExample, empty_sum
from noshuffle.clipping.products import exactly, full_precision
from noshuffle.clipping.rule_trial import batch_tried, readings
from noshuffle.clipping.snapshot import Snapshot
from noshuffle.clipping.statefulness import Findings, put_back_after
from noshuffle.clipping.tape import Route, RouteIncomplete
from noshuffle.clipping.trial_runs import with_same_rng
from noshuffle.clipping.units import WHOLE, SumPart, by_unit, finish, members
from noshuffle.errors import one_of
from noshuffle.triton_shim import is_capturing

#: How many states of one model (modes, layers added) are remembered.
SHOTS = 16


@dataclass
class _Known:
    """What the trial of a model said, and the parts that batches of a size are cut into."""

    layers: Layers | None = None
    layout: ExampleAxes | None = None
    reason: str | None = None
    findings: Findings = field(default_factory=Findings)  # what its runs may change
    parts: dict[tuple[int, int], Chosen] = field(default_factory=dict)
    whole: tuple[int, int] = (0, 0)  # size and entries of the last batch that a CPU took at once
    route: Route = field(default_factory=Route)


@dataclass
class Ghost:
    """Clip by layer rules in one backward pass; `microbatch` is used only when it cannot."""

    microbatch: int | None = None
    why: str = "norms from layer rules in one backward pass: nothing of size batch × model"
    fallbacks: list[str] = field(default_factory=list)
    mode: str = "auto"

    def __post_init__(self) -> None:
        one_of(MODES, mode=self.mode)
        self._known: WeakKeyDictionary[nn.Module, dict[Any, _Known]] = WeakKeyDictionary()
        self._shots: WeakKeyDictionary[nn.Module, list[Snapshot]] = WeakKeyDictionary()
        self._reason = self.why
        self._written_out = PerExample(self.microbatch, fallbacks=self.fallbacks)

    def clipped_sum(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        *,
        clip: Clip,
        units: Tensor | None = None,
        reduce: str = "sum",
        weights: Tensor | None = None,
    ) -> ClippedSum:
        """Σ over units of the clipped gradient; see `finish` for what is guaranteed."""
        if reduce not in REDUCTIONS:
            one_of(REDUCTIONS, reduce=reduce)
        if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            model = check.original(model)
            self._written_out.say(check.UNCOMPILED)
        shot = self._snapshot(model)
        batch = cuttable(batch)
        shape = shape_of(batch)
        if shape.size == 0:
            return empty_sum(shot.like, clip=clip, device=shot.device)
        if units is not None or weights is not None:
            members(units, weights, size=shape.size, device=shot.device)  # refuses before any work
        known = self._try(model, loss_fn, batch, shot, shape=shape)
        whose: dict[str, Any] = {"clip": clip, "units": units, "reduce": reduce, "weights": weights}
        if known.layers is not None:
            try:
                return self._by_layers(model, loss_fn, batch, shape, shot, known, **whose)
            except NotByLayer as reason:
                self._write_out(known, reason)
            except RuntimeError as error:
                check.refuse_reentrant(error)
                raise
        engine = self._written_out
        if known.reason is not None:
            self.why = f"{engine.why} ({known.reason})"
        with check.as_written(model):
            return engine.clipped_sum(model, loss_fn, batch, **whose)

    def rules_for(self, model: nn.Module, loss_fn: Loss, batch: Batch) -> tuple[Snapshot, _Known]:
        """The model as it is, and its layer rules for batches of this kind; tried at the first one.

        For a forward pass of the caller's own (`ghost_forms.RecordedPass`).
        """
        shot = self._snapshot(model)
        return shot, self._try(model, loss_fn, batch, shot)

    def _by_layers(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        shape: BatchShape,
        shot: Snapshot,
        known: _Known,
        *,
        clip: Clip,
        units: Tensor | None,
        reduce: str,
        weights: Tensor | None,
    ) -> ClippedSum:
        """The clipped sum by layer rules; raises NotByLayer if they turn out not to hold."""
        layers = known.layers
        assert layers is not None

        def one(
            rows: Batch, units: Tensor | None, weights: Tensor | None, part: SumPart = WHOLE
        ) -> ClippedSum:
            """That of some rows, from one forward and one backward pass."""
            is_alone = units is None and weights is None
            options: dict[str, Any] = {"layers": layers, "layout": known.layout}
            options |= {"names": shot.names, "early": device.type == "cuda" and is_alone}
            with check.as_written(model) if shot.is_compiled else nullcontext():
                try:
                    forms, losses = ghost_forms(model, loss_fn, rows, **options, route=known.route)
                except RouteIncomplete:
                    forms, losses = ghost_forms(model, loss_fn, rows, **options)
            who = members(units, weights, size=len(losses), device=device)
            with exactly(device):  # what is written out or added up here is not rounded
                for name, own in forms.items():
                    if not is_alone or len(own) > 1:
                        forms[name] = by_unit(own, who, reduce=reduce)
                return finish(forms, shot.like, losses, who, clip=clip, part=part)

        def small(count: int) -> None:
            with with_same_rng(model):
                one(take(batch, slice(count)), None, None)

        device, findings = shot.device, known.findings
        trial = partial(put_back_after, model)
        kind, chosen = (shape.size, shape.entries), None
        if known.whole != kind:
            chosen = choose_parts(
                known.parts, self.mode, shape, device=device, run=small, trial=trial, say=self._tell
            )
            is_whole = chosen.parts == 1 and chosen.need is None and device.type == "cpu"
            known.whole = kind if is_whole else (0, 0)
        watch: Any = nullcontext()
        if not is_capturing(device):
            reconsider = partial(self._written_out.reconsider, model, loss_fn, batch)
            watch = shot.watch.around(findings, partial(reconsider, in_batches=True))
        may_repeat = not findings.may_change
        with watch:
            if chosen is None:
                return one(batch, units, weights)
            return in_parts(
                one, batch, units, weights, chosen=chosen, device=device, may_repeat=may_repeat
            )

    def _tell(self, words: str) -> None:
        self.why = f"{self._reason}; {words}"

    def _snapshot(self, model: nn.Module) -> Snapshot:
        """The model as it is now; raises if it couples examples."""
        shots = self._shots.setdefault(model, [])
        for shot in shots:
            if shot.holds(model):
                shot.check()
                return shot
        shots.insert(0, Snapshot(model))
        for old in shots[SHOTS:]:  # it will be tried anew if it ever comes back
            known = self._known.get(model, {})
            for key in [key for key in known if key[1] is old]:
                del known[key]
        del shots[SHOTS:]
        return shots[0]

    def _try(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        shot: Snapshot,
        *,
        shape: BatchShape | None = None,
    ) -> _Known:
        """Look a model up, or find out about it."""
        shape = shape or shape_of(batch)
        # Of a module the class is what identifies its code.
        is_module = isinstance(loss_fn, nn.Module)
        key = (shape.kinds, shot, (type(loss_fn), False) if is_module else identity_of(loss_fn))
        seen = self._known.setdefault(model, {})
        if key in seen:
            return seen[key]
        if shape.size == 1:  # one example cannot show whether examples mix
            return _Known()
        in_batches = is_rowwise(loss_fn)
        findings = self._written_out.check_state(model, loss_fn, batch, in_batches=in_batches)
        try:
            with put_back_after(model), full_precision():
                known = self._find_out(model, loss_fn, batch)
        except NotNow as reason:
            self._written_out.say(f"one batch written out per example: {reason}")
            return _Known()
        except NotByLayer as reason:
            self._write_out(known := _Known(), reason)
        except RuntimeError as error:
            check.refuse_reentrant(error)
            raise
        known.findings = findings
        seen[key] = known
        return known

    def _write_out(self, known: _Known, reason: NotByLayer) -> None:
        """Have the whole model written out per example from here on, and say why."""
        known.layers, known.reason = None, str(reason)
        self._written_out.say(f"whole model written out per example: {reason}")

    def _find_out(self, model: nn.Module, loss_fn: Loss, batch: Batch) -> _Known:
        """What a trial of the layer rules says; raises NotByLayer where they do not hold."""
        if not is_rowwise(loss_fn):
            raise NotByLayer("a ModelLoss without by_row=True is one number for one example")
        if check.is_compiled(model):
            self._written_out.say(check.UNCOMPILED)
        layers, layout = readings(model, loss_fn, batch)
        for name, layer in layers.unruled_layers.items():
            which = f"layer {name!r} ({type(layer).__name__})"
            if name in layers.split:
                own = ", ".join(layers.unruled(name))
                self._written_out.say(f"{which} has no rule: its {own} written out per example")
            else:
                self._written_out.say(f"{which} has no rule: written out per example")
        batch_tried(model, loss_fn, batch, layers, layout)
        return _Known(layers, layout)


def auto(
    model: nn.Module, *, microbatch: int | None = None, mode: str = "auto"
) -> Ghost | PerExample:
    """The engine for a model; `.why` is the reason in words; `mode`: see `microbatches`.

    Writing gradients out costs memory and time in proportion to batch × parameters; it is what is
    left where most parameters are in layers without a rule, or outside any layer.
    """
    model = check.original(model)
    check.validate(model)
    count = sum(p.numel() for p in check.trainable(model).values())
    try:
        layers = read(model)
        unruled = [p for name in layers.unruled_layers for p in layers.unruled(name).values()]
        if sum(p.numel() for p in unruled) > count // 2:
            kinds = {type(layer).__name__ for layer in layers.unruled_layers.values()}
            named = ", ".join(sorted(kinds))
            raise NotByLayer(f"most parameters are in layers without a rule ({named})")
    except NotByLayer as reason:
        note = f"whole model written out per example: {reason}"
        return PerExample(microbatch, why=note, fallbacks=[note])
    ruled = sorted({type(m).__name__ for m in (*layers.ruled.values(), *layers.rewritten.values())})
    why = f"{count:,} parameters with layer rules for {', '.join(ruled)}"
    return Ghost(microbatch, why=why, mode=mode)
