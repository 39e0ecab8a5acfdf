"""History: what the log of a run says. A run that goes on, a fork, `verify` and reports read it.

    run                         header: plan, clip norm, noise scale, ancestors, order of the data
    start    step, row, nonce   a process goes on (`keys`)
    step     step, units        written before its sum; of a secret draw, or without names: no units
    part     step, units        a further part of the batch of that step
    fact     name, value        what the run is held to from then on
    checkpoint, saved, budget, close, end

State: the guard after the steps heard so far, and all rows but those of steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from noshuffle.errors import InvalidInput, VerificationFailed
from noshuffle.plan import Plan, PrivacyStatement
from noshuffle.release.folder import RunFolder
from noshuffle.release.log import Damaged, Log, Row, read
from noshuffle.release.spending import UNNAMED, Ancestor, notes_of, spent
from noshuffle.release.units import Guard, Ids, UnitLists

FORMAT = "noshuffle-run/1"
_STEPS = ("step", "part")


class History:
    """The rows of a run, in order, each held to the plan."""

    def __init__(self, plan: Plan, *, on_step: Callable[[int, Ids], None] | None = None) -> None:
        self.plan, self._on_step = plan, on_step
        self.guard = Guard(plan.guarded, groups=plan.unit == "user")
        self.lists = UnitLists()
        self.rows: list[Row] = []

    @classmethod
    def read(cls, run: RunFolder, *, on_step: Callable[[int, Ids], None] | None = None) -> History:
        """The history in a folder; nothing is written, and the run may be going on.

        A torn last line (being written, or cut by a kill) is no step of the run.
        """
        history = cls(run.plan(), on_step=on_step)
        if not run.is_started:
            raise InvalidInput(f"{run.path} holds no log of a run; give a run folder")
        try:
            for row in read(run.log_file):
                history.add(row)
        except Damaged as damage:
            if not damage.is_torn:
                raise
        return history

    def open_log(self, run: RunFolder | None) -> Log:
        """The log of a run, heard from its first row on, locked for this process; None: in memory.

        What is written from here on is kept here, too.
        """
        if run is None:
            log = Log(None, keeps=self.keeps)
        else:
            known = _known_links(run)
            log = Log(run.log_file, hear=self.hear, keeps=self.keeps, known=known)
        self.rows = log.rows
        return log

    def add(self, row: Row) -> None:
        """Hear a row of a log that somebody else writes, and keep it."""
        self.hear(row)
        if self.keeps(row):
            self.rows.append(row)

    @staticmethod
    def keeps(row: Row) -> bool:
        """Whether a row is kept in memory."""
        return row["kind"] not in _STEPS

    def hear(self, row: Row) -> None:
        """Take a row of the log: a step is admitted as it was when it was written.

        Guarantees: raises where its number or a unit of it does not fit the plan.
        """
        if row["kind"] not in _STEPS:
            return
        is_part = row["kind"] == "part"
        step = self.guard.steps - is_part
        if row.get("step") != step:
            raise VerificationFailed(f"step {row.get('step')} stands where step {step} should")
        units = None
        if "units" in row:
            try:
                units = self.lists.decode(step, row["units"])
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise VerificationFailed(f"the units of step {step} are damaged: {error}") from None
        admitted = self.guard.take(units, is_part=is_part)
        if self._on_step is not None:
            self._on_step(step, admitted.units)

    # -- what follows from the rows ------------------------------------------------------------

    @property
    def header(self) -> Row:
        """The first row."""
        if not self.rows or self.rows[0].get("format") != FORMAT:
            raise VerificationFailed(f"the log has no header of a {FORMAT}")
        return self.rows[0]

    @property
    def steps(self) -> int:
        """How many steps were released."""
        return self.guard.steps

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def has_ended(self) -> bool:
        return bool(self.of("end"))

    def facts(self) -> dict[str, str]:
        """What the run is held to, and what its rows add up to."""
        header = {name: str(value) for name, value in self.header.items() if name != "ancestors"}
        bound = {row["name"]: row["value"] for row in self.of("fact")}
        days = [row["day"] for row in self.rows if "day" in row]
        facts = {**header, **bound, "starts": str(len(self.of("start")))}
        facts |= {"first": days[0], "last": days[-1]} if days else {}
        for row in self.of("budget"):
            facts |= {"budget": row["origin"], "budget_words": row["words"]}
        if not self.plan.participation.is_sampled and len(self.guard.table):
            facts["records"] = str(len(self.guard.table))
        return facts

    def ancestors(self) -> tuple[Ancestor, ...]:
        """The runs that this one was forked from, oldest first."""
        return tuple(map(Ancestor.from_dict, self.header["ancestors"]))

    def as_ancestor(self) -> Ancestor:
        """What a fork of this run keeps of it."""
        facts = self.facts()
        return Ancestor(
            self.plan,
            self.steps,
            is_adaptive=facts["adaptive_clip"] == "yes",
            has_names=facts.get("ids") not in UNNAMED,
            notes=notes_of(facts),
            budget=facts.get("budget", ""),
        )

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with everything it rests on."""
        facts = self.facts()
        return spent(
            self.plan,
            self.steps,
            ancestors=self.ancestors(),
            notes=notes_of(facts),
            participation_checked=facts.get("ids") not in UNNAMED,
        )

    def statement_record(self, *, link: str) -> dict[str, Any]:
        """statement.json: the statement, and which steps and which newest row it is about."""
        return {
            **self.statement().to_dict(),
            "plan_hash": self.plan.hash,
            "planned_steps": self.plan.steps,
            "released_steps": self.steps,
            "log_link": link,
        }


def _known_links(run: RunFolder) -> list[str]:
    """The links that other files of the folder say the log has."""
    if not run.statement_file.exists():
        return []
    try:
        return [str(json.loads(run.statement_file.read_bytes())["log_link"])]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{run.statement_file} is damaged ({error}); bring it back") from None
