"""Clipped sums of blocks as graphs that are replayed, for steps over many ranks.

A block takes some hundred small operations, and a GPU waits for the host to start each of them. The
sum of a block is captured once and replayed for every block of the same size; everything else stays
as it is in `group.step`. What is captured are the operations of the run's own engine on as
many rows, so a block has the bits that it has on a rank that captures nothing.

State: the programs, and in them the last block's sum, until `forget`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from noshuffle.clipping import ClippedSum, ModelLoss
from noshuffle.clipping.objective import Criterion, batch_size
from noshuffle.training.compiled.choice import reseed
from noshuffle.training.compiled.program import Program
from noshuffle.training.compiled.programs import Programs, flat, why_not
from noshuffle.training.generators import generators
from noshuffle.training.step_parts import Parts

#: Sizes of blocks that are captured: the usual one, and that of the last block of a batch.
MOST_SIZES = 2


def block_sums(parts: Parts, *, is_sharded: bool) -> tuple[BlockSums | None, str]:
    """Captured sums for a run, or the reason why it has none."""
    if is_sharded:
        return None, "sharded parameters lie elsewhere whenever they are gathered"
    reason = why_not(parts, wanted="auto")
    if parts.groups_users:
        reason = "a plan with unit='user' groups rows by who they belong to, which changes by step"
    elif parts.threshold.is_adaptive:
        reason = "the clip norm follows a quantile, which is read after every step"
    return (None, reason) if reason else (BlockSums(parts, captures=True), "")


class BlockSums(Programs):
    """The clipped sums of blocks, for the sizes that come first; no row of a program is spare.

    Guarantees: as the engine's own `clipped_sum`; one row moves the sum by at most the bound of the
    clip, and a row that is not finite contributes exactly zero.
    """

    most = 4 * MOST_SIZES

    def __init__(self, parts: Parts, *, captures: bool) -> None:
        super().__init__(parts, capacity=0, captures=captures)
        self._sizes: set[int] = set()
        #: By program, whether it draws random numbers.
        self._draws: dict[int, bool] = {}

    @property
    def why(self) -> str:
        """Which blocks are replays."""
        ready = sorted({p.capacity for p in self._programs.values() if p is not None})
        return f"blocks of {' or '.join(map(str, ready))} rows are replays" if ready else ""

    def clipped_sum(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        rng: Callable[[], AbstractContextManager[None]],
    ) -> ClippedSum | None:
        """The sum of one block, or None where it has to be an eager one.

        `values` are a program's own tensors: read them before the next block. Layers that draw
        random numbers do so inside `rng`.
        """
        size = batch_size(batch)
        if size not in self._sizes and len(self._sizes) >= MOST_SIZES:
            return None
        self._sizes.add(size)
        self.capacity = size
        leaves, spec = flat(batch)
        program = self.find(loss_fn, batch, leaves, spec, size=size)
        if program is None:
            return None
        with self.at_home(), rng() if self._draws[id(program)] else nullcontext():
            program.stage(leaves, size)
            program.weigh(size, None)
            program.sum()
            assert program.sums is not None
            own = program.sums.losses, program.sums.norms, program.sums.bad
            losses, norms, bad = (t.clone() for t in own)
        bound = self.parts.threshold.clip.bound(tuple(self.parts.parameters))
        return ClippedSum(program.values, bound, norms, losses, bad, torch.ones_like(bad))

    def forget(self) -> None:
        """Make the last sums zero: raw sums do not stay behind."""
        for program in self._programs.values():
            if program is not None:
                program.forget()

    def _build(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], size: int
    ) -> Program | None:
        drawn: list[bool] = []
        made = self.capture(
            loss_fn, batch, size, only="engine", finish=lambda p: drawn.append(_draws(p))
        )
        if made is None:
            return None
        self._draws[id(made[0])] = drawn[0]
        return made[0]


def _draws(program: Program) -> bool:
    """Whether a replay takes random numbers from torch; leaves their state to the caller."""
    reseed(program)
    before = [(own, own.get_state()) for own in generators(program.device)]
    program.sum()
    return any(not torch.equal(own.get_state(), state) for own, state in before)
