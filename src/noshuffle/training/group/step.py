"""One private step over many ranks; each brings its own part of the batch.

    meet     ids, block fingerprints and settings of every rank; any difference is refused
    admit    rank 0 asks the ledger about the whole batch, all hear the answer
    clip     every rank, block by block; sums in fixed point (`fixed_sum`)
    reduce   integers over the ranks, all_reduce or reduce_scatter: before any noise
    record   rank 0, durable, before any rank goes on
    noise    every rank for its own shard, or all the same for what is replicated

A block of `block` units (`batch_blocks`) is clipped in one piece by whoever has it; all that
follows is exact integer addition, so two runs agree bit for bit if their batches have the same
blocks. State: the sum in the making, until `release`.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping import ClippedSum, ModelLoss
from noshuffle.clipping.objective import Criterion, batch_size, cuttable
from noshuffle.errors import InvalidInput, NoshuffleError, ParticipationViolation
from noshuffle.release import fingerprint
from noshuffle.release.guard import Mask
from noshuffle.release.ledger import Admission
from noshuffle.release.unit_ids import Ids
from noshuffle.training.compiled.blocks import BlockSums, block_sums
from noshuffle.training.group import shards
from noshuffle.training.group.batch_blocks import block_prints, block_rng, blocks_of, rows_of
from noshuffle.training.group.fixed_sum import FixedSum, check_units
from noshuffle.training.group.shards import ShardLayout
from noshuffle.training.group.team import Team, all_agree
from noshuffle.training.hooks import untraced
from noshuffle.training.outcome import Outcome, Unread
from noshuffle.training.step import Step, rows_kept
from noshuffle.training.step_parts import Parts


@dataclass
class GroupParts(Parts):
    """Everything a step is made of, and who takes it together."""

    team: Team = field(kw_only=True)
    layouts: dict[str, ShardLayout] = field(kw_only=True)
    block: int = field(kw_only=True)
    is_sharded: bool = field(kw_only=True)
    #: Captured sums of blocks, once a step has asked for them; or the reason why there are none.
    sums: BlockSums | str | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Brought:
    """What a rank brings: ids and fingerprints in block order, settings of its optimizer."""

    size: int
    ids: Ids | None
    prints: list[bytes]
    settings: str
    kind_of_ids: str


class GroupStep(Step):
    """One release in the making, on every rank.

    Guarantees: those of `Step` for the batch of all ranks together. A user whose examples lie on
    two ranks is refused. Nothing is released unless every rank has clipped its part; a rank that
    fails before the ledger is written stops all of them, and no noise was used.
    """

    parts: GroupParts
    can_replay_masks = False  # blocks draw their own: the same bits for any number of ranks

    def __init__(self, parts: GroupParts, *, index: int) -> None:
        self.parts, self.index, self._part = parts, index, 0
        #: In which part, and from which rank, rows without ids came first.
        self._first: dict[tuple[bytes, ...], tuple[int, int]] = {}
        self._fixed: FixedSum | None = None
        # A rank whose noise fell out of step says so at the next meeting: the others are waiting.
        self._late: NoshuffleError | None = None
        try:
            super().__init__(parts, index=index)
        except NoshuffleError as error:
            self._late = error

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
        """Admit, clip and sum one part of the batch: of every rank, its own share of it.

        Batches are told apart by all they bring, whatever `data` says: pass ids to have more
        than one epoch of the `loss.backward()` form on several ranks.
        """
        team, tag = self.parts.team, f"part {self._part} of step {self.index}"
        blocks: list[Ids] = []

        def bring() -> Brought:
            if self._late is not None:
                raise self._late
            self.parts.check_open()
            self._follow()
            nonlocal batch
            batch = cuttable(batch)
            size = batch_size(batch)
            own = self._own_ids(ids, size)
            if self.hear is not None:
                self.hear(batch)
            users = own if self.parts.groups_users else None
            blocks.extend(blocks_of(size, users, block=self.parts.block))
            prints = block_prints(batch, blocks, own, secret=self.parts.secret)
            order = np.concatenate([*blocks, np.empty(0, dtype=np.int64)])
            settings = repr(fingerprint.settings_of(self.parts.optimizer))
            kind = self.parts.release.kind_of_ids
            return Brought(size, None if own is None else own[order], prints, settings, kind)

        told = team.meet(f"{tag}, last: {is_last}", bring)
        self._check(told)
        before = told[: team.rank]
        keep = self._admit_all(told, is_last=is_last)
        mine = keep[(at := sum(b.size for b in before)) : at + told[team.rank].size]
        number = sum(len(b.prints) for b in before)

        def clip() -> ClippedSum:
            own = told[team.rank].ids
            with shards.gathered(self.parts.model) if self.parts.is_sharded else nullcontext():
                return self._clip_blocks(loss_fn, batch, blocks, mine, own, first=number)

        seen = team.meet(f"clipped {tag}", clip)
        self._sums.append(_joined(seen))
        check_units(sum(len(s.norms) for s in self._sums))
        self._part += 1

    def _check(self, told: list[Brought]) -> None:
        """Refuse ranks that differ in ids or in settings, and users on several ranks."""
        all_agree([{"having ids": b.ids is not None} for b in told])
        for brought in told:  # integers of one rank and names of another are not comparable
            self.parts.release.know_by(brought.kind_of_ids)
        all_agree([{"optimizer settings": b.settings} for b in told])
        if self.parts.groups_users:
            users = np.concatenate([np.unique(b.ids) for b in told if b.ids is not None])
            names, counts = np.unique(users, return_counts=True)
            if (counts > 1).any():
                raise InvalidInput(
                    f"user {int(names[counts > 1][0])} has examples on two ranks, which would "
                    "count as several contributions; split batches with private.rows"
                )

    def _admit_all(self, told: list[Brought], *, is_last: bool) -> Mask:
        """Which rows of this part, over all ranks, may be used (truth values)."""
        size = sum(b.size for b in told)
        given = [b.ids for b in told if b.ids is not None]
        if not given:
            self._refuse_same_rows(told)
            self._nameless += sum(b.size > 0 for b in told)
        self._ids.append(np.concatenate(given) if given else None)
        joined = b"".join(p for b in told for p in b.prints)
        found = hashlib.blake2b(joined, digest_size=fingerprint.SIZE).digest()
        self._name_part(found, rows=0 if given else size)  # ids are compared by the ledger
        admission = self._admit(is_partial=not is_last)
        self._admission = admission if is_last else None
        keep = rows_kept(admission, size)
        keep = np.ones(size, dtype=bool) if keep is None else keep
        self._dropped += size - int(keep.sum())
        return keep

    def _refuse_same_rows(self, told: list[Brought]) -> None:
        """Raise where ranks bring the same examples, in this part or another of the step: they
        would count twice."""
        for rank, brought in enumerate(told):
            own = self._part, rank
            if (
                brought.size
                and (first := self._first.setdefault(tuple(brought.prints), own)) != own
            ):
                who = f"ranks {first[1]} and {rank} bring"
                if first[1] == rank:
                    who = f"rank {rank} brings, in parts {first[0]} and {self._part},"
                raise ParticipationViolation(
                    f"{who} the same examples to step {self.index}, which would count twice; give "
                    "each its own rows (private.rows(len(batch))), or pass ids= if they are "
                    "different examples"
                )

    def _clip_blocks(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        blocks: list[Ids],
        keep: Mask,
        ids: Ids | None,
        *,
        first: int,
    ) -> ClippedSum:
        """Clip and add up this rank's blocks; `keep` and `ids` are in block order.

        Returns the raw figures of its units: the sums themselves are in fixed point.
        """
        parts, at = self.parts, 0
        clip, device = parts.threshold.clip, parts.device
        key = parts.release.mask_key(self.index) or parts.secret
        shapes = {name: layout.shape for name, layout in parts.layouts.items()}
        bound = clip.bound(tuple(shapes))
        if self._fixed is None:
            self._fixed = FixedSum(shapes, bound=bound, device=device)
        none = torch.zeros(0, device=device)
        figures = [ClippedSum({}, bound, none, none, none.bool(), none.bool())]
        for number, rows in enumerate(blocks, start=first):
            used = keep[at : at + len(rows)]
            whose = None if ids is None else ids[at : at + len(rows)][used]
            at += len(rows)
            units = None
            if parts.groups_users:
                assert whose is not None
                units = torch.from_numpy(np.unique(whose, return_inverse=True)[1])
            if not used.any():
                continue
            part = rows_of(batch, rows[used])
            place = f"{self.index}/{self._part}/{number}"
            rng = partial(block_rng, place, key=key, device=device)
            got = self._captured(loss_fn, part, rng) if units is None else None
            if got is None:
                with rng():
                    got = parts.engine.clipped_sum(
                        parts.model, loss_fn, part, clip=clip, units=units, reduce=parts.reduce
                    )
            parts.guard.check_names(got.values)
            self._fixed.add(got.values, units=len(got.norms))
            figures.append(got)
        if isinstance(parts.sums, BlockSums):
            parts.sums.forget()
        return _joined(figures)

    def _captured(
        self, loss_fn: Criterion | ModelLoss, part: tuple[Any, ...], rng: Any
    ) -> ClippedSum | None:
        """The sum of a block as a replay, if this run has such."""
        parts = self.parts
        if parts.sums is None:
            sums, reason = block_sums(parts, is_sharded=parts.is_sharded)
            parts.sums = reason if sums is None else sums
        if isinstance(parts.sums, str):
            return None
        return parts.sums.clipped_sum(loss_fn, part, rng=rng)

    @untraced
    def release(self) -> Outcome | Unread:
        """Reduce over the ranks, record, add noise, divide by the planned batch size, update."""
        if self._admission is None:  # a batch in parts: has every rank come to its end?
            self.parts.team.meet(f"the release of step {self.index}", self._check_added)
        return super().release()

    def _check_added(self) -> None:
        if self._late is not None:
            raise self._late
        self.parts.check_open()
        if not self._sums:
            raise InvalidInput("a step needs at least one batch (an empty one will do), got none")

    def _made(self) -> list[Tensor]:
        """The total of this rank; figures of its units lie in ordinary memory."""
        return [] if self._fixed is None else list(self._fixed.values.values())

    def _total(self) -> dict[str, Tensor]:
        """The clipped sum over all ranks, and of it this rank's part. Exact in any order."""
        assert self._fixed is not None
        parts, team = self.parts, self.parts.team
        # narrowed to the parameter's type after the noise
        wide = {
            name: torch.promote_types(p.dtype, torch.float32)
            for name, p in parts.parameters.items()
        }
        if not parts.is_sharded:
            return self._fixed.reduced(lambda total: shards.add_up(total, team), wide)
        values = {}
        for name, dtype in wide.items():
            total = self._fixed.values.pop(name)
            mine = shards.reduce(total, parts.layouts[name], team)
            values[name] = self._fixed.to_float(mine, dtype)
        return values

    def _give(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.parts.parameters.items():
            own = values[name].to(parameter.dtype)
            parameter.grad = shards.like(own, parameter.data)

    def _commit(self, admission: Admission, values: dict[str, Tensor]) -> bool:
        """Rank 0 writes the digest of the whole sum; a replay must be the same on every rank."""
        release, team = self.parts.release, self.parts.team
        is_fine = release.commit(admission, self._digest(values))
        if admission.is_replay:
            is_fine = all(team.meet(f"the replay of step {self.index}", lambda: is_fine))
        return is_fine

    def _digest(self, values: dict[str, Tensor]) -> bytes:
        """The digest of the whole sum, the same for any number of ranks, sharded or not."""
        parts, hasher = self.parts, hashlib.blake2b(digest_size=16)
        for name in sorted(values):
            value = values[name]
            if parts.is_sharded:
                whole = shards.gather_rows(
                    value, parts.layouts[name], parts.team, dim=0, device=value.device
                )
                value = whole.to(value.device)
            of_sum = parts.release.digest({name: value})
            hasher.update(of_sum if isinstance(of_sum, bytes) else of_sum())
        if also := parts.release.counted(self._sums):
            of_count = parts.release.digest({}, also)
            hasher.update(of_count if isinstance(of_count, bytes) else of_count())
        return hasher.digest()


def _joined(figures: list[ClippedSum]) -> ClippedSum:
    """The raw figures of all units, in ordinary memory."""
    names = ("norms", "losses", "bad", "present")
    every = [torch.cat([getattr(f, name) for f in figures]).cpu() for name in names]
    return ClippedSum({}, figures[0].bound, *every)
