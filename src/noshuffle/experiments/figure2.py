"""`figure2`: one user protected. Accuracy over ε (2a), over noise multipliers (2b), and privacy
against computation at fixed accuracy (2c).

    blt, tree    correlated noise, whoever checks in, within limits per user
    identity     independent noise under the same limits
    sampled      independent noise, cohorts drawn by secret coin flips (amplified)

Each is trained at `points` noise multipliers z. What the model feels is the level of noise on its
iterates (`users`), so rates are tried around `rate_noise`/level. 2c: the largest level that
reaches a target (linear in log level between trained points) stays the same for every m when z
grows with m; ε follows from z and the limits of m. Lines are computed; `trained_cohorts` are
trained at the z that a line predicts. Targets: the paper's, 2.6 % and 8.6 % below the model without
noise, and ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from noshuffle.experiments.figure import Cell, Figure, Request, Results
from noshuffle.experiments.figure2_view import CLAIMS, draw, table
from noshuffle.experiments.users import (
    Settings,
    felt,
    fitted,
    limits,
    train_users,
    user_epsilon,
    user_task,
    without_validation_users,
)
from noshuffle.strategies import from_dict, sensitivity


def _mechanisms(settings: Settings, results: Results) -> dict[str, Any]:
    """Strategy, noise multipliers, levels and ε of every mechanism."""
    population = len(user_task(settings["task"]))
    part = limits(settings, population=population, cohort=settings["clients"])
    out: dict[str, Any] = {}
    for name in settings["mechanisms"]:
        strategy = fitted(name, part, settings)
        if name == "sampled":
            low, high = settings["sampled_noise"]
            noise = np.geomspace(low, high, settings["points"])
        else:
            low, high = settings["mu"]
            noise = sensitivity(strategy, part).value / np.geomspace(low, high, settings["points"])
        spread = felt(strategy, settings)
        out[name] = {
            "strategy": strategy.to_dict(),
            "felt": spread,
            "noise": noise.tolist(),
            "level": (noise * spread / settings["clients"]).tolist(),
            "epsilon": [
                user_epsilon(
                    name, strategy, z, settings, population=population, cohort=settings["clients"]
                )
                for z in noise
            ],
        }
    return out


def _search(
    settings: Settings, device: str, name: str, results: Results
) -> dict[str, dict[str, tuple[float, float]]]:
    """Accuracy and loss on validation users, by point and rate; "none" is without noise."""
    head = settings["task"]
    task, made = without_validation_users(head), results[f"{head}/mechanisms"]
    if name == "none":
        name, points = "identity", {"none": (0.0, settings["largest_rate"])}
        factors = settings["noiseless_factors"]
    else:
        level, noise = made[name]["level"], made[name]["noise"]
        points = {
            str(i): (noise[i], min(settings["largest_rate"], settings["rate_noise"] / level[i]))
            for i in settings["searched"]
        }
        factors = settings["factors"]
    grid = [(key, z, centre * f) for key, (z, centre) in points.items() for f in factors]
    found = train_users(
        settings, device, task, name, from_dict(made[name]["strategy"]),
        [(z, rate) for _, z, rate in grid], size=settings["clients"], seed=settings["search_seed"],
    )  # fmt: skip
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
    settings: Settings, device: str, name: str, seed: int, results: Results
) -> dict[str, Any]:
    """Test accuracy at every noise multiplier, one seed."""
    head = settings["task"]
    task, made = user_task(head), results[f"{head}/mechanisms"]
    tried = results[f"{head}/search/{name}"]
    if name == "none":
        name, noise = "identity", [0.0]
        rates = [best_rate(tried["none"])]
    else:
        noise, levels = made[name]["noise"], made[name]["level"]
        rates = [rate_at(level, levels, tried) for level in levels]
    found = train_users(
        settings, device, task, name, from_dict(made[name]["strategy"]), list(zip(noise, rates)),
        size=settings["clients"], seed=seed,
    )  # fmt: skip
    return {"seed": seed, "rate": rates, "accuracy": [accuracy for accuracy, _ in found]}


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


def _targets(settings: Settings, results: Results, trials: int) -> dict[str, float]:
    """Accuracies to be reached, by words."""
    first = f"{settings['task']}/final/none"
    base = float(np.mean([results[f"{first}/{s}"]["accuracy"] for s in range(trials)]))
    paper = {f"{100 * r:g} % below no noise": base * (1 - r) for r in settings["relative_targets"]}
    return {**paper, **{f"{t:g} %": t for t in settings["targets"]}}


def _computation(settings: Settings, trials: int, results: Results) -> list[dict[str, Any]]:
    """2c: ε over clients a round at every target, fixed strategy or fitted anew, the better one."""
    head = settings["task"]
    population, made = len(user_task(head)), results[f"{head}/mechanisms"]
    again = {}
    for name in ("blt", "tree"):
        for m in settings["cohorts"]:
            if m <= population and name in made:
                part = limits(settings, population=population, cohort=m)
                again[name, m] = fitted(name, part, settings)
    lines = []
    for words, target in _targets(settings, results, trials).items():
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
                    e = user_epsilon(name, strategy, z, settings, population=population, cohort=m)
                    found.append((math.inf if e is None else e, z, strategy.to_dict()))
                e, z, chosen = min(found, key=lambda one: one[0])
                point = {"clients": m, "epsilon": e if math.isfinite(e) else None, "noise": z}
                line["points"].append({**point, "strategy": chosen})
            lines.append(line)
    return lines


def _cohort(
    settings: Settings, device: str, name: str, size: int, trials: int, results: Results
) -> dict[str, Any] | None:
    """A trained point of 2c, at the last of our targets that the line knows; None without one."""
    head = settings["task"]
    lines = [one for one in results[f"{head}/computation/{trials}"] if one["mechanism"] == name]
    points = [(line, p) for line in lines for p in line["points"] if p["clients"] == size]
    if not points:
        return None
    line, point = points[-1]
    made = results[f"{head}/mechanisms"][name]
    rate = rate_at(line["level"], made["level"], results[f"{head}/search/{name}"])
    found = train_users(
        settings, device, user_task(head), name, from_dict(point["strategy"]),
        [(point["noise"], rate)], size=size, seed=0,
    )  # fmt: skip
    return {"target": line["target"], "wanted": line["accuracy"], "epsilon": point["epsilon"],
            "clients": size, "accuracy": found[0][0], "seed": 0}  # fmt: skip


def _study(settings: Settings, asked: Request) -> list[Cell]:
    """All cells of one task."""
    head, device = settings["task"], asked.device
    trials = asked.trials or settings["trials"]
    names = [*settings["mechanisms"], "none"]
    cells = [Cell(f"{head}/mechanisms", partial(_mechanisms, settings))]
    first = (f"{head}/mechanisms",)
    runs = len(settings["searched"]) * len(settings["factors"])
    for name in names:
        work: Any = partial(_search, settings, device, name)
        cost = len(settings["noiseless_factors"]) if name == "none" else runs
        cells.append(Cell(f"{head}/search/{name}", work, cost, head, first))
    finals = []
    for seed in range(trials):
        for name in names:
            key = f"{head}/final/{name}/{seed}"
            work = partial(_final, settings, device, name, seed)
            cost = 1 if name == "none" else settings["points"]
            cells.append(Cell(key, work, cost, head, (*first, f"{head}/search/{name}")))
            finals.append(key)
    work = partial(_computation, settings, trials)
    # By the number of trials: more of them later make other lines.
    lines = f"{head}/computation/{trials}"
    cells.append(Cell(lines, work, needs=(*first, *finals)))
    for size in settings["trained_cohorts"]:
        for name in settings["trained_mechanisms"]:
            work = partial(_cohort, settings, device, name, size, trials)
            cost = size / settings["clients"]
            cells.append(Cell(f"{head}/cohort/{name}/{size}", work, cost, head, (lines,)))
    return cells


#: Tasks beside the first one of the settings, and the file that each needs.
_FILES = {
    "shakespeare": "shakespeare_roles.jsonl.gz",
    "stackoverflow": "stackoverflow.word_count",
}


def _cells(asked: Request) -> Sequence[Cell]:
    """The task of the settings, and those whose files are there."""
    from noshuffle.datasets.store import local

    settings = dict(asked.settings)
    others = {name: settings.pop(name, {}) for name in _FILES}
    cells = _study(settings, asked)
    for name, file in _FILES.items():
        if others[name] and not asked.quick and local(file) is not None:
            cells += _study({**settings, **others[name]}, asked)
    return cells


FIGURE = Figure(
    name="figure2",
    title="user-level privacy: accuracy, noise, computation",
    cells=_cells,
    table=table,
    draw=draw,
    claims=CLAIMS,
)
