"""The trial of a model's layer rules: do they give each example its own gradient?

    layout    where examples lie in the inputs and outputs of every layer
    graph     no path leads from the losses to a weight around its layer (`outside_use`)
    numbers   forms by rules against autograd, alone and together (`isolation_check`)
    places    row b of every layer belongs to example b (`row_check`)
    batch     the same of the whole first batch (`batch_check`)

Rules that fail are left out, first those inside of layers with parameters of their own, then those
that go by a layer's name; where that does not help, the model is written out per example. No state.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from noshuffle.clipping import check
from noshuffle.clipping.batch_check import still_apart
from noshuffle.clipping.forms import GradientForm
from noshuffle.clipping.ghost_forms import ghost_forms
from noshuffle.clipping.isolation_check import tried
from noshuffle.clipping.layers import ExampleAxes, Layers, NotByLayer, NotNow, find_layout, read
from noshuffle.clipping.objective import Batch, Loss, shape_of, take
from noshuffle.clipping.outside_use import noted, used_inside
from noshuffle.clipping.products import repeatable
from noshuffle.clipping.row_check import FormsFn, batch_in_place, pairs_in_place
from noshuffle.clipping.rule_check import names_fit
from noshuffle.clipping.rules import find_rule
from noshuffle.clipping.trial_rows import first_rows, usual
from noshuffle.clipping.trial_runs import probe, with_same_rng


def readings(model: nn.Module, loss_fn: Loss, batch: Batch) -> tuple[Layers, ExampleAxes]:
    """The first reading of the layers that a trial finds right: with more rules, then with fewer.

    Left out are rules inside a layer that has parameters of its own, then those by a layer's name.
    """
    layers = read(model)
    is_guessed = any(find_rule(layer) is None for layer in layers.ruled.values())
    fewer = [{"splits": False}] if layers.split else []
    fewer += [{"splits": not layers.split, "by_name": False}] if is_guessed else []
    while True:
        try:
            with with_same_rng(model):
                names_fit(layers)
            return layers, _tried(model, loss_fn, batch, layers)
        except NotByLayer as reason:
            if not fewer or isinstance(reason, NotNow):
                raise
            layers = read(model, **fewer.pop(0))


def _tried(model: nn.Module, loss_fn: Loss, batch: Batch, layers: Layers) -> ExampleAxes:
    """The layout of a model whose rules were found to be right."""
    with check.as_written(model):
        run = probe(model, loss_fn, batch)
        layout = find_layout(model, layers, run)
        with torch.enable_grad(), noted(layers) as calls:
            calls.refuse(run(2), check.trainable(model))
    layout = replace(layout, inner=shape_of(batch).inner)

    forms_of = by_rules(model, loss_fn, layers, layout)
    tried(model, loss_fn, batch, forms_of)
    few = first_rows(batch)
    pairs_in_place(model, forms_of, take(few, usual(few)))
    return layout


def batch_tried(
    model: nn.Module, loss_fn: Loss, batch: Batch, layers: Layers, layout: ExampleAxes
) -> None:
    """Raise NotByLayer if examples of the whole batch mix, rows are not in their places, or a
    weight is used outside its layer. A batch of which none can be asked passes."""
    with suppress(NotNow), repeatable():  # as captured steps are, in what it needs, too
        still_apart(model, loss_fn, batch)
        batch_in_place(model, by_rules(model, loss_fn, layers, layout), batch)
    used_inside(model, loss_fn, batch, layers)


def by_rules(model: nn.Module, loss_fn: Loss, layers: Layers, layout: ExampleAxes) -> FormsFn:
    """The forms of any rows, or of the losses of some of them."""

    def forms_of(rows: Batch, asked: Tensor | None = None) -> dict[str, list[GradientForm]]:
        return ghost_forms(model, loss_fn, rows, layers=layers, layout=layout, asked=asked)[0]

    return forms_of
