"""One private step, as Algorithm 1 writes it.

    admit    every unit is inside its participation, or nothing is computed        (release)
    clip     each unit's gradient to norm ζ, and sum them                          (clipping)
    commit   the step is in the ledger, on the disk, with a digest of its sum      (release)
    noise    add row t of z·ζ·C⁻¹Z, divide by the planned batch size               (release)
    update   any torch optimizer: post-processing                                  (optim)

A batch may come in several parts: `add` for each, then one `release`. Random layers draw from
generators that are set anew for every step and part (`seeded`), so that an honest replay has the
same masks. State: the sum in the making, gone after `release`; it never leaves this file.

A GPU works behind the host: the fingerprint of a part there is begun in `add` and waited for when
the next one comes or in `release`, and the sum of a part without ids is begun meanwhile, thrown
away if it is refused. The order is strict for a replay, and on_violation="drop" without ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping import ClippedSum, ModelLoss
from noshuffle.clipping.objective import Criterion, batch_size, cuttable, take
from noshuffle.errors import InvalidInput, ParticipationViolation
from noshuffle.release import fingerprint
from noshuffle.release.guard import Mask
from noshuffle.release.ledger import Admission
from noshuffle.release.unit_ids import Ids
from noshuffle.training.generators import seeded
from noshuffle.training.hooks import untraced
from noshuffle.training.outcome import Outcome
from noshuffle.training.step_parts import Parts


@dataclass
class LatePrint:
    """The fingerprint of a part on a device, begun with its sum and waited for later."""

    batch: tuple[Any, ...]
    rows: int
    is_last: bool
    #: How to wait for it, once it is begun.
    found: Callable[[], bytes] | None = None


class Step:
    """One release in the making.

    Guarantees: what `release` hands to the optimizer is (Σ_u clip(g_u) + noise of step t) divided
    by the planned constant, for the admitted units only. A unit with a NaN or infinite gradient
    contributes zero; an empty batch releases noise alone. Of a step that was released before, the
    same sum leaves again, or nothing.
    """

    #: Who is told of every part as it comes, if anybody is (`first_step`).
    hear: Callable[[tuple[Any, ...]], None] | None = None

    def __init__(self, parts: Parts, *, index: int) -> None:
        check_in_step(parts, index)
        self.parts = parts
        self.index = index
        self._ids: list[Ids | None] = []
        self._prints: list[bytes] = []
        self._sums: list[ClippedSum] = []
        self._dropped = self._nameless = 0
        self._admission: Admission | None = None
        self._coming: LatePrint | None = None

    @untraced
    def add(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        ids: Any = None,
        is_last: bool = False,
        data: tuple[Any, ...] | None = None,
        seed: int | None = None,
    ) -> None:
        """Admit, clip and sum one part of the batch; `is_last` admits the batch as a whole.

        `data` is what epochs are compared by, where not all of a batch is the same in each; `seed`
        is for random layers that have drawn before.
        """
        if self.parts.is_over:
            self.parts.check_open()
        self._follow()
        batch = cuttable(batch)
        size = batch_size(batch)
        own = self._own_ids(ids, size)
        if self.hear is not None:
            self.hear(batch)
        self._settle()
        parts, admission = self.parts, None
        if parts.pass_writes is not None and size:
            parts.pass_writes.judge(parts.model, loss_fn, batch)
            parts.pass_writes = None
        named = batch if data is None else data
        self._ids.append(own)
        self._nameless += own is None and size > 0
        # A part that says it is the last is admitted as the whole batch, before it is computed
        # unless it is all of it.
        is_behind = own is None and (not is_last or len(self._ids) == 1) and not parts.drop
        is_behind = is_behind and self.index >= parts.ledger.released
        if is_behind and fingerprint.is_elsewhere(named):
            self._coming = LatePrint(named, size, is_last)
            if not is_last:
                admission = self._admit(is_partial=True)
        else:
            if own is None:
                found = fingerprint.of_batch(named, None, secret=parts.secret)
                self._name_part(found, rows=size)
            admission = self._admit(is_partial=not is_last)
        self._admission = admission if is_last else None
        keep = None if admission is None else rows_kept(admission, size)
        if keep is not None:
            self._dropped += size - int(keep.sum())
        for parameter in parts.parameters.values():
            parameter.grad = None  # of the last step, or raw: the new one may take its memory
        own_seed = parts.release.seed(self.index, len(self._sums)) if seed is None else seed
        self._sums.append(self._add_up(loss_fn, batch, own, keep, seed=own_seed))

    def _add_up(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        ids: Ids | None,
        keep: Mask | None,
        *,
        seed: int,
    ) -> ClippedSum:
        """The clipped sum of the rows of a part that count, added to those of the parts before; the
        fingerprint of the part is begun before it."""
        parts, units, late = self.parts, None, self._coming
        if late is not None:
            late.found = fingerprint.begin(late.batch, None, secret=parts.secret)
        if keep is not None:
            batch = take(batch, torch.from_numpy(keep))
        if parts.groups_users:
            assert ids is not None
            own = ids if keep is None else ids[keep]
            units = torch.from_numpy(np.unique(own, return_inverse=True)[1])
        clip, reduce = parts.threshold.clip, parts.reduce
        with seeded(seed, parts.device):
            part = parts.engine.clipped_sum(
                parts.model, loss_fn, batch, clip=clip, units=units, reduce=reduce
            )
        parts.guard.check_names(part.values)
        if self._sums:
            for name, value in self._sums[0].values.items():
                value.add_(part.values[name])
        return part

    @untraced
    def release(self) -> Outcome:
        """Commit, add noise, divide by the planned batch size, update."""
        parts = self.parts
        if parts.is_over:
            parts.check_open()
        self._follow()
        if not self._sums:
            raise InvalidInput("a step needs at least one batch (an empty one will do), got none")
        if len(self._sums) != len(self._ids):
            # The ledger would name what the sum lacks, and a replay could bring it.
            raise InvalidInput("a part of this batch failed and is not in its sum; begin it anew")
        self._settle()
        admission = self._admission or self._admit(is_partial=False)
        values = self._sums[0].values
        if admission.is_empty:  # of parts without ids, nobody knew before the last one
            self._leave_out_(values)
        if self._nameless > 1:  # a fact that the statement repeats
            parts.ledger.bind("in_parts", "yes")
        if self._close(admission, values):
            return self._outcome()
        # a released step whose sum came out otherwise
        if not parts.skips_replays:
            raise parts.release.refusal(self.index)
        parts.release.skip()
        return replace(self._outcome(), is_skipped=True)

    def _close(self, admission: Admission, values: dict[str, Tensor]) -> bool:
        """Commit; then noise, division and update. False where a repeated sum differs."""
        release = self.parts.release
        if not release.commit(admission, release.digest(values, release.counted(self._sums))):
            return False
        release.add_noise_(values)
        self._give(values)
        release.learn(self._sums, step=self.index)
        self.parts.optimizer.step()
        return True

    def _leave_out_(self, values: dict[str, Tensor]) -> None:
        """Nothing of the batch may be used: noise alone is released, and nothing is learned."""
        for value in values.values():
            value.zero_()
        self._dropped += sum(len(s.losses) for s in self._sums)
        rows = ("norms", "losses", "bad", "present")
        none = [{n: getattr(s, n)[:0] for n in rows} for s in self._sums]
        self._sums = [replace(s, **own, shown=None) for s, own in zip(self._sums, none)]

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

    def _own_ids(self, ids: Any, size: int) -> Ids | None:
        if ids is None and self.parts.groups_users:
            raise InvalidInput(
                "a plan with unit='user' needs to know whose each example is; pass ids="
            )
        if self._ids and (ids is None) != (self._ids[0] is None):
            raise InvalidInput("every part of a batch must come with ids, or none; pass ids=")
        if ids is None:
            return None
        own = self.parts.release.identify(ids, rows=size).copy()  # may hold the next part's soon
        others = [other for other in self._ids if other is not None]
        if self.parts.groups_users and any(np.isin(own, other).any() for other in others):
            raise InvalidInput(
                "all examples of a user must come in the same part of a batch, or they would "
                "count as several contributions; group them"
            )
        return own

    def _name_part(self, found: bytes, *, rows: int) -> None:
        """Take note of the fingerprint of a part; without ids its content is all it is known by.

        Two losses of the same rows, each with a pass of its own, would be clipped apart.
        """
        if rows and found in self._prints:
            raise ParticipationViolation(
                f"two parts of step {self.index} hold the same examples, which would count twice; "
                "have one loss for both, or pass ids= if they are different examples"
            )
        self._prints.append(found)

    def _settle(self) -> None:
        """Wait for a fingerprint that is on its way, and have leave for the batch with it where
        that was the last part (or called so)."""
        coming = self._coming
        if coming is None:
            return
        if coming.found is not None:  # else it failed, and is in no sum
            # Its sum is made: until it has its name, nobody may add to the step or release it.
            self._name_part(coming.found(), rows=coming.rows)
        self._coming = None
        if coming.found is not None and coming.is_last:
            self._admission = self._admit(is_partial=False)

    def _admit(self, *, is_partial: bool) -> Admission:
        """Leave for everything that was added so far."""
        whose = [own for own in self._ids if own is not None]
        ids = np.concatenate(whose) if whose else None
        batch = self._prints[0] if self._prints else b""
        if len(self._prints) > 1:
            batch = hashlib.blake2b(b"".join(self._prints), digest_size=fingerprint.SIZE).digest()
        return self.parts.release.admit(
            self.index, ids, batch, drop=self.parts.drop, is_partial=is_partial
        )

    @property
    def losses(self) -> Tensor:
        """What the newest part saw, for its maker."""
        return self._sums[-1].losses

    def _outcome(self) -> Outcome:
        if len(self._sums) == 1:
            only = self._sums[0]
            return Outcome(only.losses, only.norms, only.bad, self._dropped, only.shown)
        losses, norms, bad = (
            torch.cat([getattr(s, name) for s in self._sums]) for name in ("losses", "norms", "bad")
        )
        return Outcome(losses, norms, bad, self._dropped)


def rows_kept(admission: Admission, size: int) -> Mask | None:
    """Which of the newest `size` rows may be used; None for all."""
    if admission.is_empty:
        return np.zeros(size, dtype=bool)
    return None if admission.keep is None else admission.keep[len(admission.keep) - size :]


def check_in_step(parts: Parts, index: int) -> None:
    """Raise if noise and steps, or the model and its run, have come apart, or nothing can learn."""
    if torch.is_inference_mode_enabled():
        raise InvalidInput("a private step needs gradients; take it outside torch.inference_mode()")
    parts.release.check_in_step(index)
    parts.guard.check()
