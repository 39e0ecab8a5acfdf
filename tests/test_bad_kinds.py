"""What is of the wrong kind altogether is refused in one clear line, not deep inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle import MinSeparation, ModelLoss, Plan, SinglePass, privatize, verify
from noshuffle.accounting import calibrate, composition, fourier, mechanisms, renyi
from noshuffle.clipping import validate
from noshuffle.convex import PrivateLinearRegression, PrivateLogisticRegression
from noshuffle.errors import (
    InvalidInput,
    NoshuffleError,
    Unsupported,
    callables,
    instance_of,
    number_tuple,
    one_of,
    positive,
    record_list,
)
from noshuffle.federated import (
    LocalTraining,
    Rounds,
    ServerOptimizer,
    account_afterwards,
    clip_delta,
    local_train,
    observed_participation,
    participation_from_times,
    read_log,
    simulate,
    statement_for,
)
from noshuffle.federated.per_user import epsilon_of
from noshuffle.federated.simulate import in_random_order, in_stream_order
from noshuffle.federated.tasks import load_task
from noshuffle.federated.timer import Timer
from noshuffle.optim import FTRL, box
from noshuffle.participation import from_dict
from noshuffle.plan import compare
from noshuffle.strategies import (
    banded,
    blt,
    column_normalized,
    error,
    identity,
    momentum,
    sensitivity,
    sqrt_toeplitz,
    tree,
)
from noshuffle.strategies.fit import best, candidates, fit
from noshuffle.strategies.workload import cooldown
from noshuffle.training import RunFolder, fit_model

PLAN = Plan(participation=SinglePass(4), strategy=identity(), noise_multiplier=1.0)
LIMITS = MinSeparation(8, 4, 2)
BY_USER = Plan(participation=LIMITS, strategy=tree(), noise_multiplier=1.0, unit="user")
X = np.linspace(-1, 1, 24).reshape(8, 3)
Y = np.arange(8) % 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def privatized(model: Any = None, **more: Any) -> Any:
    model = nn.Linear(2, 1) if model is None else model
    settings = {"clip_norm": 1.0, "batch_size": 4, **more}
    return privatize(model, sgd(model.parameters()), settings.pop("plan", PLAN), **settings)


def server(parameters: Any = None, plan: Any = BY_USER, **more: Any) -> ServerOptimizer:
    parameters = {"w": torch.zeros(2)} if parameters is None else parameters
    settings = {"clip": 1.0, "cohort_size": 2, "optimizer_fn": sgd, **more}
    return ServerOptimizer(parameters, plan, **settings)


def simulated(**more: Any) -> Any:
    task = load_task("digits")
    settings = {
        "rounds": Rounds(server()),
        "model": nn.Linear(2, 2),
        "task": task,
        "local": LocalTraining(learning_rate=0.1),
        "check_ins": in_random_order(task.users[:3], seed=0),
        **more,
    }
    return simulate(settings.pop("rounds"), settings.pop("model"), settings.pop("task"), **settings)


def trained(**more: Any) -> Any:
    settings = {"model": nn.Linear(2, 2), "local": LocalTraining(learning_rate=0.1), **more}
    model = settings.pop("model")
    parameters = settings.pop("parameters", {})
    return local_train(model, parameters, torch.zeros(1, 2), torch.zeros(1), **settings)


def regressed(kind: Any = PrivateLogisticRegression, **more: Any) -> Any:
    ids = more.pop("ids", None)
    return kind(**{"epsilon": 1.0, "delta": 1e-3, **more}).fit(X, Y, ids=ids)


any_: Any = object()
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    # participation, plan, strategies
    "record": (lambda: from_dict(None), "participation must be dict, got NoneType"),
    "record, a field short": (lambda: from_dict({"kind": "single-pass"}), "cannot be read"),
    "plan of a number": (lambda: Plan.fit(3, noise_multiplier=1.0), "noshuffle's Participation"),
    "plan, participation": (
        lambda: Plan(participation=None, strategy=identity(), noise_multiplier=1.0),
        "participation must be noshuffle's Participation, got NoneType",
    ),
    "plan, strategy": (
        lambda: Plan(participation=SinglePass(2), strategy="tree", noise_multiplier=1.0),
        "strategy must be noshuffle's Strategy, got str",
    ),
    "plan, workload": (
        lambda: Plan.fit(LIMITS, mechanism="tree", noise_multiplier=1.0, workload=0.9),
        "workload must be noshuffle's Workload, got float",
    ),
    "compare": (lambda: compare(None, epsilon=1.0), "participation must be"),
    "compare, buffers": (lambda: compare(LIMITS, epsilon=1.0, max_buffers="x"), "max_buffers"),
    "fit": (lambda: fit("blt", None), "participation must be"),
    "fit, workload": (lambda: fit("blt", LIMITS, workload=any_), "workload must be"),
    "best": (lambda: best(None), "participation must be"),
    "candidates": (lambda: candidates(LIMITS, workload=3), "workload must be"),
    "sensitivity": (lambda: sensitivity(None, LIMITS), "strategy must be"),
    "error": (lambda: error("tree", 4), "strategy must be"),
    "error, workload": (lambda: error(tree(), 4, workload=1.0), "workload must be"),
    "column_normalized": (lambda: column_normalized(None, 4), "strategy must be"),
    "blt": (lambda: blt(0.5, 0.2), "decays must be a list of numbers, got 0.5"),
    "blt, taps": (lambda: blt((0.5,), (0.2,), (None,), 2), "taps must be a list of numbers"),
    "blt, gains": (lambda: blt((0.5,), (0.2,), gains=3, draw_gains=(1,)), "gains must be"),
    "banded, gains": (lambda: banded([1.0], gains="12"), "gains must be a list of numbers"),
    "sqrt_toeplitz": (lambda: sqrt_toeplitz(momentum=None), "momentum must be"),
    "momentum": (lambda: momentum("x"), "momentum must be a finite number"),
    "schedule": (lambda: momentum(0.5, learning_rates=3), "learning_rates must be a list"),
    "cooldown": (lambda: cooldown(None), "steps must be a whole number"),
    "cooldown, last": (lambda: cooldown(8, last=3), "last must be a probability"),
    # accounting
    "orders": (lambda: renyi.epsilon(noise_multiplier=1.0, delta=1e-5, orders=3), "orders must"),
    "order": (lambda: renyi.divergence(noise_multiplier=1.0, order=None), "order must be"),
    "curve": (lambda: renyi.epsilon_from_curve({}, None, delta=1e-5), "must be a list of numbers"),
    "steps": (lambda: renyi.compose_epsilon([3], delta=1e-5), "records of 3 values"),
    "releases": (lambda: fourier.compose(None), "releases must be a list, got NoneType"),
    "release": (lambda: fourier.compose([(1.0, 0.1)]), "records of 3 values"),
    "mixture": (lambda: fourier.MixtureRelease(1.0, 3, (1.0,)), "sensitivities must be a list"),
    "sequence": (lambda: composition.sequence([None]), "records of 2 values"),
    "laplace": (lambda: mechanisms.Laplace.fit(epsilon=1.0, delta="x"), "delta must be"),
    "search": (lambda: calibrate.smallest(3, 1.0), "fn must be a function, got 3"),
    "search, result": (
        lambda: calibrate.largest_whole(lambda n: None, 1.0),
        "what fn returns must be a number, got NoneType",
    ),
    "squared sensitivity": (
        lambda: calibrate.steps(
            epsilon=1.0, delta=1e-5, noise_multiplier=1.0, squared_sensitivity=-1
        ),
        "squared_sensitivity must be",
    ),
    # training
    "privatize, clip norm": (lambda: privatized(clip_norm="x"), "clip_norm must be"),
    "privatize, clip": (
        lambda: privatized(clip_norm=None, clip=3),
        r"clip \(a number goes to clip_norm\) must be noshuffle's QuantileClip, got int",
    ),
    "privatize, run": (lambda: privatized(run=3), "a run folder must be str or a path, got int"),
    "verify": (lambda: verify(None), "a run folder must be"),
    "run folder": (lambda: RunFolder([]), "a run folder must be"),
    "loss": (
        lambda: privatized().step(None, torch.zeros(4, 2), torch.zeros(4, 1)),
        "loss_fn must be a function, got None",
    ),
    "model loss": (lambda: ModelLoss(3), "fn must be a function"),
    "fit_model": (lambda: fit_model(nn.Linear(1, 1), [], nn.MSELoss()), "private must be"),
    "fit_model, batches": (lambda: fit_model(privatized(), 3, nn.MSELoss()), "batches must be"),
    "validate": (lambda: validate(lambda x: x), "model must be torch's Module, got function"),
    # federated
    "server, parameters": (lambda: server(3), "parameters must be torch's Module or a mapping"),
    "server, a parameter": (lambda: server({"w": [1.0]}), "parameter 'w' must be torch's Tensor"),
    "server, plan": (lambda: server(plan=None), "plan must be noshuffle's Plan, got NoneType"),
    "server, clip": (lambda: server(clip="x"), "clip_norm must be"),
    "server, rule": (lambda: server(optimizer_fn=None), "optimizer_fn must be a function"),
    "server, rule, result": (lambda: server(optimizer_fn=lambda p: 3), "optimizer must be torch's"),
    "server, users": (lambda: server().open("ada"), "users must be a list of ids, got 'ada'"),
    "server, cohort": (
        lambda: server().step({"w": torch.zeros(2)}, cohort=3),
        "users must be a list of ids, got 3",
    ),
    "server, sum": (lambda: server().step(3, cohort=["ada"]), "the sum must be a mapping or"),
    "server, a sum": (lambda: server().step({"w": 3}, cohort=["ada"]), "'w' of the sum must be"),
    "rounds": (lambda: Rounds(None), "server must be noshuffle's ServerOptimizer"),
    "check-ins": (lambda: Rounds(server()).begin({"ada": 1}), "users must be a list of ids"),
    "statement_for": (lambda: statement_for(None, "ada"), "server must be"),
    "epsilon_of": (lambda: epsilon_of(None, participations=1), "plan must be"),
    "account_afterwards": (lambda: account_afterwards(None, [["ada"]]), "plan must be"),
    "log": (lambda: observed_participation(3), "one list of users for every round, got 3"),
    "log of numbers": (lambda: observed_participation([3]), "users must be a list of ids, got 3"),
    "read_log": (lambda: read_log(None), "a run folder must be"),
    "times": (lambda: participation_from_times("x", seconds=1, most=1), "times must be a list"),
    "timer": (lambda: Timer(3, seconds=1, most=1), "path must be str or a path, got int"),
    "delta": (lambda: clip_delta(None, clip_norm=1.0), "delta must be a mapping"),
    "a delta": (lambda: clip_delta({"w": 3}, clip_norm=1.0), "'w' of the delta must be torch's"),
    "client, model": (lambda: trained(model=3), "model must be torch's Module"),
    "client, local": (lambda: trained(local={}), "local must be noshuffle's LocalTraining"),
    "simulate": (lambda: simulated(rounds=None), "rounds must be noshuffle's Rounds"),
    "simulate, task": (lambda: simulated(task="digits"), "task must be noshuffle's FederatedTask"),
    "simulate, check-ins": (lambda: simulated(check_ins=["ada"]), "check_ins must be a function"),
    "simulate, at once": (lambda: simulated(at_once=0.5), "at_once must be a whole number"),
    "simulate, progress": (lambda: simulated(progress=3), "progress must be a function"),
    "order of users": (lambda: in_random_order(3, seed=0), "users must be a list"),
    "order, seed": (lambda: in_random_order(["ada"], seed=-1), "seed must be a whole number"),
    "stream": (lambda: in_stream_order(None, rounds=2), "users must be a list"),
    "task": (lambda: load_task([]), "task must be one of"),
    # convex, optim
    "convex, ids": (lambda: regressed(ids=3), "ids must be a list, got int"),
    "convex, clip": (lambda: regressed(clip_norm="x"), "clip_norm must be"),
    "convex, epsilon": (lambda: regressed(epsilon=[]), "epsilon must be"),
    "convex, delta": (lambda: regressed(delta={}), "delta must be"),
    "convex, mechanism": (lambda: regressed(mechanism=[]), "mechanism must be str or noshuffle's"),
    "convex, bounds": (lambda: regressed(bounds=10**400), "bounds must be"),
    "regression, intercept": (
        lambda: regressed(PrivateLinearRegression, fit_intercept=None),
        "fit_intercept must be bool",
    ),
    "box": (lambda: box(None, 1.0), "low must be a number"),
    "ftrl": (lambda: FTRL([torch.zeros(1)], lr=0.1, momentum=None), "momentum must be"),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_clear_line(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(NoshuffleError, match=words) as found:
        call()
    assert "\n" not in str(found.value)


def test_half_an_intercept_is_no_intercept() -> None:
    """It would count as half of the constant column, while the whole of it is learned."""
    with pytest.raises(InvalidInput, match=r"fit_intercept must be bool or .*, got float"):
        regressed(fit_intercept=0.5)
    regressed(fit_intercept=np.True_)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_are_refused_in_one_line(tmp_path: Path) -> None:
    plain = nn.Linear(2, 1)
    inside = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(plain, torch.zeros(1, 2)))
    for model, words in (
        (torch.jit.script(plain), "the model is scripted or traced"),
        (torch.jit.trace(plain, torch.zeros(1, 2)), "the model is scripted or traced"),
        (inside, "layer '1' is scripted or traced"),
    ):
        with pytest.raises(Unsupported, match=words):
            privatized(model, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_checks_themselves() -> None:
    instance_of((int, str), a=1, b="x")
    callables(a=print, b=nn.Linear)
    assert number_tuple(a=np.array([1, 2], dtype=np.int32)) == (1.0, 2.0)
    assert number_tuple(a=(v for v in (1, math.inf))) == (1.0, math.inf)
    assert record_list(2, a=[(1, 2), [3, 4]]) == [(1, 2), (3, 4)]
    with pytest.raises(InvalidInput, match="a must be int or str, got the class int"):
        instance_of((int, str), a=int)
    with pytest.raises(InvalidInput, match="a must be a finite number > 0, got 1000"):
        positive(a=10**400)
    with pytest.raises(InvalidInput, match="a must be one of x; got array"):
        one_of(("x",), a=np.zeros(2))
    with pytest.raises(InvalidInput) as found:
        number_tuple(a=[*range(10**5), None])
    assert len(str(found.value)) < 100
