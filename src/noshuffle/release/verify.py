"""verify: does a run folder support its own statement?

Everything is recomputed from the evidence, and every disagreement is one sentence:

    plan          canonical, and its hash is the one that ledger and statement were written under
    ledger        hash chain whole from its first row; steps 0, 1, 2, … without a gap, at most the
                  planned number; every unit of every step admitted by the participation; the
                  summary per unit equal to the steps; facts equal to those in the chain; noise
                  scale = noise multiplier × clip norm
    keys          where they still are: secret draws, users of rounds, lives (`seal.by_keys`);
                  where they are gone: what was checked before they were destroyed
    checkpoints   files equal to their digests in the ledger; noise state of this plan
    files         equal to their digests in the ledger (config, metrics, report, …)
    statement     equal, field by field, to the one that plan, ledger and ancestors give, and about
                  a row that the ledger has

It reads and never writes; no model, data or device is needed. The fingerprint of a batch and the
digest of a sum need the data: they are for a replay, and are not worked out again here.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from noshuffle.errors import NoshuffleError
from noshuffle.noise.step_plan import fingerprint as recipe_name
from noshuffle.plan import Plan
from noshuffle.release import checkpoint, guard
from noshuffle.release.facts import TEST_SEED, notes_of
from noshuffle.release.files import file_digest, read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import described
from noshuffle.release.ledger_file import late_digests
from noshuffle.release.ledger_tables import Evidence, Row, broken_link
from noshuffle.release.opening import known_steps
from noshuffle.release.seal import by_keys, signature_failure
from noshuffle.release.spending import Ancestor, spent
from noshuffle.release.units import UnitTable, name_to_id
from noshuffle.release.verdict import Verdict


@dataclass
class _Found:
    """What is collected on the way."""

    run: RunFolder
    plan: Plan
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, str | None] = field(default_factory=dict)
    lives: list[dict[str, Any]] = field(default_factory=list)
    refuted: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)


def verify(path: str | Path, *, public_key: str | Path | None = None) -> Verdict:
    """Recompute the guarantee of a run folder from its evidence.

    Guarantees: nothing in the folder can be changed without an answer other than PROVED, except by
    making ledger, files and statement anew together, which a signature shows (`public_key`). It
    cannot know what was never recorded.
    """
    run = RunFolder(path)
    try:
        plan = run.plan()
    except (NoshuffleError, OSError, UnicodeDecodeError) as error:
        return Verdict(str(path), (f"plan.json cannot be read: {error}",))
    found = _Found(run, plan)
    if run.plan_file.read_bytes() != plan.to_json().encode():
        found.refuted.append("plan.json is not in canonical form: it was edited")
    try:
        evidence = Evidence(run.ledger_file)
    except (sqlite3.DatabaseError, OSError) as error:
        line = f"ledger.sqlite cannot be read: {error}"
        return Verdict(str(path), (*found.refuted, line))
    try:
        is_signed = _ledger(found, evidence, public_key)
    except (sqlite3.DatabaseError, ValueError, TypeError, KeyError, AttributeError) as error:
        found.refuted.append(f"ledger.sqlite is damaged: {error}")
        return Verdict(str(path), tuple(found.refuted))
    finally:
        evidence.close()
    _checkpoints(found)
    statement = _statement(found)
    return Verdict(
        str(path),
        tuple(dict.fromkeys(found.refuted)),
        tuple(dict.fromkeys(found.unchecked)),
        tuple(_not_private(found)),
        tuple(found.checked),
        is_signed,
        len(found.rows),
        plan.steps,
        len(found.lives),
        statement[0],
        statement[1],
    )


def _ledger(found: _Found, evidence: Evidence, public_key: str | Path | None) -> bool:
    """Everything that needs the ledger open; whether it is signed."""
    broken = broken_link(evidence.db)
    if broken is not None:
        found.refuted.append(broken)
    meta = evidence.facts()
    found.rows = list(evidence.rows())
    found.lives = [json.loads(event.body) for event in evidence.log("life")]
    ends = [found.rows[i].time for i in (0, -1)] if found.rows else []
    is_sampled = found.plan.participation.is_sampled
    units = None if is_sampled else len(np.unique(_joined(found.rows)))
    # A process that only opened the run has changed nothing that the statement speaks of.
    rows = _told_rows(found.run)
    told, budget = (
        [json.loads(e.body) for e in evidence.log(kind) if rows is None or e.seq <= rows]
        for kind in ("life", "budget")
    )
    found.facts = described(meta, told, budget, ends=ends, units=units)
    found.refuted += _facts(found, evidence, meta)
    found.refuted += _steps(found)
    found.refuted += _participation(found)
    found.refuted += _summary(found, evidence)
    found.refuted += _batches(found)
    _keys(found, evidence)
    _digests(found, evidence)
    _saved(found, evidence)
    found.refuted += _head(found, evidence)
    return _signature(found, evidence, public_key)


def _told_rows(run: RunFolder) -> int | None:
    """How many rows the ledger had when statement.json was written."""
    try:
        return int(read_json(run.statement_file)["ledger_rows"])
    except (OSError, json.JSONDecodeError, ValueError, KeyError, TypeError):
        return None


def _joined(rows: list[Row]) -> Any:
    return np.concatenate([np.empty(0, dtype=np.int64), *(row.units for row in rows)])


def _facts(found: _Found, evidence: Evidence, meta: dict[str, str]) -> Iterator[str]:
    plan = found.plan
    chained = dict(json.loads(event.body) for event in evidence.log("fact"))
    for name in sorted((meta.keys() | chained.keys()) - {"summarised"}):
        if meta.get(name) != chained.get(name):
            yield f"the ledger says {name} = {meta.get(name)}, its chain {chained.get(name)}"
    if meta.get("plan") != plan.hash:
        yield "the ledger was written under another plan than plan.json"
    if meta.get("unit") != plan.unit:
        yield f"the ledger counts {meta.get('unit')}s, the plan protects one {plan.unit}"
    clip = re.fullmatch(r"Flat\((?:clip_norm=|norm=|c=)?([0-9.e+-]+)\)", meta.get("clip", ""))
    if clip is not None and meta.get("adaptive_clip") == "no":
        scale = plan.noise_multiplier * float(clip.group(1))
        if not math.isclose(scale, float(meta.get("noise_scale", "nan")), rel_tol=1e-12):
            yield (
                f"the noise scale on record is {meta.get('noise_scale')}, the plan's noise "
                f"multiplier times the clip norm is {scale!r}"
            )


def _steps(found: _Found) -> Iterator[str]:
    rows, plan = found.rows, found.plan
    wrong = next((i for i, row in enumerate(rows) if row.step != i), None)
    if wrong is not None:
        yield f"the ledger lacks step {wrong}"
    if len(rows) > plan.steps:
        yield f"{len(rows)} steps were released, the plan covers {plan.steps}"
    for row in rows:
        if row.claimed_units != len(row.units):
            yield f"step {row.step} claims {row.claimed_units} units and lists {len(row.units)}"
            return
        if not 0 <= row.life < len(found.lives):
            yield f"step {row.step} is of life {row.life}, the ledger has {len(found.lives)}"
            return
    if known_steps(found.run) > len(rows):
        yield (
            f"the ledger has {len(rows)} steps, checkpoints or statement.json know of "
            f"{known_steps(found.run)}: rows were cut or lost"
        )


def _participation(found: _Found) -> Iterator[str]:
    """Replay every step through the rules."""
    rule = found.plan.participation
    if rule.is_sampled:
        return
    table = UnitTable()
    for row in found.rows:
        if len(np.unique(row.units)) < len(row.units):
            yield f"step {row.step} lists a unit twice"
            return
        seen = table.look_up(row.units)
        mask = guard.is_admitted(rule, step=row.step, seen=seen)
        if not mask.all():
            i = int(np.flatnonzero(~mask)[0])
            reason = guard.why_not(
                rule,
                step=row.step,
                first=int(seen.first[i]),
                last=int(seen.last[i]),
                count=int(seen.count[i]),
            )
            unit = int(row.units[i])
            yield f"unit {unit} should not have taken part in step {row.step}: {reason}"
            return
        table.update(
            row.units, step=row.step, first=guard.starts_anew(rule, step=row.step, seen=seen)
        )


def _summary(found: _Found, evidence: Evidence) -> Iterator[str]:
    """The summary per unit must follow from the steps it covers."""
    covered, saved = evidence.saved_units()
    rule = found.plan.participation
    if rule.is_sampled:
        return
    if covered > len(found.rows):
        yield f"the summary of units covers {covered} steps, the ledger has {len(found.rows)}"
        return
    table = UnitTable()
    for row in found.rows[:covered]:
        anew = guard.starts_anew(rule, step=row.step, seen=table.look_up(row.units))
        table.update(row.units, step=row.step, first=anew)
    ids, seen = table.all()
    expected = list(zip(*(a.tolist() for a in (ids, seen.first, seen.last, seen.count))))
    if expected != saved:
        yield "the summary of units does not follow from the recorded steps"


def _batches(found: _Found) -> Iterator[str]:
    if found.facts.get("identified_by") == "fingerprints":
        for row in found.rows:  # none at all: the batch was dropped, and noise alone was released
            if len(row.units) and row.units.tolist() != [name_to_id(row.batch)]:
                yield f"step {row.step} lists another unit than its batch"
                return


def _keys(found: _Found, evidence: Evidence) -> None:
    """With the keys if they are there, else what was checked before they were destroyed."""
    if found.run.key_file.exists():
        try:
            ring = found.run.ring()
        except NoshuffleError as error:
            found.refuted.append(f"the keys cannot be read: {error}")
            return
        failures, checked = by_keys(ring, found.plan, found.rows, found.facts, found.lives)
        found.refuted += failures
        found.checked += checked
        return
    seals = [json.loads(event.body) for event in evidence.log("seal")]
    if seals:
        found.checked += [
            f"before the keys were destroyed: {line}" for line in seals[-1]["checked"]
        ]
    else:
        found.unchecked.append(
            "what needs the keys, which are not in the folder although the run was not sealed"
        )


def _digests(found: _Found, evidence: Evidence) -> None:
    late = late_digests(evidence.log("digest"))
    late.update({row.step - 1: row.late for row in found.rows if row.late})
    skipped = {json.loads(event.body)["step"] for event in evidence.log("skip")}
    missing = [
        row.step
        for row in found.rows
        if not row.digest and row.step not in late and row.step not in skipped
    ]
    if missing:
        found.unchecked.append(
            f"what was released in step {missing[0]}"
            + (f" and {len(missing) - 1} others" if len(missing) > 1 else "")
            + ": no digest of the sum reached the ledger (a crash, or the run is not closed)"
        )


def _saved(found: _Found, evidence: Evidence) -> None:
    """Files of checkpoints and of the folder against their digests in the ledger."""
    newest: dict[int, dict[str, str]] = {}
    for event in evidence.log("checkpoint"):
        body = json.loads(event.body)
        newest[int(body["step"])] = body["files"]
    paths = {
        int(path.name.rpartition("-")[2]): path for path in checkpoint.saved(found.run.checkpoints)
    }
    for step, path in paths.items():
        if step not in newest:
            found.refuted.append(f"the ledger does not know of the checkpoint {path.name}")
            continue
        if name := checkpoint.changed(path, newest[step]):
            found.refuted.append(f"checkpoints/{path.name}/{name} is not what was saved")
    if newest and max(newest) not in paths:
        found.unchecked.append(f"the checkpoint of step {max(newest)}, which is not in the folder")
    told: dict[str, list[Any]] = {}
    for event in evidence.log("files"):
        told = json.loads(event.body)["files"]
    for name, (digest, size) in told.items():
        if name == found.run.plan_file.name:
            continue  # compared by itself
        _file(found, found.run.path / name, digest, int(size))
    ours = (found.run.plan_file.name, *told)
    for name in (*found.run.published(), *found.run.unknown()):
        if name not in ours:
            found.unchecked.append(f"{name}, which the ledger does not know of")


def _file(found: _Found, path: Path, digest: str, size: int) -> None:
    if not path.exists():
        found.unchecked.append(f"{path.name}, which is not in the folder any more")
        return
    if file_digest(path) == digest:
        return
    data = path.read_bytes()
    if path.suffix == ".jsonl" and len(data) > size and _sha(data[:size]) == digest:
        found.unchecked.append(f"lines of {path.name} that came after the last row of the ledger")
    else:
        found.refuted.append(f"{path.name} is not what the ledger says")


def _sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def _head(found: _Found, evidence: Evidence) -> Iterator[str]:
    """The row that statement.json is about must be there."""
    try:
        record = read_json(found.run.statement_file)
        rows, link = int(record["ledger_rows"]), str(record["ledger_link"])
    except (OSError, json.JSONDecodeError, ValueError, KeyError, TypeError):
        return  # said by `_statement`
    if _links(evidence).get(rows, "") != link:
        yield f"row {rows} of the ledger is not the one that statement.json was written after"


def _links(evidence: Evidence) -> dict[int, str]:
    both = "SELECT seq, link FROM steps UNION ALL SELECT seq, link FROM log"
    return {int(seq): bytes(link).hex() for seq, link in evidence.db.execute(both)}


def _signature(found: _Found, evidence: Evidence, public_key: str | Path | None) -> bool:
    if not found.run.signature_file.exists():
        if public_key is not None:
            found.refuted.append("there is no signature.json in the folder")
        return False
    try:
        wrong = signature_failure(found.run, found.plan, _links(evidence), public_key=public_key)
    except (OSError, json.JSONDecodeError) as error:
        wrong = f"signature.json cannot be read: {error}"
    if wrong is not None:
        found.refuted.append(wrong)
        return False
    if public_key is None:
        found.unchecked.append("whose signature it is (give public_key=)")
    return True


def _checkpoints(found: _Found) -> None:
    """The noise that a saved state goes on with must be that of the plan."""
    saved = checkpoint.saved(found.run.checkpoints)
    if not saved:
        return
    try:
        state = torch.load(saved[-1] / "state.pt", map_location="cpu", weights_only=True)
        noise = state.get("noise")
        told = {name: str(state[name]) for name in ("plan", "key", "batch_size") if name in state}
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        found.refuted.append(f"{saved[-1].name}/state.pt cannot be read ({type(error).__name__})")
        return
    for name, said in told.items():
        if said != found.facts.get(name):
            found.refuted.append(
                f"{saved[-1].name} was saved with {name} = {said}, the ledger says "
                f"{found.facts.get(name)}"
            )
    if noise is None:
        return
    plan = found.plan
    own = {
        "recipe": recipe_name(plan.strategy.recipe(plan.steps)),
        "scale": float(found.facts.get("noise_scale") or "nan"),
        "horizon": plan.steps,
    }
    for name, planned in own.items():
        if noise.get(name) != planned:
            found.refuted.append(
                f"{saved[-1].name} goes on with noise of another {name} than the plan's"
            )


#: What statement.json holds beside the statement itself.
_BOOKKEEPING = ("plan_hash", "planned_steps", "released_steps", "ledger_rows", "ledger_link")
#: What differs as a matter of course where it covers another number of steps.
_BY_STEPS = ("assumptions", "epsilon", "mu", "rho", "sensitivity", "squared_sensitivity", "exact")


def _statement(found: _Found) -> tuple[float | None, float | None]:
    """Compare statement.json with the statement that the evidence gives; its ε and δ."""
    run, plan, released = found.run, found.plan, len(found.rows)
    try:
        notes = notes_of(found.facts)
        expected = spent(plan, released, ancestors=run.ancestors(), notes=notes)
    except (NoshuffleError, OSError, ValueError, KeyError, TypeError) as error:
        found.refuted.append(f"no statement follows from the evidence: {error}")
        return None, None
    try:
        record = read_json(run.statement_file)
        told = {name: value for name, value in record.items() if name not in _BOOKKEEPING}
    except (OSError, json.JSONDecodeError, AttributeError, ValueError) as error:
        found.refuted.append(f"statement.json cannot be read: {error}")
        return expected.epsilon, expected.delta
    if record.get("plan_hash") != plan.hash:
        found.refuted.append("statement.json was written under another plan")
    if record.get("planned_steps") != plan.steps:
        found.refuted.append(
            f"statement.json speaks of {record.get('planned_steps')} planned steps"
        )
    behind = record.get("released_steps") != released
    if behind:
        found.refuted.append(
            f"statement.json covers {record.get('released_steps')} steps, the ledger has "
            f"{released}; resume the run to bring it up to date"
        )
    plain = json.loads(json.dumps(expected.to_dict()))
    for name in sorted(plain.keys() | told.keys()):
        if behind and name in _BY_STEPS:
            continue
        if not _agree(told.get(name), plain.get(name)):
            found.refuted.append(
                f"statement.json says {name} = {told.get(name)}, the evidence says "
                f"{plain.get(name)}"
            )
    return expected.epsilon, expected.delta


def _agree(told: Any, expected: Any) -> bool:
    """Equal; for numbers up to the last digits that another machine may round differently."""
    if isinstance(told, float) and isinstance(expected, float):
        return math.isclose(told, expected, rel_tol=1e-9, abs_tol=0.0)
    return bool(told == expected)


def _ancestors(found: _Found) -> tuple[Ancestor, ...]:
    try:
        return found.run.ancestors()
    except (NoshuffleError, OSError, ValueError, KeyError, TypeError):
        return ()  # said by `_statement`


def _not_private(found: _Found) -> Iterator[str]:
    if found.facts.get("test_key") == "yes":
        yield "the noise comes from a named test seed, which anybody can use to remove it"
    elif any(TEST_SEED in ancestor.notes for ancestor in _ancestors(found)):
        yield "a run that it was forked from has the noise of a named test seed"
    if found.plan.noise_multiplier == 0:
        yield "the plan has no noise"
