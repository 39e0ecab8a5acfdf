"""Drivers of the contract suite besides central training: federated, convex, studies."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from tests.release.driver import DIVISOR, Driver, Spy

from noshuffle.convex.losses import hinge
from noshuffle.convex.phases import Phase, PhaseBudget, make_phase
from noshuffle.convex.saved import MODEL, STREAM, read_stream, write_stream
from noshuffle.convex.solvers import ftrl
from noshuffle.convex.stream import LearningStream
from noshuffle.errors import ParticipationViolation
from noshuffle.federated import Rounds, ServerOptimizer
from noshuffle.noise import Source
from noshuffle.plan import Plan
from noshuffle.release.release import Release

#: Rows of a step.
UNITS = 4


class Federated(Driver):
    """A round a step: ServerOptimizer and Rounds, saved when the suite says so."""

    passes_over = True
    refusal = (ParticipationViolation, "user 2 may not take part in round 1")

    def fit(self, plan: Plan) -> Plan:
        return replace(plan, unit="user")

    def build(self, folder: Path | None, plan: Plan, source: Source | None, width: int) -> None:
        self.run = ServerOptimizer(
            {"w": torch.zeros(width)},
            plan,
            clip=1.0,
            cohort_size=DIVISOR,
            optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            run=folder,
            source=source,
        )
        self.ledger, self.engine = self.run.ledger, Spy(None)
        self.rounds = Rounds(self.run, save_every=1000)
        if folder is not None:
            self.rounds.resume()

    @property
    def at(self) -> int:
        return int(self.run.round)

    def step(self, rows: np.ndarray, ids: Any) -> np.ndarray:
        before = self.run.parameters()["w"]
        asked = self.rounds.begin(ids)
        assert asked is not None
        assert asked.users == tuple(ids)
        for user, row in zip(ids, torch.from_numpy(rows)):
            self.rounds.receive(user, {"w": row})
        self.engine.calls += 1
        after = self.rounds.finish().parameters["w"]
        return (after - before).double().numpy() * DIVISOR

    def wrong(self) -> None:
        """`Rounds.begin` asks only those whom the plan admits; who names a cohort is refused."""
        self.run.open([4, 5, 2, 7])

    def epsilon(self) -> float:
        return float(self.run.statement().epsilon)

    def save(self) -> None:
        self.rounds.save()

    def close(self) -> None:
        self.rounds.close()


class RowSum:
    """A rule of a learning stream: the rows themselves are summed, and the last mean is kept."""

    clip_norm, learning_rate, watch = 1.0, 1.0, None

    def __init__(self, width: int) -> None:
        self.size, self.calls, self.weights = width, 0, np.zeros((1, width))

    def start(self, phase: Phase) -> None:
        pass

    def clipped_sum(self, x: np.ndarray, y: Any) -> np.ndarray:
        self.calls += 1
        return np.asarray(x.sum(0))

    def update(self, mean: np.ndarray, *, step: int) -> None:
        self.weights = mean[None].copy()

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


def budget_of(plan: Plan) -> PhaseBudget:
    """What the convex half is told in the place of a noise multiplier; ε to six digits."""
    return PhaseBudget(epsilon=round(plan.epsilon(), 6), delta=plan.delta, mechanism=plan.strategy)


class Learning(Driver):
    """The stream behind partial_fit, saved into a folder as an estimator does it."""

    absent: ClassVar = {
        "nan": "an estimator refuses rows that are not finite before its stream sees them",
        "secret_positions": "rows are taken in the order in which they come",
    }
    refusal = (ParticipationViolation, "id 2 came twice and the plan allows one row each")
    first_lives = 2  # in memory, then in the folder

    def fit(self, plan: Plan) -> Plan:
        rows = UNITS * plan.steps
        return make_phase(budget_of(plan), rows=rows, passes=1, batch_size=UNITS).plan

    def evidence(self, folder: Path) -> Path:
        return folder / "phase-1"

    def build(self, folder: Path | None, plan: Plan, source: Source | None, width: int) -> None:
        self.engine, self.folder = RowSum(width), folder
        self.run = LearningStream(
            self.engine,
            budget_of(plan),
            source=source,
            horizon=UNITS * plan.steps,
            batch_size=UNITS,
        )
        assert self.run.phase.plan == plan
        if folder is not None and (folder / STREAM).exists():
            self.run.load(read_stream(folder), folder)
        elif folder is not None:
            if folder.exists():  # killed in its first save: nothing was learned yet
                shutil.rmtree(folder)
            folder.mkdir()
            (folder / MODEL).touch()
            self.run.move_into(folder)
            self.save()
        self.ledger = self.run.release.ledger

    @property
    def at(self) -> int:
        return int(self.run.steps)

    @property
    def released(self) -> int:
        """In memory rows of the ledger come with a save: what left was counted by the stream."""
        return super().released if self.folder is not None else self.at

    def step(self, rows: np.ndarray, ids: Any) -> np.ndarray:
        self.run.admit(len(rows), ids)
        self.run.feed(rows, np.zeros(len(rows)))
        return np.asarray(self.engine.weights[0] * UNITS)

    def statement(self) -> Any:
        return self.run.release.statement()

    def epsilon(self) -> float:
        return float(self.run.release.epsilon_after(self.released))

    def save(self) -> None:
        assert self.folder is not None
        write_stream(self.folder, self.run, SimpleNamespace())

    def close(self) -> None:
        self.run.end_run()

    def door(self) -> Release:
        return self.run.release


class SolverRun(Driver):
    """`ftrl` on a hinge loss whose iterates stay so short that its gradients are the rows."""

    absent: ClassVar = {
        "replay": "a solver is one call in memory, and has no steps to come back to",
        "first_save": "a solver keeps no folder",
        "copy": "a solver keeps no folder",
        "wrong_ids": "a table has no ids; rows outside the loss's bounds are refused (last test)",
        "epsilon": "a solver shows its whole run or nothing, and states the ε of the whole",
        "kill": "a solver keeps no folder",
        "kill_thirty_times": "a solver keeps no folder",
        "secret_positions": "a solver keeps no folder",
    }
    refuses_nan, has_folder = True, False
    pull = 2.0**20  # λ: a power of two, so that iterates times λ are sums to the bit

    def fit(self, plan: Plan) -> Plan:
        fitted = make_phase(budget_of(plan), rows=plan.steps, passes=1, batch_size=1).plan
        return fitted

    def build(self, folder: Path | None, plan: Plan, source: Source | None, width: int) -> None:
        self.plan, self.at_end = plan, 0

    @property
    def at(self) -> int:
        return self.at_end

    def step(self, rows: np.ndarray, ids: Any) -> np.ndarray:
        return self.releases([(rows, ids)])[0]

    def releases(self, steps: list[tuple[np.ndarray, list[int]]]) -> list[np.ndarray]:
        x = np.concatenate([rows for rows, _ in steps])
        found = ftrl(
            hinge(),
            x,
            -np.ones(len(x)),
            epsilon=budget_of(self.plan).epsilon,
            delta=self.plan.delta,
            mechanism=self.plan.strategy,
            batch_size=UNITS,
            regularization=self.pull,
            output="last",
        )
        assert found.iterates is not None
        played = np.vstack([found.iterates, found.weights])
        return list(-np.diff(played, axis=0) * self.pull)
