"""One private step, as Algorithm 1 writes it.

    admit    every unit is inside its participation, its row is written      (release)
    clip     each unit's gradient to norm ζ, and sum them                    (clipping)
    close    add row t of z·ζ·C⁻¹Z, divide by the planned batch size         (release)
    update   any torch optimizer: post-processing                            (optim)
    finish   the step is over

A batch may come in several parts: `add` for each, which is admitted before it is computed, then one
`release`. Random layers draw from generators that are set anew for every step and part (`seeded`).
Whatever goes wrong after the first part was admitted ends the run object. State: the sum in the
making, gone after `release`; it never leaves this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping import ClippedSum, ModelLoss
from noshuffle.clipping.objective import Criterion, batch_size, cuttable, take
from noshuffle.errors import InvalidInput
from noshuffle.participation import Mask
from noshuffle.release.release import Ticket
from noshuffle.release.units import Ids
from noshuffle.training.generators import seeded
from noshuffle.training.hooks import untraced
from noshuffle.training.outcome import Outcome
from noshuffle.training.step_parts import Parts

#: The clipped sum of the rows that count, by units where users have several.
SumFn = Callable[[Mask | None, Ids | None], ClippedSum]


class Step:
    """One release in the making.

    Guarantees: what `release` hands to the optimizer is (Σ_u clip(g_u) + noise of step t) divided
    by the planned constant, for the admitted units only. A unit with a NaN or infinite gradient
    contributes zero; an empty batch releases noise alone.
    """

    def __init__(self, parts: Parts) -> None:
        check_ready(parts)
        self.parts = parts
        self._ticket: Ticket | None = None
        self._sums: list[ClippedSum] = []
        self._admitted = self._dropped = 0

    @property
    def next_part(self) -> tuple[int, int]:
        """The number of the step, and that of its next part."""
        step = self.parts.release.step if self._ticket is None else self._ticket.step
        return step, len(self._sums)

    @untraced
    def add(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        ids: Any = None,
        is_last: bool = False,
    ) -> None:
        """Admit, clip and sum one part of the batch; `is_last` says that none comes behind it."""
        parts, batch = self.parts, cuttable(batch)

        def clipped_sum(keep: Mask | None, ids: Ids | None) -> ClippedSum:
            rows = batch if keep is None else take(batch, torch.from_numpy(keep))
            units = unit_numbers(ids if ids is None or keep is None else ids[keep])
            return parts.engine.clipped_sum(
                parts.model,
                loss_fn,
                rows,
                clip=parts.threshold.clip,
                units=units,
                reduce=parts.reduce,
            )

        self.add_sum(batch_size(batch), clipped_sum, ids=ids, is_last=is_last)

    def add_sum(
        self,
        size: int,
        clipped_sum: SumFn,
        *,
        ids: Any = None,
        is_last: bool = False,
        seed: int | None = None,
    ) -> None:
        """Admit `size` rows, then add up what `clipped_sum` makes of them.

        It is given the rows that count (None: all of them), and the unit of every row where several
        rows may be one unit's. `seed` is for random layers that have drawn before.
        """
        parts = self.parts
        self._follow()
        own = named_units(parts, ids, size)
        if self._ticket is None:
            self._ticket = parts.release.admit(own, drop=parts.drop, is_partial=not is_last)
        else:
            parts.release.add_part(self._ticket, own, drop=parts.drop)
        self._admitted += 1
        keep = self._ticket.keep
        if keep is not None:
            self._dropped += size - int(keep.sum())
        for parameter in parts.parameters.values():
            parameter.grad = None  # of the last step, or raw: the new one may take its memory
        if seed is None:
            seed = parts.release.seed(*self.next_part)
        with seeded(seed, parts.device):
            part = clipped_sum(keep, own if parts.groups_users else None)
        parts.guard.check_names(part.values)
        if self._sums:
            for name, value in self._sums[0].values.items():
                value.add_(part.values[name])
        self._sums.append(part)

    @untraced
    def release(self) -> Outcome:
        """Add noise, divide by the planned batch size, update."""
        parts, ticket = self.parts, self._ticket
        self._follow()
        if ticket is None:
            raise InvalidInput("a step needs at least one batch (an empty one will do), got none")
        if len(self._sums) != self._admitted:
            raise InvalidInput(
                "a part of this batch failed and is not in its sum; open the run again"
            )
        values = self._sums[0].values
        parts.release.close(ticket, values, sums=self._sums)
        self._give(values)
        parts.optimizer.step()
        parts.release.finish(ticket)
        return self._outcome()

    def _follow(self) -> None:
        """Go on behind the part, or the step, before, whichever stream it was on."""
        parts = self.parts
        if parts.streams is not None:
            parts.streams.follow(parts.device, self._made)

    def _made(self) -> list[Tensor]:
        """What parts have left that the next one, or the release, reads."""
        rows = (t for s in self._sums for t in (s.losses, s.norms, s.bad))
        return [*(v for s in self._sums for v in s.values.values()), *rows]

    def _give(self, values: dict[str, Tensor]) -> None:
        """Hand the private gradient to the optimizer."""
        own = self.parts.parameters
        narrow: dict[torch.dtype, list[str]] = {}
        for name, parameter in own.items():
            if values[name].dtype is not parameter.dtype:
                narrow.setdefault(parameter.dtype, []).append(name)
        for names in narrow.values():  # a list of mixed types is copied wrongly by some torches
            rounded = [torch.empty_like(own[name], requires_grad=False) for name in names]
            torch._foreach_copy_(rounded, [values[name] for name in names])
            values = {**values, **dict(zip(names, rounded))}
        for name, parameter in own.items():
            parameter.grad = values[name]

    def _outcome(self) -> Outcome:
        if len(self._sums) == 1:
            only = self._sums[0]
            return Outcome(only.losses, only.norms, only.bad, self._dropped)
        losses, norms, bad = (
            torch.cat([getattr(s, name) for s in self._sums]) for name in ("losses", "norms", "bad")
        )
        return Outcome(losses, norms, bad, self._dropped)


def unit_numbers(ids: Ids | None) -> Tensor | None:
    """The units of rows, numbered from 0."""
    return None if ids is None else torch.from_numpy(np.unique(ids, return_inverse=True)[1])


def named_units(parts: Parts, ids: Any, size: int) -> Ids | None:
    """The unit of every row; None where nobody names them."""
    if parts.names.are_places:
        ids = parts.names.take(ids, rows=size)
    if ids is not None:
        return parts.release.identify(ids, rows=size)
    if parts.groups_users:
        raise InvalidInput("a plan with unit='user' needs to know whose each example is; pass ids=")
    return None


def check_ready(parts: Parts) -> None:
    """Raise unless the next step may begin, and what it trains is what was privatized."""
    if torch.is_inference_mode_enabled():
        raise InvalidInput("a private step needs gradients; take it outside torch.inference_mode()")
    parts.release.check_ready()
    parts.guard.check()
