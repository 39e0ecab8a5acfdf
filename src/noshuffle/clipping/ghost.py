"""Clipping without per-example gradients: one forward and one backward pass.

    forms     inputs a and output gradients g of every layer, of one pass (`ghost_forms`)
    norms     from (a, g) of each layer by its rule, added over layers
    sum       Σ_b f_b g_b a_bᵀ, one ordinary weight gradient per layer with the factors inside

(book-keeping: Bu, Wang, Zha, Karypis 2023.) Layers without a rule have their own gradients written
out. A model is tried at the first batch of a kind (`trial`): mode, structure and types of the
batch, trainable names, loss. One that fails goes to `PerExample`, which keeps examples apart by
vmap; `fallbacks`, `why` and one warning say so. With `isolate` examples are kept apart by vmap from
the start, and the layer rules clip as ever.

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

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from noshuffle.clipping import check
from noshuffle.clipping.factor import Clip, ClippedSum
from noshuffle.clipping.ghost_forms import Reading
from noshuffle.clipping.layers import NotByLayer, read
from noshuffle.clipping.microbatches import MODES, Chosen, choose_parts, in_parts
from noshuffle.clipping.objective import (
    Batch,
    BatchShape,
    Loss,
    cuttable,
    identity_of,
    is_rowwise,
    is_vmap_limit,
    shape_of,
    take,
)
from noshuffle.clipping.per_example import REDUCTIONS, PerExample, empty_sum
from noshuffle.clipping.products import exactly
from noshuffle.clipping.trial import rules_hold, same_rng, trial
from noshuffle.clipping.units import by_unit, finish, members
from noshuffle.errors import ProbablyNotMeant, one_of
from noshuffle.user_warnings import warn_user

#: How many states of one model (modes, layers added, losses) are remembered.
MOST_KINDS = 16
#: Rows of a trial at least: what mixes large batches only does nothing to few. A batch that is a
#: part of the planned size is filled up to `MOST_MADE_UP` or twice its own.
LEAST, MOST_MADE_UP = 16, 64


@dataclass
class _Known:
    """What was found out about one kind of batch: how to clip it, or why it is written out."""

    reading: Reading | None = None
    reason: str = ""
    alive: tuple[Any, ...] = ()  # what the kind is known by, so that no other object has its id
    parts: dict[tuple[int, int], Chosen] = field(default_factory=dict)


@dataclass
class Ghost:
    """Clip by layer rules in one backward pass; `microbatch` is used only when it cannot.

    `isolate`: keep examples apart by construction. `planned`: the size of batches to come.
    """

    microbatch: int | None = None
    why: str = "norms from layer rules in one backward pass: nothing of size batch × model"
    fallbacks: list[str] = field(default_factory=list)
    mode: str = "auto"
    isolate: bool = False
    planned: int = LEAST

    def __post_init__(self) -> None:
        one_of(MODES, mode=self.mode)
        self._known: WeakKeyDictionary[nn.Module, dict[Any, _Known]] = WeakKeyDictionary()
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
        one_of(REDUCTIONS, reduce=reduce)
        if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
            model = check.original(model)
            self._written_out.say(check.UNCOMPILED)
        check.validate(model)
        like = check.trainable(model)
        device = next(iter(like.values())).device
        batch = cuttable(batch)
        shape = shape_of(batch)
        if shape.size == 0:
            return empty_sum(like, clip=clip, device=device)
        if units is not None or weights is not None:
            members(units, weights, size=shape.size, device=device)  # refuses before any work
        known = self._try(model, loss_fn, batch, shape)
        whose: dict[str, Any] = {"clip": clip, "units": units, "reduce": reduce, "weights": weights}
        if known.reading is not None:
            try:
                return self._by_layers(model, loss_fn, batch, shape, known, like=like, **whose)
            except NotByLayer as reason:
                self._write_out(known, reason)
            except RuntimeError as error:
                check.refuse_reentrant(error)
                if not self.isolate or not is_vmap_limit(error):
                    raise
                self._write_out(known, NotByLayer(f"it does not run under vmap ({error})"))
        engine = self._written_out
        if known.reason:
            self.why = f"{engine.why} ({known.reason})"
        return engine.clipped_sum(model, loss_fn, batch, **whose)

    def layers_for(self, model: nn.Module, loss_fn: Loss, batch: Batch) -> Reading | None:
        """How this kind of batch is clipped by layers; None where its trial decided nothing.

        The first batch of a kind is a trial of the model. Raises NotByLayer where gradients are
        written out per example.
        """
        known = self._try(model, loss_fn, batch, shape_of(batch))
        if known.reason:
            raise NotByLayer(known.reason)
        return known.reading

    def _by_layers(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        shape: BatchShape,
        known: _Known,
        *,
        like: dict[str, nn.Parameter],
        clip: Clip,
        units: Tensor | None,
        reduce: str,
        weights: Tensor | None,
    ) -> ClippedSum:
        """The clipped sum by layer rules; raises NotByLayer if they turn out not to hold."""
        reading, device = known.reading, next(iter(like.values())).device
        assert reading is not None

        def one(
            rows: Batch, units: Tensor | None, weights: Tensor | None, onto: Any = None
        ) -> ClippedSum:
            """That of some rows, from one forward and one backward pass."""
            forms, losses = reading.forms(model, loss_fn, rows)
            who = members(units, weights, size=len(losses), device=device)
            with exactly(device):  # what is written out or added up here is not rounded
                for name, own in forms.items():
                    if len(own) > 1 or units is not None:
                        forms[name] = by_unit(own, who, reduce=reduce)
                return finish(forms, like, losses, who, clip=clip, onto=onto)

        def small(count: int) -> None:
            with same_rng(model, 0):
                one(take(batch, slice(count)), None, None)

        chosen = choose_parts(
            known.parts, self.mode, shape, device=device, run=small, say=self._tell
        )
        return in_parts(one, batch, units, weights, chosen=chosen, size=shape.size)

    def _tell(self, words: str) -> None:
        self.why = f"{self._reason}; {words}"

    def _try(self, model: nn.Module, loss_fn: Loss, batch: Batch, shape: BatchShape) -> _Known:
        """Look a kind of batch up, or find out about it."""
        # Of a module the class is what identifies its code.
        is_module = isinstance(loss_fn, nn.Module)
        loss = (type(loss_fn), False) if is_module else identity_of(loss_fn)
        state, alive = state_of(model)
        kind = (shape.kinds, state, loss)
        kinds = self._known.setdefault(model, {})
        if kind in kinds:
            return kinds[kind]
        self._written_out.check_first(model, loss_fn, batch)
        known = _Known(alive=alive)
        try:
            if not is_rowwise(loss_fn) and not self.isolate:
                raise NotByLayer("a ModelLoss without by_row=True is one number for one example")
            if check.is_compiled(model):
                self._written_out.say(check.UNCOMPILED)
            known.reading = self._find_out(model, loss_fn, batch)
        except NotByLayer as reason:
            self._write_out(known, reason, is_tried=is_rowwise(loss_fn))
        except RuntimeError as error:
            check.refuse_reentrant(error)
            raise
        if known.reading is None and not known.reason:
            self._written_out.say("one batch written out per example: it decides nothing")
            return known
        while len(kinds) >= MOST_KINDS:  # it will be tried anew if it ever comes back
            del kinds[next(iter(kinds))]
        kinds[kind] = known
        return known

    def _find_out(self, model: nn.Module, loss_fn: Loss, batch: Batch) -> Reading | None:
        """What a trial of the layer rules says; raises NotByLayer where they do not hold."""
        if self.isolate:
            layers = read(model, is_isolated=True)
            try:
                rules_hold(model, loss_fn, batch, layers)
            except RuntimeError as error:
                if not is_vmap_limit(error):
                    raise
                raise NotByLayer(f"it does not run under vmap ({error})") from error
            return Reading(layers, None)
        least = min(self.planned, max(MOST_MADE_UP, 2 * shape_of(batch).size))
        reading = trial(model, loss_fn, batch, least=least)
        if reading is None:
            return None
        layers = reading.layers
        for name, layer in layers.unruled_layers.items():
            which = f"layer {name!r} ({type(layer).__name__})"
            if name in layers.split:
                own = ", ".join(layers.unruled(name))
                self._written_out.say(f"{which} has no rule: its {own} written out per example")
            else:
                self._written_out.say(f"{which} has no rule: written out per example")
        return reading

    def _write_out(self, known: _Known, reason: NotByLayer, *, is_tried: bool = True) -> None:
        """Have the whole model written out per example from here on, and say why."""
        known.reading, known.reason = None, str(reason)
        note = f"whole model written out per example: {reason}"
        if note not in self.fallbacks and is_tried:
            warn_user(f"{note}; steps are slower", ProbablyNotMeant)
        self._written_out.say(note)


def state_of(model: nn.Module) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What a trial of a model holds for: its modules and their modes and hooks, the parameters that
    are trained; and these objects themselves."""
    found: list[Any] = []
    alive: list[Any] = []
    for module in model.modules():
        own = module.__dict__
        calls = id(own.get("forward")), own.get("_compiled_call_impl") is not None
        found.append((id(module), module.training, *calls))
        for hooks in _HOOKS:
            if held := own.get(hooks):
                found += held
        for name, p in module._parameters.items():
            found.append((name, id(p), p is not None and p.requires_grad))
            alive.append(p)
        if module is not model:  # which the caller keeps
            alive.append(module)
    return tuple(found), tuple(alive)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def auto(
    model: nn.Module,
    *,
    microbatch: int | None = None,
    mode: str = "auto",
    isolate: bool = False,
    planned: int = LEAST,
) -> Ghost | PerExample:
    """The engine for a model; `.why` is the reason in words; `mode`: see `microbatches`.

    `isolate`: keep examples apart by construction, at some cost. `planned`: the size of batches.

    Writing gradients out costs memory and time in proportion to batch × parameters; it is what is
    left where most parameters are in layers without a rule, or outside any layer.
    """
    model = check.original(model)
    check.validate(model)
    count = sum(p.numel() for p in check.trainable(model).values())
    try:
        layers = read(model, is_isolated=isolate)
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
    return Ghost(microbatch, why=why, mode=mode, isolate=isolate, planned=max(LEAST, planned))
