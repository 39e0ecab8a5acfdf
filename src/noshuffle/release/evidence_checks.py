"""What the ledger of a run folder must show: each check yields the sentences that refute it.

    chain, facts    whole from the first row; facts equal to those in it; noise scale = z·ζ
    steps, units    0, 1, 2, … without a gap, at most the planned number; every unit admitted by the
                    participation; the summary per unit equal to the steps it covers
    keys            where they still are: secret draws, users of rounds, lives (`seal.by_keys`);
                    where they are gone: what was checked before they were destroyed
    positions       who was drawn is removed where a seal says so, and nowhere else

What could not be checked, and what was, is noted in `Found`. State: none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noshuffle.errors import NoshuffleError
from noshuffle.plan import Plan
from noshuffle.release import guard
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger_tables import Evidence, Row, described, edits
from noshuffle.release.opening import steps_in_files
from noshuffle.release.seal import POSITIONS, REMOVED, by_keys, draws_line
from noshuffle.release.unfinished import SEAL
from noshuffle.release.unit_ids import name_to_id
from noshuffle.release.units import Ids, UnitTable


@dataclass
class Found:
    """What is collected on the way; `told` is statement.json, None where it cannot be read."""

    run: RunFolder
    plan: Plan
    evidence: Evidence
    told: dict[str, Any] | None
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, str | None] = field(default_factory=dict)
    lives: list[dict[str, Any]] = field(default_factory=list)
    refuted: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    exposed: list[str] = field(default_factory=list)
    is_signed: bool = False

    def told_rows(self) -> int | None:
        """How many rows the ledger had when statement.json was written."""
        rows = (self.told or {}).get("ledger_rows")
        return rows if type(rows) is int else None

    def _covered(self) -> float:
        """Up to which row lives and notes of the budget count, whatever statement.json says.

        A process that only opened the run after its last step has changed nothing that the
        statement speaks of; all that came before it counts.
        """
        (last,) = self.evidence.db.execute("SELECT max(seq) FROM steps").fetchone()
        opened = (e.seq for e in self.evidence.log("life") if e.seq > (last or 0))
        told = self.told_rows()
        return math.inf if told is None else max(told, next(opened, math.inf) - 1)

    def read_rows(self) -> None:
        """Steps, lives and facts, as the statement speaks of them."""
        evidence, covered = self.evidence, self._covered()
        self.rows = list(evidence.rows())
        self.lives = evidence.notes("life")
        ends = [self.rows[i].time for i in (0, -1)] if self.rows else []
        nobody = np.empty(0, dtype=np.int64)
        units = len(np.unique(np.concatenate([nobody, *(row.units for row in self.rows)])))
        lives, budget = (
            [json.loads(e.body) for e in evidence.log(kind) if e.seq <= covered]
            for kind in ("life", "budget")
        )
        counted = None if self.plan.participation.is_sampled else units
        self.facts = described(evidence.bound(), lives, budget, ends=ends, units=counted)


def chain(found: Found) -> Iterator[str]:
    """Rows and facts are as they were written."""
    yield from edits(found.evidence)


def facts(found: Found) -> Iterator[str]:
    """Facts are of this plan, and each was written once."""
    known: dict[str, Any] = {}
    for event in found.evidence.log("fact"):
        name, value = json.loads(event.body)
        if known.get(name) is not None:
            yield f"the fact {name} was changed"
        known[name] = value
    plan, meta = found.plan, found.evidence.bound()
    if meta.get("plan") != plan.hash:
        yield "the ledger was written under another plan than plan.json"
    if meta.get("unit") != plan.unit:
        yield f"the ledger counts {meta.get('unit')}s, the plan protects one {plan.unit}"
    yield from _scale(meta, plan)


def _scale(meta: Mapping[str, str], plan: Plan) -> Iterator[str]:
    """Noise of z times the clip norm."""
    clip = re.fullmatch(r"Flat\((?:clip_norm=|norm=|c=)?([0-9.e+-]+)\)", meta.get("clip", ""))
    if clip is not None and (meta.get("adaptive_clip") or "no") == "no":
        scale = plan.noise_multiplier * float(clip.group(1))
        if not math.isclose(scale, float(meta.get("noise_scale", "nan")), rel_tol=1e-12):
            yield (
                f"the noise scale on record is {meta.get('noise_scale')}, the plan's noise "
                f"multiplier times the clip norm is {scale!r}"
            )


def steps(found: Found) -> Iterator[str]:
    """Without a gap, within the plan, and as many as the rest of the folder knows of."""
    rows, plan = found.rows, found.plan
    wrong = next((i for i, row in enumerate(rows) if row.step != i), None)
    if wrong is not None:
        yield f"the ledger lacks step {wrong}"
    if len(rows) > plan.steps:
        yield f"{len(rows)} steps were released, the plan covers {plan.steps}"
    for row in rows:
        count = 0 if row.is_secret else len(row.units)
        if row.claimed_units != count:
            yield f"step {row.step} claims {row.claimed_units} units and lists {count}"
            return
        if not 0 <= row.life < len(found.lives):
            yield f"step {row.step} is of life {row.life}, the ledger has {len(found.lives)}"
            return
    if steps_in_files(found.run) > len(rows):
        yield (
            f"the ledger has {len(rows)} steps, checkpoints or statement.json know of "
            f"{steps_in_files(found.run)}: rows were cut or lost"
        )


def units(found: Found) -> Iterator[str]:
    """Every step again through the rules; the summary per unit follows from those it covers."""
    covered, saved = found.evidence.saved_units()
    if found.evidence.bound().get("summarised", str(covered)) != str(covered):  # " 5", which is 5
        yield "how many steps the summary of units covers was edited"
    if found.plan.participation.is_sampled:
        if saved:
            yield "the summary of units lists some, and secret draws have none"
        return
    table = UnitTable()
    rule, own = found.plan.guarded, found.facts.get("identified_by") == "fingerprints"
    rows = found.rows
    refused = [*guard.violations(rule, table, _units_of(rows[:covered]), by_content=own)]
    ids, seen = table.all()
    expected = list(zip(*(a.tolist() for a in (ids, seen.first, seen.last, seen.count))))
    refused += guard.violations(rule, table, _units_of(rows[covered:]), by_content=own)
    yield from refused[:1]
    if covered > len(found.rows):
        yield f"the summary of units covers {covered} steps, the ledger has {len(found.rows)}"
    elif expected != saved:
        yield "the summary of units does not follow from the recorded steps"


def _units_of(rows: list[Row]) -> Iterator[tuple[int, Ids]]:
    return ((row.step, row.units) for row in rows)


def batches(found: Found) -> Iterator[str]:
    """Without ids the unit of a step is its batch."""
    if found.facts.get("identified_by") == "fingerprints":
        for row in found.rows:  # none at all: the batch was dropped, and noise alone was released
            if len(row.units) and row.units.tolist() != [name_to_id(row.batch)]:
                yield f"step {row.step} lists another unit than its batch"
                return


def keys(found: Found) -> Iterator[str]:
    """With the keys if they are there, else what was checked before they were destroyed."""
    if found.run.key_file.exists():
        try:
            ring = found.run.ring()
        except NoshuffleError as error:
            yield f"the keys cannot be read: {error}"
            return
        except OSError as error:  # they are their owner's alone
            found.unchecked.append(
                f"what needs the keys, which could not be read ({error.strerror or error})"
            )
            return
        failures, checked = by_keys(ring, found.plan, found.rows, found.facts, found.lives)
        found.checked += checked
        yield from failures
    elif found.evidence.notes(SEAL):
        found.checked += [f"before the keys were destroyed: {line}" for line in sealed(found)]
    else:
        found.unchecked.append(
            "what needs the keys, which are not in the folder although the run was not sealed"
        )


def sealed(found: Found) -> list[str]:
    """What was checked with the keys before they were destroyed."""
    seals = found.evidence.notes(SEAL)
    return list(dict.fromkeys(line for note in seals for line in note["checked"]))


def positions(found: Found) -> Iterator[str]:
    """Secret lists of units are all there, or all gone by a seal that compared them before."""
    secret = [row for row in found.rows if row.is_secret]
    if secret and not found.plan.participation.is_sampled:
        yield f"step {secret[0].step} hides its units, and the plan has no secret draws"
        return
    gone = [row for row in secret if row.is_removed]
    states = [note["state"] for note in found.evidence.notes(POSITIONS)]
    if gone and (not states or "sealed" not in found.facts):
        yield f"step {gone[0].step} lists no units any more, and no seal removed them"
    elif gone and len(gone) < len(secret):
        yield f"step {gone[0].step} lists no units any more, and other steps do"
    elif secret and not gone and REMOVED in states:
        yield f"the units of step {secret[0].step} were removed by a seal, and are there again"
    elif gone and REMOVED not in states:
        found.unchecked.append(
            "whether the secret positions are gone from the disk: their removal did not come to "
            "its end (seal the run once more)"
        )
    elif gone:
        found.checked.append(
            f"the secret positions of {len(gone)} steps were removed by the seal; the chain holds "
            "a commitment to each"
        )
    if not found.rows or not found.plan.participation.is_sampled:
        return
    has_keys = found.run.key_file.exists()
    if (gone or not has_keys) and draws_line(len(found.rows)) not in sealed(found):
        found.unchecked.append("the secret draws: they were not compared with keys that are gone")
    listed = sum(not row.is_removed for row in found.rows)
    if listed and not has_keys:
        is_plain = all(row.is_removed for row in secret)
        how = "an earlier version wrote them" if is_plain else "noshuffle seal removes them"
        found.exposed.append(
            f"the ledger lists who was drawn in {listed} steps, which ε rests on nobody knowing: "
            f"keep it to yourself ({how})"
        )


def digests(found: Found) -> Iterator[str]:
    """Which sums a replay could be compared with."""
    known = found.evidence.late_digests().keys() | {r.step - 1 for r in found.rows if r.late}
    known |= {note["step"] for note in found.evidence.notes("skip")}
    missing = [row.step for row in found.rows if not row.digest and row.step not in known]
    if missing:
        found.unchecked.append(
            f"what was released in step {missing[0]}"
            + (f" and {len(missing) - 1} others" if len(missing) > 1 else "")
            + ": no digest of the sum reached the ledger (a crash, or the run is not closed)"
        )
    yield from ()


LEDGER_CHECKS = (chain, facts, steps, units, batches, keys, positions, digests)
