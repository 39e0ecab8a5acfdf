"""Clipping without per-example gradients: one forward and one backward pass.

    forms     inputs a and output gradients g of every layer, of one pass (`ghost_forms`)
    norms     from (a, g) of each layer by its rule, added over layers
    sum       Σ_b f_b g_b a_bᵀ, one ordinary weight gradient per layer with the factors inside

(book-keeping: Bu, Wang, Zha, Karypis 2023.) Layers without a rule have their own gradients
written out and are named in `fallbacks`. Before a model is trusted it is tried on two examples
against plain autograd, once per kind of input; one that fails (parameters used outside their
layers, examples that mix) goes to `PerExample` as a whole, and `fallbacks` says why.

`mode` says how much of a batch is done at once (see `microbatches`): "fast" all of it, "lean" in
parts, "auto" what the device has room for. `why` tells the choice.

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

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from noshuffle.clipping.batch import cuttable
from noshuffle.clipping.check import original, refuse_reentrant
from noshuffle.clipping.clipped import Clip, ClippedSum
from noshuffle.clipping.forms import Form
from noshuffle.clipping.ghost_forms import ghost_forms
from noshuffle.clipping.inputs import (
    UNCOMPILED,
    as_written,
    is_compiled,
)
from noshuffle.clipping.isolation_check import probe, tried, with_same_rng
from noshuffle.clipping.layers import (
    Layers,
    Layout,
    NotByLayer,
    NotNow,
    find_layout,
    inner_shapes,
    read,
)
from noshuffle.clipping.loss_code import identity_of
from noshuffle.clipping.microbatches import MODES, Chosen, choose_parts, in_parts
from noshuffle.clipping.objective import (
    Criterion,
    ModelLoss,
    batch_size,
    is_rowwise,
    leaves,
    take,
)
from noshuffle.clipping.per_example import PerExample, empty_sum
from noshuffle.clipping.precision import exactly
from noshuffle.clipping.rules import find_rule
from noshuffle.clipping.snapshot import Snapshot
from noshuffle.clipping.tape import Route, RouteIncomplete
from noshuffle.clipping.units import by_unit, finish, members
from noshuffle.errors import one_of

#: How many states of one model (modes, layers added) are remembered.
SHOTS = 16


@dataclass
class _Known:
    """What the trial of a model said, and the parts that batches of a size are cut into."""

    layers: Layers | None
    layout: Layout | None
    reason: str | None = None
    is_quiet: bool = False  # a run may be done twice: it writes into no buffer
    parts: dict[tuple[int, int], Chosen] = field(default_factory=dict)
    route: Route = field(default_factory=Route)


@dataclass
class Ghost:
    """Clip by layer rules in one backward pass; `microbatch` is used only when it cannot."""

    microbatch: int | None = None
    why: str = "norms from layer rules in one backward pass: nothing of size batch × model"
    fallbacks: list[str] = field(default_factory=list)
    mode: str = "auto"
    _known: WeakKeyDictionary[nn.Module, dict[Any, _Known]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )
    _shots: WeakKeyDictionary[nn.Module, list[Snapshot]] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    def __post_init__(self) -> None:
        one_of(MODES, mode=self.mode)
        self._reason = self.why
        self._written_out = PerExample(self.microbatch, fallbacks=self.fallbacks)

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
        given, model = model, original(model)
        if given is not model:
            self._say(UNCOMPILED)
        shot = self._look(model)
        like = shot.like
        batch = cuttable(batch)
        size = batch_size(batch)
        device = next(iter(like.values())).device
        if size == 0:
            return empty_sum(like, clip=clip, device=device)
        members(units, weights, size=size, device=device)  # refuses bad input before any work
        known = self._try(model, loss_fn, batch, shot)
        layers, layout = known.layers, known.layout
        if layers is not None and layout is not None:

            def read_off(rows: tuple[Any, ...], *, early: bool) -> Any:
                options: dict[str, Any] = {"layers": layers, "layout": layout, "early": early}
                options["names"] = shot.names
                with as_written(model) if shot.is_compiled else nullcontext():
                    try:
                        return ghost_forms(model, loss_fn, rows, **options, route=known.route)
                    except RouteIncomplete:
                        return ghost_forms(model, loss_fn, rows, **options)

            def one(rows: tuple[Any, ...], whose: Any, marks: Any, **options: Any) -> ClippedSum:
                is_alone = whose is None and marks is None
                forms, losses = read_off(rows, early=device.type == "cuda" and is_alone)
                who = members(whose, marks, size=len(losses), device=device)
                with exactly(device):  # what is written out or added up here is not rounded
                    for name, own in forms.items():
                        if not is_alone or len(own) > 1:
                            forms[name] = by_unit(own, who, reduce=reduce)
                    return finish(forms, like, losses, who, clip=clip, **options)

            def small(count: int) -> None:
                with with_same_rng(model):
                    one(take(batch, slice(count)), None, None)

            try:
                chosen = choose_parts(
                    known.parts, self.mode, batch, device=device, run=small, say=self._tell
                )
                settings: dict[str, Any] = {"chosen": chosen, "may_repeat": known.is_quiet}
                return in_parts(one, batch, units, weights, device=device, **settings)
            except NotByLayer as reason:
                known.layers, known.reason = None, str(reason)
                self._say(f"whole model written out per example: {reason}")
            except RuntimeError as error:
                refuse_reentrant(error)
                raise
        engine = self._written_out
        if known.reason is not None:
            self.why = f"{engine.why} ({known.reason})"
        with as_written(model):
            return engine.clipped_sum(
                model, loss_fn, batch, clip=clip, units=units, reduce=reduce, weights=weights
            )

    def _tell(self, words: str) -> None:
        self.why = f"{self._reason}; {words}"

    def _add(self, words: str) -> None:
        if words not in self._reason:
            self._reason, self.why = f"{self._reason}; {words}", f"{self.why}; {words}"

    def _say(self, note: str) -> None:
        if note not in self.fallbacks:
            self.fallbacks.append(note)

    def _look(self, model: nn.Module) -> Snapshot:
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
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        shot: Snapshot,
    ) -> _Known:
        """Look a model up, or find out about it."""
        kinds = tuple(
            (leaf.dim(), leaf.dtype)
            if isinstance(leaf, Tensor)
            else (leaf if isinstance(leaf, bool | str) else type(leaf))
            for leaf in leaves(batch)
        )
        key = (kinds, shot, identity_of(loss_fn))
        seen = self._known.setdefault(model, {})
        if key in seen:
            return seen[key]
        if batch_size(batch) == 1:  # one example cannot show whether examples mix
            return _Known(None, None)
        with as_written(model):
            self._written_out.check_buffers(model, loss_fn, batch)
        try:
            seen[key] = self._find_out(model, loss_fn, batch)
        except NotNow as reason:
            self._say(f"one batch written out per example: {reason}")
            return _Known(None, None)
        except RuntimeError as error:
            refuse_reentrant(error)
            raise
        return seen[key]

    def _find_out(
        self, model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]
    ) -> _Known:
        try:
            if not is_rowwise(loss_fn):
                raise NotByLayer("a ModelLoss without by_row=True is one number for one example")
            if is_compiled(model):
                self._say(UNCOMPILED)
            layers = read(model)
            guessed = any(find_rule(layer) is None for layer in layers.ruled.values())
            try:
                layout, allowed = _tried(model, loss_fn, batch, layers)
            except NotByLayer as reason:
                if not guessed or isinstance(reason, NotNow):
                    raise
                layers = read(model, by_name=False)
                layout, allowed = _tried(model, loss_fn, batch, layers)
        except NotNow:
            raise
        except NotByLayer as reason:
            self._say(f"whole model written out per example: {reason}")
            return _Known(None, None, str(reason))
        self._add(allowed)
        for name, layer in layers.opaque.items():
            self._say(
                f"layer {name!r} ({type(layer).__name__}) has no rule: written out per example"
            )
        return _Known(layers, layout, is_quiet=self._written_out.is_quiet(model))


def _tried(
    model: nn.Module, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], layers: Layers
) -> tuple[Layout, str]:
    """The layout of a model whose rules were found to be right, and what was allowed for that."""
    with as_written(model), probe(model, loss_fn, batch) as run:
        layout = replace(find_layout(model, layers, run), inner=inner_shapes(batch))

    def forms_of(rows: tuple[Any, ...]) -> dict[str, list[Form]]:
        return ghost_forms(model, loss_fn, rows, layers=layers, layout=layout)[0]

    return layout, tried(model, loss_fn, batch, forms_of)
