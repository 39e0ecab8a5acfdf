"""What a finished run folder can be asked: its statement beside its noise, its model by its losses.

    statement.json   ε of the steps that were released, against the rows that the plan emits; a run
                     that it was forked from, or that is NOT PRIVATE, is named as not checked
    checkpoints/     loss-threshold attack on the newest model, where its data set has a name

Keys of a finished run are destroyed, so its own noise cannot be seen again; `noshuffle verify`
checks the record of its steps. Training and held-out rows are not told apart by coins here: nothing
is concluded from the curve, it is to look at.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.auditing.answers import Finding
from noshuffle.auditing.membership import attack, losses_of
from noshuffle.auditing.prefixes import audit_plan
from noshuffle.datasets import NAMES, load
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.plan import Plan
from noshuffle.plan.statement import voids
from noshuffle.release.files import read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.folder import load as load_checkpoint
from noshuffle.release.history import History
from noshuffle.release.spending import UNNAMED
from noshuffle.training.models import build


@dataclass(frozen=True)
class _RunFiles:
    """What an audit reads of a run folder; `units` of its steps are None where nobody knows."""

    plan: Plan
    statement: dict[str, Any]
    config: dict[str, Any]
    earlier_runs: int
    newest: Path | None
    units: list[NDArray[np.int64]] | None


def _read(path: Path) -> _RunFiles:
    """The one place that knows the files of a run."""
    folder = RunFolder(path)
    if not folder.statement_file.is_file():
        raise InvalidInput(f"{path} has no statement.json; nothing is claimed")
    config = read_json(folder.config_file) if folder.config_file.is_file() else {}
    plan = folder.plan()
    saved, earlier, units = folder.saved(), 0, None
    with suppress(NoshuffleError, OSError, ValueError, KeyError):  # `verify` says it
        listed: list[NDArray[np.int64]] = []
        history = History.read(folder, on_step=lambda _, own: listed.append(own))
        earlier = sum(run.released > 0 for run in history.ancestors())
        is_listed = history.facts().get("ids") not in UNNAMED and not plan.participation.is_sampled
        units = listed if is_listed else None
    newest = saved[-1] if saved else None
    return _RunFiles(plan, read_json(folder.statement_file), config, earlier, newest, units)


def audit_run(path: Path, *, most_steps: int | None = None) -> list[Finding]:
    """Findings about the run in that folder."""
    run = _read(path)
    plan, said = run.plan, run.statement
    released = int(said.get("released_steps", plan.steps))
    epsilon = math.inf if said.get("epsilon") is None else float(said["epsilon"])
    if run.earlier_runs:  # beside ε of several runs, noise of this one that is too small would hide
        epsilon = min(epsilon, plan.epsilon_after(released))
    own = audit_plan(plan, stated={released: epsilon}, most_steps=most_steps)
    unseen = [own.left_out] if own.left_out else []
    if run.earlier_runs:
        runs = f"{run.earlier_runs} earlier run{'' if run.earlier_runs == 1 else 's'}"
        unseen.append(f"{runs}, which the statement of this fork counts")
    unseen += voids(said.get("assumptions", ()))
    found: list[Finding] = [replace(own, left_out="; ".join(unseen))]
    name, model = run.config.get("data"), run.config.get("model")
    if run.newest and name in NAMES and isinstance(model, str):
        found.append(_losses(run, load(name), model, released))
    return found


def _losses(run: _RunFiles, data: Any, name: str, released: int) -> Finding:
    """Members are the rows that steps were made of; all of them where nobody knows, or of users."""
    assert run.newest is not None
    model = build(name, data.shape, data.classes)
    model.load_state_dict(load_checkpoint(run.newest)["model"])
    rows = np.arange(len(data))
    if run.units and run.plan.unit == "example":
        rows = np.intersect1d(rows, np.concatenate(run.units))
    members = torch.from_numpy(rows)
    x = torch.cat([data.x_train[members], data.x_test])
    y = torch.cat([data.y_train[members], data.y_test])
    mu = run.plan.mu(released)
    claim = math.inf if mu is None else mu / run.plan.multiplier_of_sensitivity
    is_in = np.arange(len(x)) < len(members)
    return attack(losses_of(model, x, y), is_in, claimed_mu=claim, is_random=False)
