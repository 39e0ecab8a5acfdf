"""What a finished run folder can be asked: its statement beside its noise, its model by its losses.

    statement.json   ε of the steps that were released, against the rows that the plan emits; a run
                     that it was forked from, or that is NOT PRIVATE, is named as not checked
    checkpoints/     loss-threshold attack on the newest model, where its data set has a name

Keys of a finished run are destroyed, so its own noise cannot be seen again; `noshuffle verify`
checks the ledger. Training and held-out rows are not told apart by coins here: nothing is concluded
from the curve, it is to look at.
"""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from noshuffle.auditing.answers import Finding
from noshuffle.auditing.membership import attack
from noshuffle.auditing.prefixes import audit_plan
from noshuffle.auditing.training_run import losses_of
from noshuffle.datasets import NAMES, load
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.plan import Plan
from noshuffle.release import checkpoint
from noshuffle.release.files import read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger_tables import Evidence
from noshuffle.release.unit_ids import Ids
from noshuffle.statement import voids
from noshuffle.training.models import build


def audit_run(path: Path, *, most_steps: int | None = None) -> list[Finding]:
    """Findings about the run in that folder."""
    folder = RunFolder(path)
    plan = folder.plan()
    if not folder.statement_file.is_file():
        raise InvalidInput(f"{path} has no statement.json; nothing is claimed")
    said = read_json(folder.statement_file)
    released = int(said.get("released_steps", plan.steps))
    epsilon = said.get("epsilon")
    stated = {released: math.inf if epsilon is None else float(epsilon)} if released else {}
    config = read_json(folder.config_file) if folder.config_file.is_file() else {}
    earlier = sum(one.released > 0 for one in folder.ancestors())
    if earlier:  # beside ε of several runs, noise of this one that is too small would hide
        stated = {step: min(told, plan.epsilon_after(step)) for step, told in stated.items()}
    own = audit_plan(plan, stated=stated, most_steps=most_steps)
    unseen = [own.left_out] if own.left_out else []
    if earlier:
        runs = f"{earlier} earlier run{'' if earlier == 1 else 's'}"
        unseen.append(f"{runs}, which the statement of this fork counts")
    unseen += voids(said.get("assumptions", ()))
    found: list[Finding] = [replace(own, left_out="; ".join(unseen))]
    saved = checkpoint.saved(folder.checkpoints)
    if saved and config.get("data") in NAMES and isinstance(config.get("model"), str):
        found.append(_losses(folder, plan, saved[-1], config, released))
    return found


def _losses(
    folder: RunFolder, plan: Plan, path: Path, config: dict[str, object], released: int
) -> Finding:
    data = load(str(config["data"]))
    model = build(str(config["model"]), data.shape, data.classes)
    model.load_state_dict(checkpoint.load(path)["model"])
    members = torch.from_numpy(_members(folder, plan, len(data), config.get("batch_size")))
    x = torch.cat([data.x_train[members], data.x_test])
    y = torch.cat([data.y_train[members], data.y_test])
    is_in = np.arange(len(x)) < len(members)
    mu = plan.mu(released)
    claim = math.inf if mu is None else mu / plan.multiplier_of_sensitivity
    return attack(losses_of(model, x, y), is_in, claimed_mu=claim, is_random=False)


def _members(folder: RunFolder, plan: Plan, rows: int, batch: object) -> Ids:
    """The rows that steps were made of: examples are known by their rows, whatever their order.

    Users are trained in the order of the file, to the last whole batch of a pass. Who was drawn in
    secret is removed when a run is sealed: anybody may have been.
    """
    try:
        with closing(Evidence(folder.ledger_file)) as ledger:
            steps = list(ledger.rows())
    except (NoshuffleError, OSError, sqlite3.DatabaseError, ValueError):  # `verify` says it
        steps = []
    if not steps or any(one.is_removed for one in steps):
        return np.arange(rows)
    if plan.unit == "user":
        seen = min(len(steps), rows // batch) * batch if isinstance(batch, int) else rows
        return np.arange(seen)
    found = np.unique(np.concatenate([one.units for one in steps]))
    return found[(found >= 0) & (found < rows)]
