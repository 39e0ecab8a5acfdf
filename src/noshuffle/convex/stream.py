"""LearningStream: rows in, private means out. Clip, sum, release, update, in that order.

Rows arrive in pieces of any size. Every piece is handed to a rule at the current iterate; the rule
predicts it, and returns the sum of its clipped contributions. When the planned number of rows has
come, the sum leaves by the door of the library (`release.Release`: ledger row, noise on the public
grid, division by the planned batch size) and goes to the rule, which makes the next iterate.
Between batches the iterate does not move, so it does not matter how a batch was cut into pieces.

Every phase (see `phases`) is a run of its own with a plan, keys and a ledger, in memory, in a run
folder that was given (`run`, for one phase only) or in a folder of a saved stream (`saved`).

A run in memory writes the ledger rows of single passes when it is saved: nobody else could repeat a
step, and `stream_units` alone refuses units that come twice, over all phases.

State kept: the unfinished sum, single rows that wait to be summed (`waiting`), the release of the
current phase, counts, and the units that were seen (`stream_units`). Rows and sum
are secrets: the sum leaves here only by `state`, which goes into a file for the owner alone (see
`saved`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.phases import Phase, PhaseBudget, make_phase, next_phase
from noshuffle.convex.rule import Rule, Watch
from noshuffle.convex.stream_units import StreamUnits
from noshuffle.convex.waiting import WaitingRows
from noshuffle.errors import HorizonExceeded, InvalidInput, Unsupported
from noshuffle.noise import Source
from noshuffle.one_owner import OneOwner
from noshuffle.release.account import Account, Charge, pays_for_itself
from noshuffle.release.folder import RunFolder
from noshuffle.release.release import Release
from noshuffle.release.unit_ids import Ids


class LearningStream(OneOwner):
    """One pass (or several in the same order) of rows through a rule.

    Guarantees: what the rule's `update` receives in a phase is the sequence of clipped sums plus
    z·clip·C⁻¹Z, divided by a constant of the plan, as stated by the phase's plan. A row beyond the
    horizon, an id seen before, and a step after a failure half-way are refused before anything is
    learned from them. Short last batches are divided by the planned size and get the full noise.
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
    ) -> None:
        if horizon is None and passes > 1:
            raise Unsupported(
                f"{passes} passes need a known horizon, got None; give horizon= or call fit"
            )
        if horizon is None and run is not None:
            raise Unsupported("a run folder is of one plan; use fit, or give a horizon")
        self.rule, self.budget = rule, budget
        self.horizon, self.passes, self.batch_size = horizon, passes, batch_size
        self._run = None if run is None else Path(run).absolute()
        self._source, self._account = source, account
        self.charge: Charge | None = None
        self.folder: Path | None = None
        self.skips_replays = False
        self._pid = os.getpid()
        self.is_closed = False
        self.phases: list[Phase] = []
        self.rows = self.steps = self._in_phase = self._phase_steps = self._held = 0
        #: Rows that were admitted and did not come yet.
        self._due = 0
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
        self._in_phase = self._phase_steps = 0
        self._open(self._run if self.folder is None else self._phase_folder())
        self.rule.start(phase)

    def _phase_folder(self) -> Path:
        assert self.folder is not None
        return self.folder / f"phase-{len(self.phases)}"

    def _open(self, run: str | Path | None) -> None:
        # The name differs from phase to phase: under a test seed all of them have one key.
        self._name = f"phase {len(self.phases)}"
        # The place of the first phase is that of all: no unit lies in two of them.
        is_charged = len(self.phases) == 1 or (run and pays_for_itself(RunFolder(run)))
        self.release = Release.begin(
            self.phase.plan,
            {self._name: (self.rule.size,)},
            clip=self.rule.clip_norm,
            divisor=self.phase.batch_size,
            run=run,
            source=self._source,
            budget=self._account if is_charged else None,
        )
        self.charge = self.charge or self.release.charge
        self.release.write_statement()
        self.has_ended = False
        self.units.secret = self.units.secret or self.release.id_secret.hex()
        if self.units.kind:
            self.release.ledger.bind("ids", self.units.kind)

    def admit(self, rows: int, ids: Iterable[Hashable] | None) -> None:
        """Refuse rows that the plan has no room for, and ids that were here before."""
        if self._is_broken or self._due:
            raise InvalidInput("an earlier call failed half-way; fit again from the start")
        if os.getpid() != self._pid:
            raise InvalidInput(
                "this process is a fork of the one that owns the stream, and both would use the "
                "same noise; save() in the owner and load() here"
            )
        if self.horizon is not None and self.rows + rows > self.horizon:
            raise HorizonExceeded(
                f"{self.rows} rows of a horizon of {self.horizon} were learned, {rows} more came; "
                "plan a longer horizon for a new model, or horizon=None"
            )
        found = self.units.check(rows, ids)
        if found is not None and found.kind and not self.units.kind:
            self.release.ledger.bind("ids", found.kind)
        self._due = rows * self.passes  # from here on an interrupt leaves units without rows
        self.units.take(found)

    def feed(self, x: Any, y: Targets, weight: Array | None = None) -> None:
        """Learn from rows that were admitted, in order."""
        self._is_broken = True
        at, total = 0, x.shape[0]
        while at < total:
            if self.horizon is None and self._in_phase == self.phase.rows * self.phase.passes:
                self.end_run(keep_keys=True)  # a killed process comes back to where it was saved
                if self.has_ids and self.release.released < self._phase_steps:
                    self.units.drop(self._in_phase)  # nobody will ask for the rows of these steps
                self._begin()
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

    def end_run(self, *, keep_keys: bool = False) -> None:
        """Bring the evidence of the phase up to date and let go of it."""
        if not self.has_ended:
            self.release.close_run(keep_keys=keep_keys)
        self.has_ended = True

    def extend(self) -> None:
        """After `close`, more rows came: new ones, which form phases of their own."""
        if self.passes > 1:  # its units stayed for the next pass
            self.units.drop()
        self.horizon, self.passes, self.is_closed, self._run = None, 1, False, None

    def _release(self) -> None:
        """The batch leaves: its units are admitted, its row is written, noise, division."""
        self._sum_waiting()
        first, mean = (self._in_phase - self._held) % self.phase.rows, {self._name: self._sum}
        if self.release.folder is None:
            if self.has_ids and not self._defers_rows:
                self._write_row(self._phase_steps, first, self._held)
            is_same = True
        else:
            admission = self.release.admit(
                self._phase_steps, self._batch_units(first, self._held), _place(first, self._held)
            )
            is_same = self.release.commit(admission, self.release.digest(mean))
            self._drop_units(self._held)
        if is_same:
            self.release.add_noise_(mean)
            self.rule.update(mean[self._name].numpy(), step=self._phase_steps)
        elif self.skips_replays:  # its charge stays, and nothing is learned from these rows
            self.release.skip()
        else:
            raise self.release.refusal(self._phase_steps)
        self._sum = torch.zeros_like(self._sum)
        self._held = 0
        self.steps += 1
        self._phase_steps += 1
        if self.show_fn is not None:
            self.show_fn(self.steps)

    @property
    def _defers_rows(self) -> bool:
        """Whether ledger rows wait until the stream is saved: nothing reads them before."""
        return self.release.folder is None and self.passes == 1

    def _write_row(self, step: int, first: int, held: int) -> None:
        """The row of a step in memory. It needs no digest: who could repeat the step has it all."""
        units = self._batch_units(first, held)
        self.release.open(self.release.admit(step, units, _place(first, held)))
        self._drop_units(held)

    def _batch_units(self, first: int, held: int) -> Ids | None:
        """Who the rows of a batch are: their ids, in a run folder else their places."""
        if not self.has_ids:
            return np.arange(first, first + held) if self.is_observed else None
        return self.units.first(held, after=first if self.passes > 1 else 0)

    def _drop_units(self, held: int) -> None:
        if self.has_ids and self.passes == 1:  # else they come again, in the same order
            self.units.drop(held)

    def _keep_units(self, rows: int) -> None:
        if self.has_ids and self.passes == 1:
            self.units.keep_last(rows)

    _COUNTS: ClassVar[tuple[str, ...]] = ("horizon", "passes", "is_closed", "rows", "steps")
    _COUNTS += ("_in_phase", "_phase_steps", "_held")

    def state(self) -> dict[str, Any]:
        """All but the keys, as tensors and plain values; for the owner's eyes only."""
        if self._is_broken or self._due:
            raise InvalidInput("an earlier call failed half-way; there is nothing whole to save")
        self._is_broken = True  # rows that were summed by half are neither here nor there
        self._sum_waiting()
        self._is_broken = False
        return {
            **{name: getattr(self, name) for name in self._COUNTS},
            "phases": [(phase.rows, phase.passes) for phase in self.phases],
            "sum": self._sum.clone(),
            **self.units.state(),
            "release": self.release.state_dict(),
            "test_key": self._source.key.hex() if self.is_test and self._source else "",
            "rule": self.rule.state(),
        }

    def move_into(self, folder: Path) -> None:
        """From now on the evidence of every phase is kept in a folder of a saved stream.

        Guarantees: where it raises, the stream goes on in memory as before.
        """
        per_pass = -(-self.phase.rows // self.phase.batch_size)
        for step in range(self.release.released, self._phase_steps):
            first = step % per_pass * self.phase.batch_size
            self._keep_units(self._in_phase - first)  # an earlier try may have ended behind a row
            self._write_row(step, first, min(self.phase.batch_size, self.phase.rows - first))
        self._keep_units(self._held)
        state, before = self.release.state_dict(), vars(self).copy()
        self.folder = folder
        try:
            self.release.keep_in(self._phase_folder())
            self._open(self._phase_folder())
            self.release.load_state_dict(state)
        except BaseException:
            made = self._phase_folder()
            vars(self).update(before)
            shutil.rmtree(made, ignore_errors=True)
            raise

    def load(self, state: dict[str, Any], folder: Path, *, account: Account | None = None) -> None:
        """Become the stream that wrote `state` into this folder, under fresh keys.

        Guarantees: the noise goes on at the row after the last one saved. Steps that were released
        since then are repeated only with the sums that they had; all later ones have noise that no
        other copy of the folder has.
        """
        key = bytes.fromhex(state["test_key"])
        self._source = Source(key, is_test=True) if key else None
        self.phases, self._account = [], account
        for rows, passes in state["phases"]:
            self.phases.append(
                make_phase(self.budget, rows=rows, passes=passes, batch_size=self.batch_size)
            )
            self.rule.start(self.phases[-1])
        for name in self._COUNTS:
            setattr(self, name, state[name])
        self.folder = folder
        self.units.load(state)
        self._open(self._phase_folder())
        self._sum, self._waiting = state["sum"].clone(), WaitingRows()
        self.release.load_state_dict(state["release"])
        self.rule.load(state["rule"])


def _place(first: int, rows: int) -> bytes:
    """By what a batch is known whose rows have no ids."""
    return f"rows {first} to {first + rows}".encode()
