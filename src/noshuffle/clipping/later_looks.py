"""Looks at a model after its trial, for one kind of batch: what is asked at which call.

    full     at a call that was drawn: all of `batch_check`, with gradients, whether the model
             keeps anything of its data, whether layers see rows in their places (`row_check`), and
             whether weights are used inside their layers alone (`outside_use`)
    new      a batch of another size than those before: losses of the whole batch, and its rows
    quick    two examples alone, on a CPU: their losses, and the norms of their gradients; of a
             model that draws random numbers the losses of the whole batch, less often. Where two
             are not as they were, a full look follows

Whoever listens is told of each answer. State: calls, sizes that came, the call of the next look.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from noshuffle.clipping.batch_check import alike, still_apart, two_of
from noshuffle.clipping.layers import Layers, Mixes, NotByLayer, NotNow
from noshuffle.clipping.look_runs import new_seed
from noshuffle.clipping.looks import Look, next_full, next_quick
from noshuffle.clipping.objective import Batch, Loss, batch_size, take
from noshuffle.clipping.outside_use import used_inside
from noshuffle.clipping.per_example import PerExample
from noshuffle.clipping.products import repeatable
from noshuffle.clipping.row_check import HALVES, FormsFn, batch_in_place, has_norms
from noshuffle.clipping.statefulness import put_back_after
from noshuffle.errors import Unsupported
from noshuffle.user_warnings import warn_user

#: Sizes of batches, beside the largest, that are looked at when they first come.
SIZES = 16
#: How much more rarely a CPU looks where that takes the whole batch.
RARELY = 4


@dataclass
class LaterLooks:
    """When batches of one kind, by the name `kind`, were looked at, and will be."""

    kind: str = ""
    calls: int = 1  # with the trial's own batch
    due: int = 1  # the call of the next look, quick or full
    full: int = 1
    sizes: dict[int, bool] = field(default_factory=dict)  # of batches; whether they were looked at
    last_size: int = 0  # of a batch that was seen to keep examples apart
    is_random: bool = False  # the same example has another loss in another batch

    def is_at_batch(self, size: int) -> bool:
        """Whether a look at it asks the whole batch, and not what a step made of two examples."""
        return self.calls >= self.full or self._is_new(size) or self.is_random

    def _is_new(self, size: int) -> bool:
        return size not in self.sizes and (len(self.sizes) < SIZES or size > max(self.sizes))

    def look(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        losses: Tensor | None = None,
        norms: Tensor | None = None,
        *,
        layers: Layers,
        forms_of: FormsFn,
        engine: PerExample,
    ) -> None:
        """Raise Mixes if examples of this batch do, whose `losses`, and `norms`, were these,
        NotByLayer if a weight is used outside its layer, and Unsupported if the model has begun to
        keep something of them; the listeners of `engine` are told of all but the second."""
        size, is_full, is_apart = batch_size(batch), self.calls >= self.full, False
        is_whole, seed = self.is_at_batch(size), new_seed()
        if not is_whole and losses is not None:
            picks = two_of(batch)
            with put_back_after(model, has_trained=False):
                is_full = not alike(model, loss_fn, batch, losses, picks)
                self.is_random = is_full  # unless examples mix, which a full look will say
                if not is_full and norms is not None:
                    is_full = not has_norms(model, forms_of, batch, norms, picks)
        try:
            if is_full or is_whole:
                is_first = self.calls == 1 or not is_full
                how = {"has_gradients": is_full, "is_first": is_first}
                halves = HALVES if is_full else 1
                with repeatable():  # as captured steps are, in what it needs, too
                    still_apart(model, loss_fn, batch, **how, seed=seed)
                    batch_in_place(model, forms_of, batch, seed=seed, halves=halves)
                if self.calls > 1 and is_full:
                    used_inside(model, loss_fn, batch, layers)
                    engine.check_state(model, loss_fn, batch, in_batches=True, is_again=True)
                engine.listeners.tell(model, Look(self.kind, size=size))
                self.last_size, is_apart = size, True
        except NotNow:
            pass
        except Mixes as reason:
            if size != self.last_size and mixes_at(
                self.last_size, model, loss_fn, batch, seed=seed
            ):
                size = self.last_size
            shown = 0 if self.sizes.get(size) is False else size
            engine.listeners.tell(model, Look(self.kind, str(reason), shown))
            if self.last_size and shown in (0, *self.sizes):
                self._warn(reason)
            raise
        except Unsupported as reason:
            engine.listeners.tell(model, Look(self.kind, str(reason)))
            raise
        self.sizes[size] = self.sizes.get(size, False) or is_apart
        if self.calls >= self.full:
            self.full = next_full(self.calls)
        self.due = self.full
        if not next(model.parameters()).is_cuda:
            rarely = RARELY if self.is_random else 1
            self.due = min(self.full, next_quick(self.calls, rarely=rarely))

    def _warn(self, reason: Mixes) -> None:
        """Batches of this kind were clipped by layer rules before."""
        warn_user(
            f"the model keeps examples apart no longer ({reason}): it is written out per example "
            f"from call {self.calls} on, but the steps before may not be covered by the statement, "
            "which says NOT PRIVATE; begin a new run with a model that stays as it is",
            RuntimeWarning,
        )


def mixes_at(size: int, model: nn.Module, loss_fn: Loss, batch: Batch, *, seed: int) -> bool:
    """Whether examples mix in a batch of this size, which some of these are brought to, under the
    random numbers that showed it elsewhere."""
    if size < 2:
        return False
    index = torch.arange(size, device="cpu") % batch_size(batch)
    try:
        still_apart(model, loss_fn, take(batch, index), seed=seed)
    except NotByLayer as reason:
        return isinstance(reason, Mixes)
    return False
