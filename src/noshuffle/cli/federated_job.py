"""The federated job: rounds, progress, evidence, report; stopped and resumed at will.

A run that was told to stop ends after the round it is in, and resumes bit for bit. A run that was
killed has at most one round open per checkpoint; resuming passes over its row of noise, keeps the
charge, and goes on (see `federated.rounds`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from noshuffle.budget import Budget
from noshuffle.cli.budget import note_baseline
from noshuffle.cli.federated_parts import Job, assemble
from noshuffle.cli.federated_settings import FederatedSettings, Limits
from noshuffle.cli.job_view import JobProgress, JobResult, JobWords, Say, Stopped, Watch
from noshuffle.errors import NoshuffleError, ReuseRefused
from noshuffle.federated import simulate
from noshuffle.federated.clients import LossFn, cross_entropy, squared_error
from noshuffle.federated.per_user import Spending
from noshuffle.federated.rounds import RoundReport
from noshuffle.federated.simulate import RoundProgress, Simulation, evaluate
from noshuffle.federated.tasks import FederatedTask
from noshuffle.report import write_report
from noshuffle.rounding import up

#: Held-out rows of an evaluation on the way, spread over all; the last one takes every row.
_GLANCE = 1000
#: Exit status of a run that ended for want of users.
ENDED_EARLY = 5


@dataclass(frozen=True, kw_only=True)
class FederatedResult(JobResult):
    """A run of rounds; `skipped` are rounds lost to a crash before this start."""

    limits: Limits | None
    rounds_per_second: float
    is_complete: bool
    skipped: tuple[int, ...]
    loss: float
    users: tuple[Spending, ...]

    def rows(self, words: JobWords) -> list[tuple[str, str]]:
        limits = "none: cohorts are drawn by secret coin flips, which a network cannot promise"
        if self.limits is not None:
            is_derived = self.limits.is_separation_derived or self.limits.is_max_derived
            limits = self.limits.words() + (f" from {self.limits.why}" if is_derived else "")
        done = f"{self.steps} of {self.plan.steps} ({self.rounds_per_second:.1f} a second)"
        rows = [*super().rows(words), ("limits", limits), ("rounds", done)]
        if self.skipped:
            numbers = ", ".join(map(str, self.skipped))
            rows.append(("rounds passed over", f"{numbers} (open when the run died; charged)"))
        return rows

    @property
    def exit_code(self) -> int:
        """5 where users ran out before the plan did: what is released is private, and less."""
        return 0 if self.is_complete else ENDED_EARLY

    def tell(self, console: Console) -> None:
        """Who paid what, and what the limits left unused."""
        if self.users:
            table = Table(title="ε by how often a user was asked", title_justify="left")
            for heading in ("times asked", "users", "ε"):
                table.add_column(heading, justify="right")
            for row in self.users:
                table.add_row(str(row.participations), f"{row.users:,}", up(row.epsilon, places=3))
            console.print(table)
        if not self.is_complete:
            console.print("ended early: no user was free any more; the rest of the plan is unused")
        elif self.limits is not None and self.limits.shortage:
            console.print(
                f"the limits left at least {self.limits.shortage:,} invitations unfilled; ask "
                "fewer clients a round, or allow more participations"
            )

    def to_record(self) -> dict[str, Any]:
        return {
            **super().to_record(),
            "test_loss": self.loss,
            "rounds": self.steps,
            "is_complete": self.is_complete,
            "skipped_rounds": list(self.skipped),
            "rounds_per_second": self.rounds_per_second,
            "limits": None if self.limits is None else self.limits.to_record(),
            "users": [vars(row) for row in self.users],
        }


def loss_of(task: FederatedTask) -> LossFn:
    """Cross entropy for labels, the squared error for numbers (nothing is rescaled)."""
    return cross_entropy if task.has_labels else squared_error


def run_job(
    settings: FederatedSettings,
    path: Path,
    *,
    watch: Watch | None = None,
    say: Say | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    budget: Budget | None = None,
) -> FederatedResult:
    """Train (or resume) the run in `path`, write its evidence and its report.

    Raises `Stopped` after the round during which `is_stopped` came true; everything is saved then.
    """
    say = say or (lambda _: None)
    began = time.perf_counter()
    say("fitting the mechanism")
    job, skipped = assemble(settings, path, budget)
    if job.limits is not None:
        say(f"Limits: {job.limits.words()}; {job.limits.why}.")
    for number in skipped:
        say(f"Round {number} was open when the run died: no update, its users stay charged.")
    try:
        say("training")
        result = _train(job, watch, is_stopped)
        loss, accuracy = evaluate(job.model, result.parameters, job.task, loss_fn=loss_of(job.task))
        _note(job, loss, accuracy, kind="summary")
    finally:
        _let_go(job)
    write_report(path)
    baseline = None
    if settings.baseline:
        say("training once more without noise, for comparison")
        note_baseline(budget, replace(job.server.plan, noise_multiplier=0.0).statement())
        baseline = _baseline(settings)
    return FederatedResult(
        path=path,
        plan=job.server.plan,
        limits=job.limits,
        statement=result.statement,
        steps=job.server.round,
        rounds_per_second=result.rounds_per_second,
        is_complete=result.is_complete,
        skipped=skipped,
        accuracy=accuracy,
        error=None if job.task.has_labels else loss,
        loss=loss,
        baseline=baseline,
        seconds=time.perf_counter() - began,
        users=result.users,
    )


def _train(job: Job, watch: Watch | None, is_stopped: Callable[[], bool]) -> Simulation:
    settings, server = job.settings, job.server
    every = settings.evaluate_every or max(1, settings.rounds // 20)
    stride = -(-len(job.task.x_test) // _GLANCE)
    glance = replace(job.task, x_test=job.task.x_test[::stride], y_test=job.task.y_test[::stride])
    first = server.round

    def after(where: RoundProgress) -> None:
        job.set_rate()
        accuracy = error = None
        if where.round % every == 0 or where.round == where.of:
            loss, accuracy = evaluate(
                job.model, where.report.parameters, glance, loss_fn=loss_of(glance)
            )
            _note(job, loss, accuracy)
            error = None if job.task.has_labels else loss
        _tell_operator(job, where.report)
        if watch is not None:
            done = where.round - first
            told = (where.epsilon, accuracy, error)
            watch(JobProgress(where.round, where.of, done, where.seconds, *told))
        if is_stopped() and where.round < where.of:
            raise Stopped

    job.set_rate()
    return simulate(
        job.rounds,
        job.model,
        job.task,
        local=job.local,
        check_ins=job.check_ins,
        loss_fn=loss_of(job.task),
        answers=job.answers,
        vectorise=settings.vectorise,
        progress=after,
    )


def _note(job: Job, loss: float, accuracy: float, *, kind: str = "evaluation") -> None:
    """A line of metrics, from released values and held-out users only."""
    server = job.server
    if server.run is None:
        return
    row = {
        "test_loss": loss,
        **({"test_accuracy": accuracy} if job.task.has_labels else {"test_error": loss}),
        "epsilon": server.statement().epsilon,
        "clip_norm": server.clip_norm,
        "learning_rate": float(server.optimizer.param_groups[0]["lr"]),
    }
    test = {}
    if kind == "summary":  # every task that can be asked for by name is a published data set
        words = f"examples of users of {job.settings.task} who took no part"
        is_public = not job.settings.is_own
        about = {"words": words, "rows": len(job.task.x_test), "is_public": is_public}
        test = {"test_data": about}
    server.run.append_metrics({"kind": kind, "step": server.round, **row, **test})


def _tell_operator(job: Job, report: RoundReport) -> None:
    """Raw counts of a round, which ε does not cover: a file for the owner of the folder only.

    None where cohorts are secret draws: how many were asked is as secret as who.
    """
    folder = job.server.run
    if folder is None or job.server.plan.participation.is_sampled:
        return
    row = {name: getattr(report, name) for name in ("step", "asked", "answered", "nonfinite")}
    line = json.dumps({**row, "refused": len(report.refused)}) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with os.fdopen(os.open(folder.path / "operator.jsonl", flags, 0o600), "wb") as file:
        file.write(line.encode())


def _let_go(job: Job) -> None:
    """Save and close; an open round is given up, one that failed half-way is left to a resume."""
    try:
        job.rounds.close()
    except ReuseRefused:
        pass  # another process has gone on with the run: the folder is its own now
    except NoshuffleError:
        job.server.close()


def _baseline(settings: FederatedSettings) -> float:
    """The same users, order, clients and clip norm without noise. Not private, kept nowhere."""
    without: dict[str, Any] = {"epsilon": None, "noise_multiplier": 0.0, "test_seed": None}
    if not settings.amplified:
        without["mechanism"] = "identity"
    job, _ = assemble(replace(settings, **without), None)
    result = _train(job, None, lambda: False)
    loss, accuracy = evaluate(job.model, result.parameters, job.task, loss_fn=loss_of(job.task))
    return accuracy if job.task.has_labels else loss
