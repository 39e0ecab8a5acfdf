"""The federated job: rounds, progress, evidence, report; stopped and resumed at will.

A run that was told to stop ends after the round it is in, and resumes bit for bit. A run that was
killed has at most one round open per checkpoint; resuming passes over its row of noise, keeps the
charge, and goes on (see `federated.rounds`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from noshuffle.budget import Budget
from noshuffle.cli.budget import note_baseline
from noshuffle.cli.federated_parts import Job, assemble
from noshuffle.cli.federated_settings import FederatedSettings
from noshuffle.cli.federated_view import FederatedResult
from noshuffle.cli.job_view import JobProgress, Say, Stopped, Watch
from noshuffle.errors import NoshuffleError, ReplayRefused
from noshuffle.federated import simulate
from noshuffle.federated.per_user import spending
from noshuffle.federated.rounds import RoundReport
from noshuffle.federated.simulate import RoundProgress, evaluate
from noshuffle.federated.telemetry import need_flower
from noshuffle.report import write_report

#: Held-out rows of an evaluation on the way, spread over all; the last one takes every row.
_GLANCE = 1000
#: Raw counts: which of them a data set shows is not covered by ε, so they get a file of their own.
OPERATOR_FILE = "operator.jsonl"


def run_job(
    settings: FederatedSettings,
    path: Path,
    *,
    keep_keys: bool = False,
    watch: Watch | None = None,
    say: Say | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    budget: Budget | None = None,
) -> FederatedResult:
    """Train (or resume) the run in `path`, write its evidence and its report.

    Raises `Stopped` after the round during which `is_stopped` came true; everything is saved then.
    A finished run is sealed unless `keep_keys`.
    """
    say = say or (lambda _: None)
    began = time.perf_counter()
    if settings.engine == "flower":
        need_flower()
    say("fitting the mechanism")
    job, skipped = assemble(settings, path, budget)
    if job.limits is not None:
        say(f"Limits: {job.limits.words()}; {job.limits.why}.")
    for number in skipped:
        say(f"Round {number} was open when the run died: no update, its users stay charged.")
    first = job.server.round
    training = time.perf_counter()
    try:
        say("training")
        is_complete = _train(job, watch, is_stopped)
        training = time.perf_counter() - training
        loss, accuracy = evaluate(job.model, job.server.parameters(), job.task)
        _note(job, loss, accuracy, kind="summary")
        users, statement = spending(job.server), job.server.statement()
        job.rounds.save()
        write_report(path)  # before the ledger is closed, which then knows of the page
    finally:
        _let_go(job, keep_keys=keep_keys)
    baseline = None
    if settings.baseline:
        say("training once more without noise, for comparison")
        note_baseline(budget, replace(job.server.plan, noise_multiplier=0.0).statement())
        baseline = _baseline(settings)
    return FederatedResult(
        path=path,
        plan=job.server.plan,
        limits=job.limits,
        statement=statement,
        steps=job.server.round,
        rounds_now=job.server.round - first,
        training_seconds=training,
        is_complete=is_complete,
        skipped=skipped,
        accuracy=accuracy,
        loss=loss,
        baseline=baseline,
        seconds=time.perf_counter() - began,
        users=users,
    )


def _train(job: Job, watch: Watch | None, is_stopped: Callable[[], bool]) -> bool:
    """All rounds that are left; whether the plan was used to its end."""
    settings, server = job.settings, job.server
    every = settings.evaluate_every or max(1, settings.rounds // 20)
    stride = -(-len(job.task.x_test) // _GLANCE)
    glance = replace(job.task, x_test=job.task.x_test[::stride], y_test=job.task.y_test[::stride])
    first = server.round

    def after(where: RoundProgress) -> None:
        job.set_rate()
        accuracy = None
        if where.round % every == 0 or where.round == where.of:
            loss, accuracy = evaluate(job.model, where.report.parameters, glance)
            _note(job, loss, accuracy)
        _tell_operator(job, where.report)
        if watch is not None:
            done = where.round - first
            watch(JobProgress(where.round, where.of, done, where.seconds, where.epsilon, accuracy))
        if is_stopped() and where.round < where.of:
            raise Stopped

    job.set_rate()
    if settings.engine == "flower":
        return _on_flower(job, after)
    result = simulate(
        job.rounds,
        job.model,
        job.task,
        local=job.local,
        check_ins=job.check_ins,
        answers=job.answers,
        vectorise=settings.vectorise,
        progress=after,
    )
    return result.is_complete


def _on_flower(job: Job, after: Callable[[RoundProgress], None]) -> bool:
    """The same rounds on Flower's simulation, whose server runs in a thread of its own."""
    from noshuffle.federated.flower_simulation import run_flower_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    broken: list[Exception] = []

    def kept(where: RoundProgress) -> None:
        try:
            after(where)
        except Exception as error:  # Flower would log it and raise one of its own
            broken.append(error)
            raise

    try:
        result = run_flower_simulation(
            job.rounds,
            job.model,
            job.task,
            local=job.local,
            check_ins=job.check_ins,
            vectorise=job.settings.vectorise,
            progress=kept,
        )
    except Exception:
        if broken:
            raise broken[0] from None
        raise
    if broken:
        raise broken[0]
    return result.is_complete


def _note(job: Job, loss: float, accuracy: float, *, kind: str = "evaluation") -> None:
    """A line of metrics, from released values and held-out users only."""
    server = job.server
    if server.run is None:
        return
    row: dict[str, Any] = {
        "kind": kind,
        "step": server.round,
        "test_loss": loss,
        "test_accuracy": accuracy,
        "epsilon": server.statement().epsilon,
        "clip_norm": server.clip_norm,
        "learning_rate": float(server.optimizer.param_groups[0]["lr"]),
    }
    if kind == "summary":  # every task that can be asked for by name is a published data set
        words = f"examples of users of {job.settings.task} who took no part"
        row["test_data"] = {"words": words, "rows": len(job.task.x_test), "is_public": True}
    server.run.append_metrics(
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    )


def _tell_operator(job: Job, report: RoundReport) -> None:
    """Raw counts of a round, readable by the owner of the folder only."""
    folder = job.server.run
    if folder is None:
        return
    row = {
        "step": report.step,
        "asked": report.asked,
        "answered": report.answered,
        "nonfinite": report.nonfinite,
        "refused": len(report.refused),
    }
    handle = os.open(folder.path / OPERATOR_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(json.dumps(row).encode() + b"\n")


def _let_go(job: Job, *, keep_keys: bool) -> None:
    """Save, close, seal; an open round is given up, a torn one is left to the next resume."""
    try:
        job.rounds.close(keep_keys=keep_keys)
    except ReplayRefused:
        pass  # another process has gone on with the run: the folder is its own now
    except NoshuffleError:
        job.server.close()


def _baseline(settings: FederatedSettings) -> float:
    """The same users, order, clients and clip norm without noise. Not private, kept nowhere."""
    without: dict[str, Any] = {"epsilon": None, "noise_multiplier": 0.0, "test_seed": None}
    without["engine"] = "process"
    if not settings.amplified:
        without["mechanism"] = "identity"
    job, _ = assemble(replace(settings, **without), None)
    _train(job, None, lambda: False)
    return evaluate(job.model, job.server.parameters(), job.task)[1]
