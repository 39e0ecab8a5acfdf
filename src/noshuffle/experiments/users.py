"""Users of `figure2`: their limits, strategies under them, the noise felt, ε; and runs trained.

    level = z/m · rms over rounds of ‖row t of (decayed sum ∘ momentum) C⁻¹‖,    m clients a round

is what a model feels of the noise multiplier z on its iterates; `felt` is that for z = m = 1.

    cohorts    whoever checks in, within the limits of a user; sampled lines: secret coin flips
    scores     test accuracy in % and loss of every run

Settings are those of `settings/figure2.toml`. Each run by itself is private with its ε; what all of
a study cost together is not counted. State: the task that was loaded last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.signal import lfilter

from noshuffle.participation import MinSeparation, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import Strategy, identity, sensitivity, tree
from noshuffle.strategies.base import ToeplitzStrategy

if TYPE_CHECKING:
    from noshuffle.federated.tasks import FederatedTask

Settings = Mapping[str, Any]


def limits(settings: Settings, *, population: int, cohort: int) -> MinSeparation:
    """What a user may do when `cohort` of `population` users take part in every round."""
    if cohort == settings["clients"]:
        apart, most = settings["separation"], settings["max_participations"]
    else:
        apart = max(1, min(settings["rounds"], population // cohort))
        most = math.ceil(settings["rounds"] / apart)
    return MinSeparation(settings["rounds"], apart, most)


def felt(strategy: Strategy, settings: Settings) -> float:
    """Noise on the iterates for unit draws and one client."""
    return _felt(strategy, settings["rounds"], settings["momentum"], settings["forget"])


@lru_cache(maxsize=256)
def _felt(strategy: Strategy, rounds: int, momentum: float, forget: float) -> float:
    noise = lfilter([1.0], [1.0, -momentum], strategy.noising(rounds), axis=0)
    noise = lfilter([1.0], [1.0, -forget], noise, axis=0)
    return float(np.sqrt(np.square(noise).sum(1).mean()))


def fitted(name: str, part: MinSeparation, settings: Settings) -> Strategy:
    """The strategy of a mechanism under these limits."""
    from noshuffle.strategies.fit import fit
    from noshuffle.strategies.workload import momentum

    if name == "tree":
        trees = [tree(restart_every=1 << e) for e in range(3, part.steps.bit_length() + 1)]
        return min(trees, key=lambda one: felt(one, settings) * sensitivity(one, part).value)
    if name != "blt":
        return identity()
    short = min(settings["fitted_to"], part.steps)
    apart = min(part.separation, short)
    most = min(part.max_participations, -(-short // apart))
    found = fit("blt", MinSeparation(short, apart, most), workload=momentum(settings["momentum"]))
    strategy = found.strategy
    if short < part.steps and isinstance(strategy, ToeplitzStrategy):
        # Columns that are scaled for a short run would not do for a longer one.
        strategy = replace(strategy, normalized=0)
    return strategy


def user_epsilon(
    name: str, strategy: Strategy, z: float, settings: Settings, *, population: int, cohort: int
) -> float | None:
    """ε of one user; None where it is not finite."""
    part: Participation = limits(settings, population=population, cohort=cohort)
    if name == "sampled":
        part = Poisson(settings["rounds"], min(1.0, cohort / population))
    plan = Plan(participation=part, strategy=strategy, noise_multiplier=z, delta=settings["delta"],
                unit="user")  # fmt: skip
    found = plan.epsilon()
    return found if math.isfinite(found) else None


@lru_cache(maxsize=1)
def user_task(name: str) -> FederatedTask:
    from noshuffle.federated.tasks import load_task

    return load_task(name)


@lru_cache(maxsize=1)
def without_validation_users(name: str) -> FederatedTask:
    from noshuffle.federated.tasks import without_validation

    return without_validation(user_task(name))


def _allowed(name: str, task: FederatedTask, settings: Settings, *, size: int) -> Participation:
    """When users of this task may take part."""
    if name == "sampled":
        return Poisson(settings["rounds"], min(1.0, size / len(task)))
    rule = limits(settings, population=len(task), cohort=size)
    everybody = user_task(settings["task"])
    if len(task) < len(everybody):  # the search has fewer users and promises nothing
        rule = MinSeparation(rule.steps, max(1, len(task) // size), rule.steps)
    return rule


def train_users(
    settings: Settings, device: str, task: FederatedTask, name: str, strategy: Strategy,
    runs: Sequence[tuple[float, float]], *, size: int, seed: int,
) -> list[tuple[float, float]]:  # fmt: skip
    """Test accuracy in % and loss of every run: noise multipliers and server rates."""
    import torch

    from noshuffle.experiments import user_runs
    from noshuffle.federated import LocalTraining, ServerOptimizer
    from noshuffle.federated.char_models import NAMES, build
    from noshuffle.federated.simulate import evaluate
    from noshuffle.federated.word_models import WordLSTM
    from noshuffle.strategies.workload import cooldown
    from noshuffle.training import models

    torch.backends.cuda.matmul.allow_tf32 = True

    def make() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if settings["model"] == "word_lstm":
                return WordLSTM(task.classes).to(device)
            if settings["model"] in NAMES:
                made = build(settings["model"], classes=task.classes, length=task.shape[0])
                return made.to(device)
            return models.build(settings["model"], task.shape, task.classes).to(device)

    part = _allowed(name, task, settings, size=size)
    servers = [
        ServerOptimizer(
            make(),
            Plan(participation=part, strategy=strategy, noise_multiplier=z,
                 delta=settings["delta"], unit="user"),
            clip=settings["clip_norm"],
            cohort_size=size,
            optimizer_fn=partial(torch.optim.SGD, lr=rate, momentum=settings["momentum"]),
        )
        for z, rate in runs
    ]  # fmt: skip
    user_runs.train(
        make(),
        servers,
        task,
        local=LocalTraining(
            learning_rate=settings["client_rate"],
            steps=settings["local_steps"],
            batch_size=settings["local_batch"],
        ),
        seed=seed,
        learning_rates=cooldown(settings["rounds"]),
        at_once=settings["at_once"],
    )
    scores = [evaluate(make(), server.parameters(), task) for server in servers]
    return [(round(100 * accuracy, 3), loss) for loss, accuracy in scores]
