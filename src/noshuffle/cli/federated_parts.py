"""The parts of a federated run, each a function of its settings: the same every time they are made.

`assemble` puts them together in a run folder, begun or resumed. Everything that is random in a
simulation (who comes, who fails to answer) is a function of seed and round, never of the past.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from noshuffle.cli.federated_settings import (
    IMAGE_MODELS,
    INDEPENDENT,
    TEXT_MODELS,
    FederatedSettings,
    Limits,
    clip_of,
    limits_of,
)
from noshuffle.cli.mechanisms import mechanism_named
from noshuffle.cli.run_home import begun
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, one_of
from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, char_models
from noshuffle.federated.cohort import UserId
from noshuffle.federated.server import OptimizerFn
from noshuffle.federated.simulate import CheckIns, in_random_order, in_stream_order
from noshuffle.federated.tasks import FederatedTask, load_task
from noshuffle.federated.word_models import WordLSTM
from noshuffle.noise import test_source
from noshuffle.optim import FTRL
from noshuffle.participation import MinSeparation, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.release.account import Account
from noshuffle.release.threshold import bit_noise_for, changes_every
from noshuffle.strategies.workload import Workload, cooldown
from noshuffle.training import RunFolder, models

_TASKS = {"drama": "german_drama", "writers": "mnist_writers"}
#: The noisy counts of an adaptive clip may use up to this share of the budget.
_COUNT_SHARE = 0.1


@dataclass(frozen=True)
class Job:
    settings: FederatedSettings
    task: FederatedTask
    model: nn.Module
    limits: Limits | None
    rounds: Rounds
    local: LocalTraining
    check_ins: CheckIns
    answers: Callable[[int, UserId], bool] | None

    @property
    def server(self) -> ServerOptimizer:
        return self.rounds.server

    def set_rate(self) -> None:
        """Learning rate of the coming round: constant, then linearly down over the last part."""
        if self.settings.cooldown:
            steps = self.server.plan.steps
            factors = cooldown(steps, last=self.settings.cooldown)
            rate = self.settings.server_lr * factors[min(self.server.round, steps - 1)]
            for group in self.server.optimizer.param_groups:
                group["lr"] = rate


def make_model(settings: FederatedSettings, task: FederatedTask) -> nn.Module:
    torch.manual_seed(settings.seed)
    is_text = task.kind == "text"
    chosen = settings.model or ("lstm" if is_text else "mlp")
    one_of(TEXT_MODELS if is_text else IMAGE_MODELS, **{f"model for {task.kind}": chosen})
    if chosen == "word_lstm":
        return WordLSTM(task.classes).to(settings.device)
    if is_text:
        name, length = f"char_{chosen}", task.shape[0]
        return char_models.build(name, classes=task.classes, length=length).to(settings.device)
    name = models.default_for("image", task.shape) if chosen == "cnn" else chosen
    return models.build(name, task.shape, task.classes).to(settings.device)


def make_plan(settings: FederatedSettings, task: FederatedTask) -> Plan:
    limits = limits_of(settings, users=len(task))
    participation: Participation = Poisson(settings.rounds, settings.clients_per_round / len(task))
    if limits is not None:
        participation = MinSeparation(settings.rounds, limits.separation, limits.max_participations)
    name = "identity" if settings.mechanism in INDEPENDENT else settings.mechanism
    has_momentum = settings.server_optimizer in ("ftrl", "momentum")
    return Plan.fit(
        participation,
        mechanism=mechanism_named(name),
        epsilon=settings.epsilon,
        noise_multiplier=settings.noise_multiplier,
        delta=settings.delta,
        unit="user",
        workload=Workload(beta=settings.server_momentum if has_momentum else 0.0),
    )


def make_clip(settings: FederatedSettings, plan: Plan) -> float | QuantileClip:
    """A clip norm, or one that follows a quantile with counts that leave most of the budget."""
    quantile, start = clip_of(settings.clip)
    if quantile is None:
        return start
    if not changes_every(plan.strategy):
        raise InvalidInput(
            f"--clip adaptive does not go with --mechanism {settings.mechanism}, whose noise is "
            "correlated over the whole run; use --mechanism dp-fedavg, or a number for --clip"
        )
    least = bit_noise_for(plan, share=_COUNT_SHARE)
    units = settings.clients_per_round
    return QuantileClip(
        initial=start, units=units, quantile=quantile, bit_noise=max(units / 20, least)
    )


def make_optimizer_fn(settings: FederatedSettings) -> OptimizerFn:
    lr, beta = settings.server_lr, settings.server_momentum
    kinds: dict[str, OptimizerFn] = {
        "ftrl": lambda params: FTRL(params, lr=lr, momentum=beta),
        "sgd": lambda params: torch.optim.SGD(params, lr=lr),
        "momentum": lambda params: torch.optim.SGD(params, lr=lr, momentum=beta),
        "adam": lambda params: torch.optim.Adam(params, lr=lr),
    }
    return kinds[settings.server_optimizer]


def make_check_ins(settings: FederatedSettings, task: FederatedTask) -> CheckIns:
    """Who comes in which round; a function of the round alone."""
    users: tuple[UserId, ...] = task.users
    if settings.order == "year":
        order = in_stream_order(users, rounds=settings.rounds)
    elif settings.order == "list" or settings.amplified:
        order = lambda step: users  # noqa: E731
    else:
        order = in_random_order(users, seed=settings.seed)
    if settings.check_in_rate == 1:
        return order

    def some(step: int) -> list[UserId]:
        comes = np.random.default_rng((settings.seed, step, 1)).random(len(users))
        here = {user for user, u in zip(users, comes) if u < settings.check_in_rate}
        return [user for user in order(step) if user in here]

    return some


def make_answers(
    settings: FederatedSettings, task: FederatedTask
) -> Callable[[int, UserId], bool] | None:
    """Whether a reply arrives; a function of round and user."""
    if not settings.drop_out:
        return None
    last: dict[int, Any] = {}

    def answers(step: int, user: UserId) -> bool:
        if step not in last:
            last.clear()
            last[step] = np.random.default_rng((settings.seed, step, 2)).random(len(task))
        return bool(last[step][task.place(user)] >= settings.drop_out)

    return answers


def assemble(
    settings: FederatedSettings, path: Path | None, budget: Account | None = None
) -> tuple[Job, tuple[int, ...]]:
    """The job in that folder, begun or resumed, and the rounds that had to be passed over."""
    task = load_task(_TASKS.get(settings.task, settings.task))
    if settings.amplified:  # a secret sampler draws numbers
        task = replace(task, users=tuple(range(len(task))))
    if not len(task.x_test):
        raise InvalidInput(
            f"{settings.task} has no held-out rows (x_test, y_test), on which a run is evaluated; "
            "give rows of other people, or public ones"
        )
    model = make_model(settings, task)
    folder = None if path is None else RunFolder(path)
    limits = limits_of(settings, users=len(task))
    is_begun = folder is not None and folder.is_started
    plan = folder.plan() if folder is not None and is_begun else make_plan(settings, task)
    clip = make_clip(settings, plan)
    local = LocalTraining(
        learning_rate=settings.client_lr,
        steps=settings.local_steps or 10**6,
        batch_size=settings.local_batch,
        epochs=settings.local_epochs,
        proximal=settings.proximal,
    )
    config = {"kind": "federated", **settings.to_dict()}
    draws = budget is not None
    # Nothing that is refused above leaves a folder behind.
    with (
        nullcontext()
        if folder is None or is_begun
        else begun(folder, config, draws_on_budget=draws)
    ):
        server = ServerOptimizer(
            model,
            plan,
            clip=clip,
            cohort_size=settings.clients_per_round,
            optimizer_fn=make_optimizer_fn(settings),
            source=None if settings.test_seed is None else test_source(seed=settings.test_seed),
            run=folder,
            budget=budget,
        )
    if settings.amplified:
        server.sampler(len(task))
    rounds = Rounds(server, save_every=settings.checkpoint_every)
    check_ins, answers = make_check_ins(settings, task), make_answers(settings, task)
    job = Job(settings, task, model, limits, rounds, local, check_ins, answers)
    return job, rounds.resume() if is_begun else ()
