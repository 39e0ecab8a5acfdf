"""`figure2`: one user protected. Accuracy over ε (2a), over noise multipliers (2b), and privacy
against computation at fixed accuracy (2c).

    blt, tree    correlated noise, whoever checks in, within limits per user
    identity     independent noise under the same limits
    sampled      independent noise, cohorts drawn by secret coin flips (amplified)

Each is trained at `points` noise multipliers z. What the model feels is the noise on its iterates,

    level = z/m · rms over rounds of ‖row t of (decayed sum ∘ momentum) C⁻¹‖,    m clients a round

so rates are tried around `rate_noise`/level. 2c: the largest level that reaches a target (linear in
log level between trained points) stays the same for every m when z grows with m; ε follows from z
and the limits of m. Lines are computed; `trained_cohorts` are trained at the z that a line
predicts. Targets: the paper's, 2.6 % and 8.6 % below the model without noise, and ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.signal import lfilter

from noshuffle.experiments.figure import Cell, Figure, Request, Results
from noshuffle.experiments.figure2_view import CLAIMS, draw, table
from noshuffle.participation import MinSeparation, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import Strategy, from_dict, identity, sensitivity, tree
from noshuffle.strategies.base import ToeplitzStrategy

if TYPE_CHECKING:
    from noshuffle.federated.many import FederatedSetting
    from noshuffle.federated.tasks import FederatedTask

Settings = Mapping[str, Any]


@lru_cache(maxsize=1)
def _task(name: str) -> FederatedTask:
    from noshuffle.federated.tasks import load_task

    return load_task(name)


@lru_cache(maxsize=1)
def _without_validation(name: str) -> FederatedTask:
    from noshuffle.federated.tasks import without_validation

    return without_validation(_task(name))


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
    noise = lfilter(
        [1.0], [1.0, -settings["momentum"]], strategy.noising(settings["rounds"]), axis=0
    )
    noise = lfilter([1.0], [1.0, -settings["forget"]], noise, axis=0)
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


def _plan(
    name: str, strategy: Strategy, z: float, settings: Settings, *, population: int, cohort: int
) -> Plan:
    part: Participation = limits(settings, population=population, cohort=cohort)
    if name == "sampled":
        part = Poisson(settings["rounds"], min(1.0, cohort / population))
    return Plan(participation=part, strategy=strategy, noise_multiplier=z, delta=settings["delta"],
                unit="user")  # fmt: skip


def _epsilon(*given: Any, **more: Any) -> float | None:
    found = _plan(*given, **more).epsilon()
    return found if math.isfinite(found) else None


def _spaced(ends: Sequence[float], points: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.geomspace(ends[0], ends[1], points)


def _mechanisms(settings: Settings, results: Results) -> dict[str, Any]:
    """Strategy, noise multipliers, levels and ε of every mechanism."""
    population = len(_task(settings["task"]))
    part = limits(settings, population=population, cohort=settings["clients"])
    out: dict[str, Any] = {}
    for name in settings["mechanisms"]:
        strategy = fitted(name, part, settings)
        if name == "sampled":
            noise = _spaced(settings["sampled_noise"], settings["points"])
        else:
            reach = sensitivity(strategy, part).value
            noise = reach / _spaced(settings["mu"], settings["points"])
        spread = felt(strategy, settings)
        out[name] = {
            "strategy": strategy.to_dict(),
            "felt": spread,
            "noise": noise.tolist(),
            "level": (noise * spread / settings["clients"]).tolist(),
            "epsilon": [
                _epsilon(name, strategy, z, settings, population=population,
                         cohort=settings["clients"])
                for z in noise
            ],
        }  # fmt: skip
    return out


def _cohorts(name: str, task: FederatedTask, settings: Settings, size: int, seed: int) -> Any:
    """Who takes part in every round."""
    from noshuffle.federated import many
    from noshuffle.federated.simulate import in_random_order
    from noshuffle.noise import new_key
    from noshuffle.release.sampler import PoissonSampler

    if name == "sampled":
        part = Poisson(settings["rounds"], min(1.0, size / len(task)))
        sampler = PoissonSampler(part, len(task), key=new_key())
        return [sampler.draw(step) for step in range(settings["rounds"])]
    rule = limits(settings, population=len(task), cohort=size)
    if len(task) < len(_task(settings["task"])):  # the search has fewer users and promises nothing
        rule = MinSeparation(rule.steps, max(1, len(task) // size), rule.steps)
    order = in_random_order(task.users, seed=seed)
    return many.admitted_cohorts(rule, task, size=size, check_ins=order)


def _train(
    settings: Settings, device: str, task: FederatedTask, runs: Sequence[FederatedSetting],
    strategies: Mapping[str, Strategy], cohorts: Mapping[str, Any], size: int,
) -> list[tuple[float, float]]:  # fmt: skip
    """Test accuracy in % and loss of every run."""
    import torch

    from noshuffle.federated import many
    from noshuffle.federated.char_models import NAMES, build
    from noshuffle.federated.clients import LocalTraining
    from noshuffle.federated.word_models import WordLSTM
    from noshuffle.strategies.workload import cooldown
    from noshuffle.training import models

    torch.backends.cuda.matmul.allow_tf32 = True

    def make() -> Any:
        if settings["model"] == "word_lstm":
            return WordLSTM(task.classes)
        if settings["model"] in NAMES:
            return build(settings["model"], classes=task.classes, length=task.shape[0])
        return models.build(settings["model"], task.shape, task.classes)

    params = many.train_many(
        make, task, runs, cohorts=cohorts, strategies=strategies, rounds=settings["rounds"],
        cohort_size=size, learning_rates=cooldown(settings["rounds"]), device=device,
        local=LocalTraining(learning_rate=settings["client_rate"], steps=settings["local_steps"],
                            batch_size=settings["local_batch"]),
        at_once=settings["at_once"],
    )  # fmt: skip
    x, y = task.x_test, task.y_test
    if task.kind == "image":
        x, y = task.widen(x, y)
    losses, found = (part.cpu().tolist() for part in many.accuracies(make(), params, x, y))
    return [(round(100 * a, 3), loss) for a, loss in zip(found, losses)]


def _setting(settings: Settings, name: str, z: float, rate: float, who: str, seed: int) -> Any:
    from noshuffle.federated.many import FederatedSetting

    return FederatedSetting(
        mechanism=name, cohorts=who, noise_multiplier=z, server_rate=rate,
        client_rate=settings["client_rate"], clip_norm=settings["clip_norm"],
        momentum=settings["momentum"], seed=seed,
    )  # fmt: skip


def _search(
    settings: Settings, device: str, head: str, name: str, results: Results
) -> dict[str, dict[str, tuple[float, float]]]:
    """Accuracy and loss on validation users, by point and rate; "none" is without noise."""
    task = _without_validation(settings["task"])
    made = results[f"{head}/mechanisms"]
    if name == "none":
        name, points = "identity", {"none": (0.0, settings["largest_rate"])}
        factors = [f * g for f in (0.1, 1.0) for g in settings["factors"]]
    else:
        level, noise = made[name]["level"], made[name]["noise"]
        points = {
            str(i): (noise[i], min(settings["largest_rate"], settings["rate_noise"] / level[i]))
            for i in settings["searched"]
        }
        factors = settings["factors"]
    grid = [(key, z, centre * f) for key, (z, centre) in points.items() for f in factors]
    runs = [_setting(settings, name, z, rate, "all", 99) for _, z, rate in grid]
    who = {"all": _cohorts(name, task, settings, settings["clients"], 99)}
    strategies = {name: from_dict(made[name]["strategy"])}
    found = _train(settings, device, task, runs, strategies, who, settings["clients"])
    out: dict[str, dict[str, tuple[float, float]]] = {}
    for (key, _, rate), scores in zip(grid, found):
        out.setdefault(key, {})[f"{rate:.4g}"] = scores
    return out


def best_rate(tried: Mapping[str, Sequence[float]]) -> float:
    """The rate with the highest accuracy; the loss decides between equal ones.

    >>> best_rate({"0.1": (90.0, 0.4), "0.3": (90.0, 0.3), "1": (89.0, 0.2)})
    0.3
    """
    return float(max(tried, key=lambda rate: (tried[rate][0], -tried[rate][1])))


def rate_at(
    level: float, levels: Sequence[float], tried: Mapping[str, Mapping[str, Sequence[float]]]
) -> float:
    """The best rates of the searched points, interpolated: both axes in logarithms."""
    best = sorted((levels[int(i)], best_rate(rates)) for i, rates in tried.items())
    at, rates = (np.log(np.array(part)) for part in zip(*best))
    return float(np.exp(np.interp(np.log(level), at, rates)))


def _final(
    settings: Settings, device: str, head: str, name: str, seed: int, results: Results
) -> dict[str, list[float]]:
    """Test accuracy at every noise multiplier, one seed."""
    task, made = _task(settings["task"]), results[f"{head}/mechanisms"]
    tried = results[f"{head}/search/{name}"]
    if name == "none":
        name, noise = "identity", [0.0]
        rates = [best_rate(tried["none"])]
    else:
        noise, levels = made[name]["noise"], made[name]["level"]
        rates = [rate_at(level, levels, tried) for level in levels]
    runs = [_setting(settings, name, z, r, "all", seed) for z, r in zip(noise, rates)]
    who = {"all": _cohorts(name, task, settings, settings["clients"], seed)}
    strategies = {name: from_dict(made[name]["strategy"])}
    found = _train(settings, device, task, runs, strategies, who, settings["clients"])
    return {"rate": rates, "accuracy": [accuracy for accuracy, _ in found]}


def tolerated(levels: Sequence[float], accuracy: Sequence[float], target: float) -> float | None:
    """The largest noise on the iterates that reaches a target; None beyond what was trained.

    >>> round(tolerated([0.1, 1.0, 10.0], [90.0, 80.0, 50.0], 85.0), 3)
    0.316
    """
    pairs = sorted(zip(levels, accuracy))
    level = np.array([p[0] for p in pairs])
    falling = np.minimum.accumulate([p[1] for p in pairs])
    if not falling[-1] <= target <= falling[0]:
        return None
    return float(np.exp(np.interp(-target, -falling, np.log(level))))


def _targets(settings: Settings, head: str, results: Results, trials: int) -> dict[str, float]:
    """Accuracies to be reached, by words."""
    base = float(np.mean([results[f"{head}/final/none/{s}"]["accuracy"] for s in range(trials)]))
    paper = {f"{100 * r:g} % below no noise": base * (1 - r) for r in settings["relative_targets"]}
    return {**paper, **{f"{t:g} %": t for t in settings["targets"]}}


def _computation(
    settings: Settings, head: str, trials: int, results: Results
) -> list[dict[str, Any]]:
    """2c: ε over clients a round at every target, fixed strategy or fitted anew, the better one."""
    population, made = len(_task(settings["task"])), results[f"{head}/mechanisms"]
    again = {}
    for name in ("blt", "tree"):
        for m in settings["cohorts"]:
            if m <= population and name in made:
                part = limits(settings, population=population, cohort=m)
                again[name, m] = fitted(name, part, settings)
    lines = []
    for words, target in _targets(settings, head, results, trials).items():
        for name, record in made.items():
            mean = np.mean(
                [results[f"{head}/final/{name}/{s}"]["accuracy"] for s in range(trials)], 0
            )
            level = tolerated(record["level"], mean.tolist(), target)
            line: dict[str, Any] = {"target": words, "accuracy": target, "mechanism": name,
                                    "level": level, "points": []}  # fmt: skip
            own = from_dict(record["strategy"])
            for m in settings["cohorts"] if level is not None else ():
                if m > population:
                    continue
                found = []
                for strategy in [own, *([again[name, m]] if (name, m) in again else [])]:
                    z = level * m / felt(strategy, settings)
                    e = _epsilon(name, strategy, z, settings, population=population, cohort=m)
                    found.append((math.inf if e is None else e, z, strategy.to_dict()))
                e, z, chosen = min(found, key=lambda one: one[0])
                point = {"clients": m, "epsilon": e if math.isfinite(e) else None, "noise": z}
                line["points"].append({**point, "strategy": chosen})
            lines.append(line)
    return lines


def _cohort(
    settings: Settings, device: str, head: str, name: str, size: int, results: Results
) -> dict[str, Any] | None:
    """A trained point of 2c, at the last of our targets that the line knows; None without one."""
    lines = [line for line in results[f"{head}/computation"] if line["mechanism"] == name]
    points = [(line, p) for line in lines for p in line["points"] if p["clients"] == size]
    if not points:
        return None
    line, point = points[-1]
    made = results[f"{head}/mechanisms"][name]
    rate = rate_at(line["level"], made["level"], results[f"{head}/search/{name}"])
    task = _task(settings["task"])
    run = _setting(settings, name, point["noise"], rate, "all", 0)
    who = {"all": _cohorts(name, task, settings, size, 0)}
    strategies = {name: from_dict(point["strategy"])}
    found = _train(settings, device, task, [run], strategies, who, size)
    return {"target": line["target"], "wanted": line["accuracy"], "epsilon": point["epsilon"],
            "clients": size, "accuracy": found[0][0]}  # fmt: skip


def _study(settings: Settings, asked: Request) -> list[Cell]:
    """All cells of one task."""
    head, device = settings["task"], asked.device
    trials = asked.trials or settings["trials"]
    names = [*settings["mechanisms"], "none"]
    cells = [Cell(f"{head}/mechanisms", partial(_mechanisms, settings))]
    first = (f"{head}/mechanisms",)
    runs = len(settings["searched"]) * len(settings["factors"])
    for name in names:
        work: Any = partial(_search, settings, device, head, name)
        cost = 2 * len(settings["factors"]) if name == "none" else runs
        cells.append(Cell(f"{head}/search/{name}", work, cost, head, first))
    finals = []
    for seed in range(trials):
        for name in names:
            key = f"{head}/final/{name}/{seed}"
            work = partial(_final, settings, device, head, name, seed)
            cost = 1 if name == "none" else settings["points"]
            cells.append(Cell(key, work, cost, head, (*first, f"{head}/search/{name}")))
            finals.append(key)
    work = partial(_computation, settings, head, trials)
    cells.append(Cell(f"{head}/computation", work, needs=(*first, *finals)))
    for size in settings["trained_cohorts"]:
        for name in settings["mechanisms"]:
            work = partial(_cohort, settings, device, head, name, size)
            cost = size / settings["clients"]
            needs = (f"{head}/computation",)
            cells.append(Cell(f"{head}/cohort/{name}/{size}", work, cost, head, needs))
    return cells


def _cells(asked: Request) -> Sequence[Cell]:
    """The task of the settings; StackOverflow where its files are."""
    from noshuffle.datasets.store import local

    settings = dict(asked.settings)
    large = settings.pop("stackoverflow", {})
    cells = _study(settings, asked)
    if local("stackoverflow.word_count") is not None and not asked.quick:
        cells += _study({**settings, **large}, asked)
    return cells


FIGURE = Figure(
    name="figure2",
    title="user-level privacy: accuracy, noise, computation",
    cells=_cells,
    table=table,
    draw=draw,
    claims=CLAIMS,
)
