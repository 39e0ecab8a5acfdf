"""verify: does a run folder support its own statement?

Everything is recomputed from the evidence, and every disagreement is one sentence:

    plan        canonical, and its hash is the one that ledger and statement were written under
    ledger      steps 0, 1, 2, … without a gap, at most the planned number; every unit of every
                step admitted by the participation; the summary per unit equal to the steps; the
                print of a federated round, and the unit that stands for a batch without ids
    statement   equal, field by field, to the one that plan, ledger and ancestors give

It reads and never writes; no model, data or device is needed. Secret draws, and the prints of
federated rounds, are checked where the key is still there. The print of a batch needs its data and
that of a state its parameters: these two are for a replay, and are not worked out again here.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.errors import NoshuffleError, VerificationFailed
from noshuffle.plan import Plan
from noshuffle.release import guard
from noshuffle.release.facts import ROUND_PRINTS, round_print
from noshuffle.release.files import read_json
from noshuffle.release.fingerprint import secret_of
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger_tables import Evidence, Row
from noshuffle.release.sampler import make_sampler
from noshuffle.release.spending import notes_of, spent
from noshuffle.release.units import UnitTable, name_to_id


@dataclass(frozen=True)
class Verdict:
    """What does not hold (nothing: verified), and what was found."""

    path: str
    failures: tuple[str, ...]
    released: int = 0
    planned: int = 0
    epsilon: float | None = None
    delta: float | None = None
    unchecked: tuple[str, ...] = ()

    @property
    def is_verified(self) -> bool:
        return not self.failures

    def words(self) -> str:
        """VERIFIED, or what is wrong, line by line."""
        if self.is_verified:
            lines = [
                f"VERIFIED: {self.released} of {self.planned} planned steps, "
                f"ε = {self.epsilon:.6g} at δ = {self.delta:g}"
            ]
        else:
            lines = [f"NOT VERIFIED: {self.path}", *(f"  - {f}" for f in self.failures)]
        return "\n".join([*lines, *(f"  (not checked: {u})" for u in self.unchecked)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        finite = self.epsilon is not None and math.isfinite(self.epsilon)
        return {
            "verified": self.is_verified,
            "path": self.path,
            "failures": list(self.failures),
            "unchecked": list(self.unchecked),
            "released_steps": self.released,
            "planned_steps": self.planned,
            "epsilon": self.epsilon if finite else None,
            "delta": self.delta,
        }

    def check(self) -> None:
        """Raise if anything does not hold."""
        if self.failures:
            raise VerificationFailed(f"{self.path}: {self.failures[0]}")


def verify(path: str | Path) -> Verdict:
    """Recompute the guarantee of a run folder from its evidence.

    Guarantees: a verdict without failures means that plan, ledger and statement agree, that no
    recorded unit left its participation, and that ε is what the accountant gives for the recorded
    steps. It cannot know what was never recorded.
    """
    run = RunFolder(path)
    try:
        plan = run.plan()
    except (NoshuffleError, OSError, UnicodeDecodeError) as error:
        return Verdict(str(path), (f"plan.json cannot be read: {error}",))
    failures: list[str] = []
    unchecked: list[str] = []
    if run.plan_file.read_bytes() != plan.to_json().encode():
        failures.append("plan.json is not in canonical form: it was edited")
    try:
        evidence = Evidence(run.ledger_file)
    except (sqlite3.DatabaseError, OSError) as error:
        return Verdict(str(path), (*failures, f"ledger.sqlite cannot be read: {error}"))
    try:
        facts = evidence.facts()
        failures += _plan_and_key(run, plan, facts)
        rows = list(evidence.rows())
        failures += _steps(plan, rows)
        failures += _participation(run, plan, rows, facts, unchecked)
        failures += _prints(run, rows, facts, unchecked)
        failures += _summary(plan, rows, evidence)
    except (sqlite3.DatabaseError, ValueError) as error:  # a corrupt blob, a missing table
        failures.append(f"ledger.sqlite is damaged: {error}")
        return Verdict(str(path), tuple(failures))
    finally:
        evidence.close()
    released = min(len(rows), plan.steps)
    try:
        expected = spent(plan, released, ancestors=run.ancestors(), notes=notes_of(facts))
        failures += _statement(run, plan, len(rows), expected.to_dict())
    except (NoshuffleError, KeyError, TypeError, json.JSONDecodeError) as error:
        return Verdict(str(path), (*failures, f"ancestors.json does not hold: {error}"))
    return Verdict(
        str(path),
        tuple(failures),
        len(rows),
        plan.steps,
        expected.epsilon,
        expected.delta,
        tuple(unchecked),
    )


def _plan_and_key(run: RunFolder, plan: Plan, facts: dict[str, str]) -> Iterator[str]:
    if facts.get("plan") != plan.hash:
        yield "the ledger was written under another plan than plan.json"
    if facts.get("unit") != plan.unit:
        yield f"the ledger counts {facts.get('unit')}s, the plan protects one {plan.unit}"
    if run.key_file.exists():
        try:
            if run.keys().source.fingerprint != facts.get("key"):
                yield "the key is not the one that the ledger was written under"
        except NoshuffleError as error:
            yield f"the key cannot be read: {error}"


def _steps(plan: Plan, rows: list[Row]) -> Iterator[str]:
    wrong = next((i for i, row in enumerate(rows) if row.step != i), None)
    if wrong is not None:
        yield f"the ledger lacks step {wrong}"
    if len(rows) > plan.steps:
        yield f"{len(rows)} steps were released, the plan covers {plan.steps}"
    for row in rows:
        if row.claimed_units != len(row.units):
            yield f"step {row.step} claims {row.claimed_units} units and lists {len(row.units)}"
            return


def _participation(
    run: RunFolder, plan: Plan, rows: list[Row], facts: dict[str, str], unchecked: list[str]
) -> Iterator[str]:
    """Replay every step through the rules."""
    if plan.participation.is_sampled:
        yield from _draws(run, plan, rows, facts, unchecked)
        return
    table = UnitTable()
    for row in rows:
        if len(np.unique(row.units)) < len(row.units):
            yield f"step {row.step} lists a unit twice"
            return
        seen = table.look_up(row.units)
        mask = guard.is_admitted(plan.participation, step=row.step, seen=seen)
        if not mask.all():
            i = int(np.flatnonzero(~mask)[0])
            reason = guard.why_not(
                plan.participation,
                step=row.step,
                first=int(seen.first[i]),
                last=int(seen.last[i]),
                count=int(seen.count[i]),
            )
            unit = int(row.units[i])
            yield f"unit {unit} should not have taken part in step {row.step}: {reason}"
            return
        anew = guard.starts_anew(plan.participation, step=row.step, seen=seen)
        table.update(row.units, step=row.step, first=anew)


def _draws(
    run: RunFolder, plan: Plan, rows: list[Row], facts: dict[str, str], unchecked: list[str]
) -> Iterator[str]:
    if not run.key_file.exists():
        unchecked.append("the secret draws, since the key is not in the folder")
        return
    population = facts.get("population")
    if population is None:
        if rows:
            yield "the ledger does not name the population that was sampled from"
        return
    try:
        sampler = make_sampler(
            plan.participation, key=run.keys().sampling, population=int(population)
        )
    except NoshuffleError as error:
        yield f"the sampler cannot be rebuilt: {error}"
        return
    for row in rows:
        if not np.array_equal(np.sort(row.units), sampler.draw(row.step)):
            yield f"step {row.step} holds other units than the secret sampler drew"
            return


def _prints(
    run: RunFolder, rows: list[Row], facts: dict[str, str], unchecked: list[str]
) -> Iterator[str]:
    """The prints of which everything is in the folder."""
    if facts.get("identified_by") == "fingerprints":
        for row in rows:  # none at all: the batch was dropped, and noise alone was released
            if len(row.units) and row.units.tolist() != [name_to_id(row.batch)]:
                yield f"step {row.step} lists another unit than its batch"
                return
    name, value = ROUND_PRINTS
    if not rows or not facts.keys() & {name, "user_ids"}:
        return  # not of a federated run
    if not run.key_file.exists():
        unchecked.append("the prints of the rounds, since the key is not in the folder")
        return
    if facts.get(name) != value and facts.get("user_ids") != "int":
        unchecked.append("the prints of the rounds, which an earlier version of noshuffle wrote")
        return
    try:
        secret = secret_of(run.keys().source.key)
    except NoshuffleError:
        return  # a failure already
    for row in rows:
        if row.batch != round_print(row.step, row.units, secret=secret):
            yield f"round {row.step} lists other users than those it was opened for"
            return


def _summary(plan: Plan, rows: list[Row], evidence: Evidence) -> Iterator[str]:
    """The summary per unit must follow from the steps it covers."""
    covered, saved = evidence.saved_units()
    if plan.participation.is_sampled:
        return
    if covered > len(rows):
        yield f"the summary of units covers {covered} steps, the ledger has {len(rows)}"
        return
    table = UnitTable()
    for row in rows[:covered]:
        seen = table.look_up(row.units)
        anew = guard.starts_anew(plan.participation, step=row.step, seen=seen)
        table.update(row.units, step=row.step, first=anew)
    ids, seen = table.all()
    expected = list(zip(*(a.tolist() for a in (ids, seen.first, seen.last, seen.count))))
    if expected != saved:
        yield "the summary of units does not follow from the recorded steps"


#: What statement.json holds beside the statement itself.
_BOOKKEEPING = ("plan_hash", "planned_steps", "released_steps")
#: What differs as a matter of course where it covers another number of steps.
_BY_STEPS = ("assumptions", "epsilon", "mu", "rho", "sensitivity", "squared_sensitivity")


def _statement(
    run: RunFolder, plan: Plan, released: int, expected: dict[str, Any]
) -> Iterator[str]:
    try:
        record = read_json(run.statement_file)
        told = {name: value for name, value in record.items() if name not in _BOOKKEEPING}
    except (OSError, json.JSONDecodeError, AttributeError, ValueError) as error:
        yield f"statement.json cannot be read: {error}"
        return
    if record.get("plan_hash") != plan.hash:
        yield "statement.json was written under another plan"
    if record.get("released_steps") != released:
        yield (
            f"statement.json covers {record.get('released_steps')} steps, the ledger has "
            f"{released}; resume the run to bring it up to date"
        )
    if record.get("planned_steps") != plan.steps:
        yield f"statement.json speaks of {record.get('planned_steps')} planned steps"
    is_behind = record.get("released_steps") != released
    for name in sorted(expected.keys() | told.keys()):
        if is_behind and name in _BY_STEPS:
            continue
        says, is_so = told.get(name), expected.get(name)
        if not _agree(says, is_so):
            yield f"statement.json says {name} = {says}, the evidence says {is_so}"


def _agree(told: Any, expected: Any) -> bool:
    """Equal; for numbers up to the last digits that another machine may round differently."""
    if isinstance(told, float) and isinstance(expected, float):
        return math.isclose(told, expected, rel_tol=1e-9, abs_tol=0.0)
    return bool(told == expected)
