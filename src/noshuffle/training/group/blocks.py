"""Clipped sums of blocks as graphs that are replayed, for steps over many ranks on a GPU.

A block takes some hundred small operations, and a GPU waits for the host to start each of them. As
in `compiled`, the sum of a block is captured once and replayed for every block of the same size:
stage the rows, replay, read. Everything else of the step stays as it is in `step`: blocks are
admitted before they are staged, and their sums are added up in fixed point. What is captured are
the operations of the run's own engine on as many rows, so that a block has the bits that it has on
a rank that captures nothing (sharded parameters, say).

State: the programs, and in them the last block's sum, until `forget`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from noshuffle.clipping import ClippedSum, ModelLoss
from noshuffle.clipping.objective import Criterion, batch_size
from noshuffle.training.compiled.choice import reseed
from noshuffle.training.compiled.program import Program
from noshuffle.training.compiled.programs import Programs, flat
from noshuffle.training.compiled.reason import why_not
from noshuffle.training.step import Parts

#: Sizes of blocks that are captured: the usual one, and that of the last block of a batch.
MOST_SIZES = 2


def block_sums(parts: Parts, *, is_sharded: bool) -> tuple[BlockSums | None, str]:
    """Captured sums for a run, or the reason why it has none."""
    if is_sharded:
        return None, "sharded parameters lie elsewhere whenever they are gathered"
    reason = why_not(parts, wanted="auto")
    return (None, reason) if reason else (BlockSums(parts, captures=True), "")


class BlockSums:
    """The clipped sums of blocks, for the sizes that come first.

    Guarantees: as the engine's own `clipped_sum`; one row moves the sum by at most the bound of the
    clip, and a row that is not finite contributes exactly zero.
    """

    def __init__(self, parts: Parts, *, captures: bool) -> None:
        self._parts, self._captures = parts, captures
        self._sizes: dict[int, Sized] = {}

    @property
    def why(self) -> str:
        """Which blocks are replays."""
        ready = sorted(size for size, sums in self._sizes.items() if sums.draws)
        return f"blocks of {' or '.join(map(str, ready))} rows are replays" if ready else ""

    @property
    def fallbacks(self) -> list[str]:
        """What could not be captured, each said once."""
        return list(dict.fromkeys(note for s in self._sizes.values() for note in s.fallbacks))

    def clipped_sum(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        luck: Callable[[], AbstractContextManager[None]],
    ) -> ClippedSum | None:
        """The sum of one block, or None where it has to be an eager one.

        `values` are a program's own tensors: read them before the next block. Layers that draw
        random numbers do so inside `luck`.
        """
        size = batch_size(batch)
        if size not in self._sizes:
            if len(self._sizes) >= MOST_SIZES:
                return None
            self._sizes[size] = Sized(self._parts, capacity=size, captures=self._captures)
        return self._sizes[size].clipped_sum(loss_fn, batch, luck=luck)

    def forget(self) -> None:
        """Make the last sums zero: raw sums do not stay behind."""
        for sums in self._sizes.values():
            sums.forget()


class Sized(Programs):
    """The clipped sums of blocks of exactly `capacity` rows."""

    def __init__(self, parts: Parts, *, capacity: int, captures: bool) -> None:
        super().__init__(parts, capacity=capacity, captures=captures)
        #: By program, whether it draws random numbers.
        self.draws: dict[int, bool] = {}

    def clipped_sum(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        *,
        luck: Callable[[], AbstractContextManager[None]],
    ) -> ClippedSum | None:
        """See `BlockSums`."""
        leaves, spec = flat(batch)
        program = self.find(loss_fn, batch, leaves, spec, size=self.capacity)
        if program is None:
            return None
        with self.at_home():
            program.stage(leaves, self.capacity)
            program.weigh(self.capacity, None)
            if self.draws[id(program)]:
                with luck():
                    program.sum()
            else:
                program.sum()
            sums = program.sums
            assert sums is not None
            losses, norms, bad = (t.clone() for t in (sums.losses, sums.norms, sums.bad))
        bound = self.parts.threshold.clip.bound(tuple(self.parts.parameters))
        return ClippedSum(sums.values, bound, norms, losses, bad, torch.ones_like(bad))

    def forget(self) -> None:
        """Make the last sums zero."""
        for program in self._programs.values():
            if program is not None:
                program.forget()

    def reset(self) -> None:
        """Forget everything that was captured."""
        super().reset()
        self.draws.clear()

    def _build(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], size: int
    ) -> Program | None:
        drawn: list[bool] = []
        made = self.capture(
            loss_fn, batch, size, only="engine", finish=lambda p: drawn.append(_draws(p))
        )
        if made is None:
            return None
        self.draws[id(made[0])] = drawn[0]
        return made[0]


def _draws(program: Program) -> bool:
    """Whether a replay takes random numbers from torch; leaves their state to the caller."""
    reseed(program)
    before = _generators(program.device)
    program.sum()
    return _generators(program.device) != before


def _generators(device: torch.device) -> tuple[bytes, ...]:
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(state.numpy().tobytes() for state in states)
