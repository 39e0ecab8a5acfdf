"""A batch in parts by graphs: the sum of each part a replay, one release behind them.

    host      admit part ─ stage ─ start sum ─ admit part … ─ admit all ─ ledger ─ release
    device                          sum ─ add up          …            ──────────► noise, update

        total ← total + Σ_{b of the part} clip(g_b)

The order is that of `Step`: a part is admitted before it is computed (one without ids, whose
fingerprint comes from the device: before the next part, and the release), and the row of the whole
batch is durable before its noise is used. A part is padded with rows of weight zero to the rows of
a program, which follow from the first parts that came; the ledger names them (and the form of the
sum, `choice`), so that a resumed run adds up the same bits. Sizes of secret draws are not written
down: those of sampled plans are padded to the largest batch of the compiled step, or to the planned
one, or to a half, …, a sixteenth of that. A part that no program takes is summed by the engine.

The total is not what is given out as the gradient, as code of the user runs between parts. State:
the programs; the total of the step in the making, zero outside of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping import ClippedSum, ModelLoss
from noshuffle.clipping.objective import Criterion
from noshuffle.errors import InvalidInput
from noshuffle.release import fingerprint
from noshuffle.release.guard import Mask
from noshuffle.release.ledger import Admission
from noshuffle.release.unit_ids import Ids
from noshuffle.training.compiled.program import Program
from noshuffle.training.compiled.programs import Programs, flat
from noshuffle.training.compiled.release import CapturedRelease
from noshuffle.training.compiled.step import Compiled
from noshuffle.training.outcome import Outcome, Unread
from noshuffle.training.step import LatePrint, Rng, Step
from noshuffle.training.step_parts import Parts

#: Facts of a ledger: the rows of the programs for parts, in the order in which they came.
FACT = "part_rows"
#: So many programs for parts of one kind: the usual rows, larger ones, few.
MOST_SIZES = 3
#: Programs of all kinds.
MOST_PROGRAMS = 2 * MOST_SIZES
#: Secret draws have, with the planned rows and the largest, a program for every size: where some
#: were left without, other sizes than before would be after a restart, and add up other bits.
HALVINGS = MOST_PROGRAMS - 2
#: Rows of the smallest program: of one example alone nobody could tell whether examples mix.
FEWEST = 2
#: A part is padded to less than so many times its rows while there is a program left for it.
PADDED = 3


class PartSums(Programs):
    """The sums of the parts of one batch, added up.

    Guarantees: as the engine's own `clipped_sum` for every part; one row moves the total by at most
    the bound of the clip, and a row that is not finite, or is left out, contributes exactly zero.
    The total belongs to one step at a time, and is zero when the next one begins.
    """

    most = MOST_PROGRAMS

    def __init__(self, compiled: Compiled) -> None:
        parts = compiled.parts
        super().__init__(parts, capacity=0, captures=compiled.captures)
        self.compiled = compiled
        self.total = {
            name: torch.zeros(
                p.shape, dtype=torch.promote_types(p.dtype, torch.float32), device=p.device
            )
            for name, p in parts.parameters.items()
        }
        self._bound = parts.threshold.clip.bound(tuple(parts.parameters))
        self._is_sampled = parts.ledger.participation.is_sampled
        named = (parts.ledger.meta(f"{FACT}_{i}") for i in range(MOST_SIZES))
        self._rows = [int(rows) for rows in named if rows]
        self._form = ""
        self._ending: CapturedRelease | None = None
        self._is_open = True  # whether the release may still be captured
        self._step: Step | None = None

    @property
    def why(self) -> str:
        """Which parts are replays, and of what."""
        ready = sorted({p.capacity for p in self._programs.values() if p is not None})
        rows = " or ".join(map(str, ready))
        return f"parts of up to {rows} rows are replays: sum by {self._form}" if ready else ""

    # -- one step at a time --------------------------------------------------------------------

    def begin(self, step: Step) -> bool:
        """Give the total to a step, where no other one has it."""
        if self._step is not None:
            return False
        self._step = step
        return True

    def check(self, step: Step) -> None:
        """Raise unless the total is that of this step."""
        if self._step is not step:
            raise InvalidInput("this step is over; open the next one with private.accumulate()")

    def end(self, step: Step) -> None:
        """The step is over, and nothing of its sums is left."""
        if self._step is step:
            self.forget()
            self._step = None

    def give_up(self, step: Step) -> None:
        """The step did not come to its end: nothing of it is left, or waited for."""
        if self._step is not step:
            return
        try:
            self.parts.ledger.collect_digests(or_lose=True)  # what comes later is lost
        finally:
            self.end(step)
            for program in self._ready():
                program.give_up()
            if self._ending is not None:
                self._ending.reset()

    # -- sums ----------------------------------------------------------------------------------

    def add(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        ids: Ids | None,
        keep: Mask | None,
        *,
        size: int,
        rng: Rng,
        late: LatePrint | None,
    ) -> ClippedSum | None:
        """Start the sum of one part and add it up, or None where it has to be an eager one.

        The result has the raw figures of its rows alone. Layers that draw random numbers do so
        inside `rng`. The fingerprint of the part, where somebody will wait for it, is begun, too.
        """
        self.capacity = self._rows_for(size)
        if size > self.capacity:
            self.say(f"a part of {size} rows is larger than the captured ones: eager")
            return None
        leaves, spec = flat(batch)
        program, _ = self.again(loss_fn, batch) or (None, size)
        if program is None:
            program = self.find(loss_fn, batch, leaves, spec, size=size)
        if program is None:
            return None
        self.parts.guard.check_names(program.values)
        with self.at_home():
            program.stage(leaves, size)
            if late is not None and late.batch is batch:  # of all rows, as they came
                program.digest()
                late.found = partial(program.print_of, batch, leaves)
            elif late is not None:
                late.found = fingerprint.begin(late.batch, None, secret=self.parts.secret)
            program.weigh(size, keep)
            program.stage_units(size, keep, ids)
            with rng() if program.is_random else nullcontext():
                program.sum()
            assert program.seen is not None
            losses, norms, bad = program.seen.clone()  # the next part may be of the same program
        if keep is not None or program.users is not None or size < program.capacity:
            rows: Any = slice(size) if keep is None else torch.from_numpy(np.flatnonzero(keep))
            units: Any = rows if program.users is None else program.units
            losses, norms, bad = losses[rows], norms[units], bad[units]
        return ClippedSum({}, self._bound, norms, losses, bad, bad)

    def add_up(self, values: Mapping[str, Tensor]) -> None:
        """Add the sum of a part that no program has taken."""
        torch._foreach_add_([*self.total.values()], [values[name] for name in self.total])

    def forget(self) -> None:
        """Make all sums zero: raw ones do not stay behind."""
        raw = [value for program in self._ready() for value in program.values.values()]
        torch._foreach_zero_([*self.total.values(), *raw])

    def _ready(self) -> list[Program]:
        return [p for p in self._programs.values() if p is not None and p.sums is not None]

    def _rows_for(self, size: int) -> int:
        """The rows of the program for a part of this size; fewer where there is none for it.

        Guarantees: what comes out for a part follows from its size and from the facts of the
        ledger, and facts that join later change nothing for parts that came before them.
        """
        if self._is_sampled:
            rows = int(self.parts.planned_batch)
            if size > rows:
                return self.compiled.capacity
            for _ in range(HALVINGS):
                if max(size, FEWEST) > (half := -(-rows // 2)):
                    break
                rows = half
            return rows
        size = max(size, FEWEST)
        fitting = min((rows for rows in self._rows if rows >= size), default=0)
        is_close = 0 < fitting < PADDED * size
        if is_close or len(self._rows) == MOST_SIZES:
            return fitting
        self.parts.ledger.bind(f"{FACT}_{len(self._rows)}", str(size))
        self._rows.append(size)
        return size

    def _build(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], size: int
    ) -> Program | None:
        def finish(program: Program) -> None:
            program.capture_digest()
            program.find_draws()
            program.add_onto(self.total)
            program.forget()

        made = self.capture(loss_fn, batch, size, fuse=self.compiled.fuse, finish=finish)
        if made is None:
            return None
        program, self._form = made
        return program

    # -- the end of a step ---------------------------------------------------------------------

    def close(self, admission: Admission) -> bool | None:
        """Record the step, then noise, division and update of the total.

        False where a repeated sum differs from the released one; None, and nothing is done, where
        the eager step has to do it.
        """
        with self.at_home():
            if self._where != self._addresses():
                self.reset()  # an update moves the memory that it was captured with
            ending = self._ending or self._captured_ending()
            if ending is None:
                return None
            self.compiled.make_ready(ending)
            return self.compiled.close(ending, admission)

    def _captured_ending(self) -> CapturedRelease | None:
        if not self._is_open:
            return None
        own: dict[str, Any] = {"keys": self._keys, "captures": self.captures, "is_kept": True}
        try:
            ending = CapturedRelease(self.parts, lambda: self.total, **own)
            ending.capture(self.compiled.update)
        except Exception as error:
            line = " ".join(str(error).split())[:160]
            self.say(f"the release of parts was not captured ({type(error).__name__}: {line})")
            self._is_open = False
            return None
        self._ending = ending
        return ending

    def reset(self) -> None:
        """Forget everything that was captured; the total stays."""
        super().reset()
        self._ending = None


class StepInParts(Step):
    """One release in the making, its parts summed and released by graphs.

    Guarantees: those of `Step`. If anything fails before the ledger is written, nothing was
    released; if something fails after it, noise and step are no longer in step and the run goes on
    from its last checkpoint.
    """

    def __init__(self, parts: Parts, *, index: int, sums: PartSums) -> None:
        super().__init__(parts, index=index)
        self._by_graph = sums

    def _add_up(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        ids: Ids | None,
        keep: Mask | None,
        *,
        size: int,
        rng: Rng,
    ) -> ClippedSum:
        sums, seen = self._by_graph, None
        sums.check(self)
        if size:
            own: dict[str, Any] = {"size": size, "rng": rng, "late": self._coming}
            seen = sums.add(loss_fn, batch, ids, keep, **own)
        if seen is None:
            part = self._by_engine(loss_fn, batch, ids, keep, rng=rng)
            sums.add_up(part.values)
            seen = replace(part, values={})
        return seen

    def _total(self) -> dict[str, Tensor]:
        self._by_graph.check(self)
        return self._by_graph.total

    def _close(self, admission: Admission, values: dict[str, Tensor]) -> bool:
        is_released = self._by_graph.close(admission)
        if is_released is None:
            own = {name: value.clone() for name, value in values.items()}
            is_released = super()._close(admission, own)
        self._by_graph.end(self)
        return is_released

    def give_up(self) -> None:
        self._by_graph.give_up(self)

    def _outcome(self) -> Outcome | Unread:
        return LateOutcome(super()._outcome)


class LateOutcome(Unread):
    """What the parts of a step saw, still on its way from the device."""

    def __init__(self, outcome_fn: Callable[[], Outcome | Unread]) -> None:
        self._outcome_fn = outcome_fn

    def read(self) -> Outcome:
        """Wait for it."""
        found = self._outcome_fn()
        assert isinstance(found, Outcome)
        return replace(found, bad=found.bad != 0)

    @property
    def loss(self) -> float:
        """Mean loss of the finite examples (NaN if there are none); waits for it."""
        return self.read().loss
