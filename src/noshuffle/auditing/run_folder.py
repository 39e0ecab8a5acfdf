"""The statement of a finished run beside the noise that its plan emits.

statement.json claims an ε for the steps that were released. A run that it was forked from, or that
is NOT PRIVATE, is named as not checked. Keys of a finished run are destroyed, so its own noise
cannot be seen again; `noshuffle verify` checks the record of its steps.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from noshuffle.auditing.prefixes import PlanAudit, audit_plan
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.plan.statement import voids
from noshuffle.release.files import read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History


def audit_run(path: Path, *, most_steps: int | None = None) -> PlanAudit:
    """Compare the statement of the run in that folder with the emitted noise."""
    folder = RunFolder(path)
    if not folder.statement_file.is_file():
        raise InvalidInput(f"{path} has no statement.json; nothing is claimed")
    plan, statement = folder.plan(), read_json(folder.statement_file)
    released = int(statement.get("released_steps", plan.steps))
    epsilon = math.inf if statement.get("epsilon") is None else float(statement["epsilon"])
    earlier, unseen = 0, []
    with suppress(NoshuffleError, OSError, ValueError, KeyError):  # `verify` says it
        earlier = sum(run.released > 0 for run in History.read(folder).ancestors())
    if earlier:  # beside ε of several runs, noise of this one that is too small would hide
        epsilon = min(epsilon, plan.epsilon_after(released))
        runs = f"{earlier} earlier run{'' if earlier == 1 else 's'}"
        unseen.append(f"{runs}, which the statement of this fork counts")
    unseen += voids(statement.get("assumptions", ()))
    audit = audit_plan(plan, stated={released: epsilon}, most_steps=most_steps)
    left_out = [audit.left_out] if audit.left_out else []
    return replace(audit, left_out="; ".join([*left_out, *unseen]))
