"""LearningStream: rows in, private means out. Clip, sum, release, update, in that order.

Rows arrive in pieces of any size. Every piece is handed to a rule at the current iterate; the rule
predicts it, and returns the sum of its clipped contributions. When the planned number of rows has
come, the units of the batch are admitted, the sum leaves by `release.Release` (noise on the public
grid, division by the planned batch size) and goes to the rule, which makes the next iterate.
Between batches the iterate does not move, so it does not matter how a batch was cut into pieces.

Every phase (see `phases`) is a run of its own with a plan, a secret and a log, in memory, in a run
folder that was given (`run`, for one phase only) or in a folder of a saved stream (`saved`). Rows
without ids are known by their place in the phase. In memory, where nobody reads the log, steps are
counted and no more; `stream_units` alone refuses units that come twice, over all phases.

State kept: the unfinished sum, single rows that wait to be summed (`waiting`), the release of the
current phase, counts, and the units that were seen (`stream_units`). Rows and sum
are secrets: the sum leaves here only by `state`, which goes into a file for the owner alone (see
`saved`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.one_place import OnePlace
from noshuffle.convex.phases import Phase, PhaseBudget, make_phase, next_phase
from noshuffle.convex.rule import Rule, Watch
from noshuffle.convex.stream_units import StreamUnits
from noshuffle.convex.waiting import WaitingRows
from noshuffle.errors import HorizonExceeded, InvalidInput, NoshuffleError, Unsupported
from noshuffle.noise import Source
from noshuffle.one_owner import OneOwner
from noshuffle.plan.statement import voids
from noshuffle.release.account import Account, Charge, check_budget
from noshuffle.release.folder import RunFolder
from noshuffle.release.release import Release
from noshuffle.release.spending import PLACES
from noshuffle.release.units import Ids


class LearningStream(OneOwner):
    """One pass (or several in the same order) of rows through a rule.

    Guarantees: what the rule's `update` receives in a phase is the sequence of clipped sums plus
    z·clip·C⁻¹Z, divided by a constant of the plan, as stated by the phase's plan. A row beyond the
    horizon, an id seen before, and a step after a failure half-way are refused before anything is
    learned from them. Short last batches are divided by the planned size and get the full noise.

    `is_table`: all rows come in one call, so that no row can come twice under two places.
    """

    def __init__(
        self,
        rule: Rule,
        budget: PhaseBudget,
        *,
        source: Source | None = None,
        horizon: int | None,
        passes: int = 1,
        batch_size: int | None = None,
        run: str | Path | None = None,
        account: Account | None = None,
        is_table: bool = False,
    ) -> None:
        if horizon is None and passes > 1:
            raise Unsupported(
                f"{passes} passes need a known horizon, got None; give horizon= or call fit"
            )
        if horizon is None and run is not None:
            raise Unsupported("a run folder is of one plan; use fit, or give a horizon")
        if run is not None and RunFolder.of(run).is_started:
            raise InvalidInput(f"{run} holds a run, and a fit begins a new one; use a new folder")
        if account is not None:
            check_budget(account)
        self.rule, self.budget = rule, budget
        self.horizon, self.passes, self.batch_size = horizon, passes, batch_size
        self._run = None if run is None else Path(run).absolute()
        self._source, self._account = source, account
        self.charge: Charge | None = None
        self.folder: Path | None = None
        self.is_table = is_table
        self.is_closed = False
        self.phases: list[Phase] = []
        self.rows = self.steps = self._in_phase = self._held = 0
        #: Rows that were admitted and did not come yet.
        self._due = 0
        #: Rows of the phase whose units do not wait any more.
        self._named = 0
        self._sum = torch.zeros(rule.size, dtype=torch.float64, device="cpu")
        self._waiting = WaitingRows()
        #: What brings rows inside their bounds, just before they are summed; None: they are.
        self.row_map_fn: Callable[[Any], Any] | None = None
        #: Is told the number of steps that were released.
        self.show_fn: Callable[[int], None] | None = None
        self.units = StreamUnits(may_repeat=budget.unit == "user")
        self._is_broken = False
        self._begin()

    @property
    def phase(self) -> Phase:
        return self.phases[-1]

    @property
    def is_test(self) -> bool:
        return self.release.is_test

    @property
    def has_ids(self) -> bool | None:
        """Whether rows come with ids; None before the first."""
        return self.units.are_named

    @property
    def participation_checked(self) -> bool:
        """Whether a row that came twice would have been refused."""
        return self.is_table or bool(self.has_ids)

    @property
    def is_full(self) -> bool:
        """Whether the phase has no step left."""
        return self.release.step == self.phase.plan.steps

    @property
    def is_observed(self) -> bool:
        """Whether the evidence is kept in a run folder that the caller gave."""
        return self._run is not None

    def lives_in(self, run: str | Path) -> bool:
        """Whether this is the run folder that the stream began with."""
        return self._run is not None and self._run.resolve() == Path(run).resolve()

    def _begin(self) -> None:
        if self.horizon is None:
            phase = next_phase(self.budget, self.phases, batch_size=self.batch_size)
        else:
            phase = make_phase(
                self.budget, rows=self.horizon, passes=self.passes, batch_size=self.batch_size
            )
        self.phases.append(phase)
        self._in_phase = 0
        self._open(self._run if self.folder is None else self._folder_of_phase())
        self.rule.start(phase)

    def _folder_of_phase(self, *, later: int = 0) -> Path:
        assert self.folder is not None
        return self.folder / f"phase-{len(self.phases) + later}"

    def _open(self, run: Path | None) -> None:
        # The name differs from phase to phase: under a test seed all of them have one key.
        self._name = f"phase {len(self.phases)}"
        self.release = Release(
            self.phase.plan,
            {self._name: (self.rule.size,)},
            clip=self.rule.clip_norm,
            divisor=self.phase.batch_size,
            run=run,
            source=self._source,
            budget=self._place(),
        )
        self.charge = self.release.charge
        self.has_ended = False
        self._note_ids()

    def _place(self) -> OnePlace | None:
        """The place of the first phase in the budget is that of all."""
        if self._account is None:
            return None
        done = [phase.plan.statement() for phase in self.phases[:-1]]
        whole = max(done, key=lambda said: said.epsilon, default=None)
        return OnePlace(self._account, self.charge, whole, self.folder)

    def _note_ids(self) -> None:
        """How units are told apart, for whoever reads the log."""
        if self.release.folder is None or self.has_ids is None:
            return
        if kind := self.units.kind if self.has_ids else "" if self.is_table else PLACES:
            self.release.bind("ids", kind)

    def admit(self, rows: int, ids: Iterable[Hashable] | None) -> None:
        """Refuse rows that the plan has no room for, and ids that were here before."""
        if self._is_broken or self._due:
            raise InvalidInput("an earlier call failed half-way; fit again from the start")
        self.check_owner()
        if self.horizon is not None and self.rows + rows > self.horizon:
            raise HorizonExceeded(
                f"{self.rows} rows of a horizon of {self.horizon} were learned, {rows} more came; "
                "plan a longer horizon for a new model, or horizon=None"
            )
        try:
            found = self.units.check(rows, ids)
        except NoshuffleError:
            if not self.rows:  # nothing is left of a stream that never began, no folder either
                self.release.withdraw()
            raise
        before = (self.has_ids, self.units.kind)
        self._due = rows * self.passes  # from here on an interrupt leaves units without rows
        self.units.take(found)
        if before != (self.has_ids, self.units.kind):
            self._note_ids()

    def feed(self, x: Any, y: Targets, weight: Array | None = None) -> None:
        """Learn from rows that were admitted, in order."""
        self._is_broken = True
        at, total = 0, x.shape[0]
        while at < total:
            if self._is_phase_over:
                self._next_phase()
            left = self._until_release()
            room = min(left, total - at)
            piece = slice(at, at + room)
            rows = (x[piece], y[piece], None if weight is None else weight[piece])
            if not self._waiting.keep(*rows):
                self._sum_waiting()
                self._add(*rows)
            at += room
            self.rows += room
            self._held += room
            self._in_phase += room
            if room == left:
                self._release()
        self._due = max(0, self._due - total)
        self._is_broken = False

    def _add(self, x: Any, y: Targets, weight: Array | None) -> None:
        more = () if weight is None else (weight,)
        rows = x if self.row_map_fn is None else self.row_map_fn(x)
        self._sum += torch.from_numpy(self.rule.clipped_sum(rows, y, *more))

    def _sum_waiting(self) -> None:
        if self._waiting:
            self._add(*self._waiting.take())

    def show_waiting(self, watch: Watch) -> None:
        """Show the margins of rows that wait to someone, and change nothing."""
        if not self._waiting:
            return
        (x, y, weight), rule = self._waiting.joined(), copy(getattr(self.rule, "inner", self.rule))
        rule.watch = watch
        rule.clipped_sum(x if self.row_map_fn is None else self.row_map_fn(x), y, weight)

    @property
    def _is_phase_over(self) -> bool:
        return self.horizon is None and self._in_phase == self.phase.rows * self.phase.passes

    def _next_phase(self) -> None:
        self.end_run(may_end=False)  # a killed process comes back to where it was saved
        self.units.drop(min(self._in_phase, self.phase.rows) - self._named)
        self._named = 0
        self._begin()

    def _until_release(self) -> int:
        """Rows that still fit into the batch; a pass and a phase end a batch early."""
        phase = self.phases[-1]
        left_in_pass = phase.rows - (self._in_phase - self._held) % phase.rows
        return min(phase.batch_size, left_in_pass) - self._held

    def close(self) -> None:
        """The table ends: release the unfinished batch, whatever its size."""
        if self._held:
            self._release()
        self.is_closed = True

    def end_run(self, *, may_end: bool = True) -> None:
        """Bring the evidence of the phase up to date and let go of it."""
        if not self.has_ended:
            self.release.close_run(may_end=may_end)
        self.has_ended = True

    def extend(self) -> None:
        """After `close`, more rows came: new ones, which form phases of their own."""
        self.horizon, self.passes, self._run = None, 1, None
        self.is_closed = self.is_table = False

    def _release(self) -> None:
        """The batch leaves: its units are admitted, its row is written, noise, division."""
        self._sum_waiting()
        release, mean = self.release, {self._name: self._sum}
        ticket = release.admit(self._batch_units())
        release.close(ticket, mean)
        self.rule.update(mean[self._name].numpy(), step=ticket.step)
        release.finish(ticket)
        self._sum = torch.zeros_like(self._sum)
        self._held = 0
        self.steps += 1
        if release.folder is not None:
            self._forget_units()
        if self.show_fn is not None:
            self.show_fn(self.steps)

    def _batch_units(self) -> Ids | None:
        """Who the rows of the batch are, for the log in a folder."""
        first = (self._in_phase - self._held) % self.phase.rows
        return None if self.release.folder is None else self._units_at(first, first + self._held)

    def _units_at(self, first: int, end: int) -> Ids:
        """Who the rows at these places of the phase are: their ids, else their places."""
        if self.has_ids:
            return self.units.first(end - first, after=first - self._named)
        return np.arange(first, end)

    def _forget_units(self) -> None:
        """The units of released rows are in the log, and wait no longer for it or the next pass."""
        if self.passes == 1:
            released = min(self._in_phase - self._held, self.phase.rows)
            self.units.drop(released - self._named)
            self._named = released

    # -- a saved stream ------------------------------------------------------------------------

    _COUNTS: ClassVar[tuple[str, ...]] = ("horizon", "passes", "is_closed", "is_table")
    _COUNTS += ("rows", "steps", "_in_phase", "_held", "_named")

    def state(self) -> dict[str, Any]:
        """All but the keys, as tensors and plain values; for the owner's eyes only.

        Guarantees: the steps behind it are on the disk, and `link` is that of a row of their log.
        """
        if self._is_broken or self._due:
            raise InvalidInput("an earlier call failed half-way; there is nothing whole to save")
        self._is_broken = True  # rows that were summed by half are neither here nor there
        self._sum_waiting()
        self._is_broken = False
        release = self.release
        saved = release.log.append("saved", step=release.step)
        release.write_statement()
        if self.charge is not None:  # whatever goes on from this row has the place of the stream
            plan, void = self.phase.plan, voids(release.statement().assumptions)
            said = plan.statement().with_assumptions(*void)
            self.charge.settle(said, plan=plan, steps=plan.steps, link=saved["link"])
        return {
            **{name: getattr(self, name) for name in self._COUNTS},
            "phases": [(phase.rows, phase.passes) for phase in self.phases],
            "sum": self._sum.clone(),
            **self.units.state(),
            "link": saved["link"],
            "step": release.step,
            "noise": release.noise.state_dict(),
            "test_key": self._source.key.hex() if self.is_test and self._source else "",
            "rule": self.rule.state(),
        }

    def move_into(self, folder: Path) -> None:
        """From now on the evidence of every phase is kept in a folder of a saved stream.

        Guarantees: where it raises, the stream goes on in memory as before.
        """
        self.release.keep_in(folder / f"phase-{len(self.phases)}", self._units_of_steps())
        self.folder, self.has_ended = folder, False
        if before := len(self.phases) - 1:
            self.release.bind("phases_before", str(before))  # `verify` misses them nowhere
        self._note_ids()
        self._forget_units()

    def _units_of_steps(self) -> list[Ids]:
        """Who took part in each step of the phase so far; later passes repeat the first one."""
        size, rows = self.phase.batch_size, min(self.phase.rows, self._in_phase - self._held)
        first_pass = [self._units_at(at, min(at + size, rows)) for at in range(0, rows, size)]
        return [first_pass[step % len(first_pass)] for step in range(self.release.step)]

    def load(self, state: dict[str, Any], folder: Path, *, account: Account | None = None) -> None:
        """Become the stream that wrote `state` into this folder, under fresh keys.

        Guarantees: a state is taken only where the row that it was written after stands in the log
        of its phase. Steps that were released since then are passed over, in all phases.
        """
        key = bytes.fromhex(state["test_key"])
        self._source = Source(key, is_test=True) if key else None
        self.phases, self._account, self.charge = [], account, None
        for rows, passes in state["phases"]:
            self.phases.append(
                make_phase(self.budget, rows=rows, passes=passes, batch_size=self.batch_size)
            )
            self.rule.start(self.phases[-1])
        for name in self._COUNTS:
            setattr(self, name, state[name])
        self.folder = folder
        self.units.load(state)
        self._open(self._folder_of_phase())
        if state["link"] not in [row["link"] for row in self.release.history.of("saved")]:
            self.release.log.close()
            raise InvalidInput(
                f"the state in {folder} is of another stream, of a copy that went on by itself, or "
                "newer than the log beside it; bring back files that were saved together"
            )
        self._sum, self._waiting = state["sum"].clone(), WaitingRows()
        self.release.noise.load_state_dict(state["noise"])
        self.rule.load(state["rule"])
        self._pass_over(state["step"])
        while self._is_phase_over and RunFolder(self._folder_of_phase(later=1)).is_started:
            self._next_phase()
            self._pass_over(0)

    def _pass_over(self, known: int) -> None:
        """Steps behind the first `known` have no sum any more: their rows stay charged, and nothing
        is learned from them. What was saved of an unfinished batch went into the first of them."""
        release, phase = self.release, self.phase
        release.restore()
        lost = release.step - known
        if not lost:
            return
        place = min(release.step * phase.batch_size, phase.rows)
        self.rows, self.steps = self.rows + place - self._in_phase, self.steps + lost
        self._in_phase, self._held, self._named = place, 0, place
        self._sum = torch.zeros_like(self._sum)
        if self.has_ids:
            self.units.drop()
            self.units.note(release.guard.table.all()[0])
