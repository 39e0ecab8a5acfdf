"""Other cohort sizes, trained: does the ε that `drama_figure.py` predicts meet its target?

    python benchmarks/drama_cohorts.py prepare --data … --cache plans.npz --table table.json \\
        --target 48 --points blt/50 blt/200 blt/400 --plans cohorts.npz
    python benchmarks/drama_cohorts.py train --data … --plans cohorts.npz --device cuda --out …

Everything but the cohort is as in `drama_table.py`: 10,080 roles train, 1,000 rounds, the same
clients, clip norm, momentum and cool-down. For m clients a round the noise multiplier is the one at
which the line of the figure predicts the target (the better of the table's strategy and one fitted
to the limits of m), the server rate that of the table's runs, interpolated in the logarithm of the
noise, and the noisy sum is divided by m. Test roles decide whether the target is met; nothing is
chosen by them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import drama_data
import numpy as np
import torch
from drama_figure import ALIKE, curve, epsilon, limits, scales, tolerated
from drama_table import (
    CLIENT_RATE,
    CLIENTS,
    CLIP,
    MOMENTUM,
    ROUNDS,
    error,
    load_cache,
    run,
    short_blt,
    short_tree,
)

from noshuffle.federated import many
from noshuffle.federated.simulate import in_random_order
from noshuffle.federated.tasks import FederatedTask
from noshuffle.participation import Poisson
from noshuffle.strategies import Strategy

REFIT = {"blt": short_blt, "tree": short_tree}


def rate_at(level: float, table: dict, scale: dict[str, float], names: tuple[str, ...]) -> float:
    """The table's server rates, interpolated: both axes in logarithms."""
    points = sorted(
        (record["noise"] * scale[cell.split("/")[0]] / CLIENTS, record["rate"])
        for cell, record in table.items()
        if cell.split("/")[0] in names and record["noise"] > 0
    )
    levels, rates = (np.log(np.array(part)) for part in zip(*points))
    return float(np.exp(np.interp(np.log(level), levels, rates)))


def choose(
    name: str, own: Strategy, *, level: float, scale: float, population: int, cohort: int
) -> tuple[str, Strategy, float, float]:
    """What the figure shows at m: which strategy, its noise multiplier and ε."""
    kinds = {"fixed": own}
    if name in REFIT:
        kinds["refitted"] = REFIT[name](limits(population, cohort))
    found = []
    for kind, strategy in kinds.items():
        z = level * cohort / (scale if kind == "fixed" else error(strategy))
        found.append((epsilon(name, strategy, z, population, cohort), kind, strategy, z))
    best = min(found, key=lambda one: one[0])
    return best[1], best[2], best[3], best[0]


def cohorts_of(name: str, task: FederatedTask, *, size: int, seed: int) -> list[np.ndarray]:
    """Who takes part: whoever checks in and is admitted, or secret coin flips."""
    from noshuffle.noise import new_key
    from noshuffle.release.sampler_kinds import PoissonSampler

    if name == "poisson":
        part = Poisson(ROUNDS, size / len(task))
        sampler = PoissonSampler(part, len(task), key=new_key())
        return [sampler.draw(step) for step in range(ROUNDS)]
    order = in_random_order(task.users, seed=seed)
    return many.admitted_cohorts(limits(len(task), size), task, size=size, check_ins=order)


def prepare(options: argparse.Namespace) -> None:
    """Strategies, noise, rates and cohorts of every point."""
    strategies, _, _ = load_cache(options.cache)
    table = json.loads(options.table.read_text())
    scale = scales(strategies)
    task = drama_data.load(options.data)
    record, arrays = [], {}
    for text in options.points:
        name, size = text.split("/")[0], int(text.split("/")[1])
        level = tolerated(*curve(table, scale, ALIKE[name]), options.target)
        kind, strategy, z, eps = choose(
            name,
            strategies[name],
            level=level,
            scale=scale[name],
            population=len(task),
            cohort=size,
        )
        point = {
            "mechanism": name,
            "cohort": size,
            "population": len(task),
            "target": options.target,
            "strategy": kind,
            "noise": z,
            "epsilon": eps,
            "rate": rate_at(level, table, scale, (name,)),
        }
        print(point)
        record.append({**point, "encoder": strategy.to_dict()})
        for seed in range(options.seeds):
            users = cohorts_of(name, task, size=size, seed=seed)
            arrays[f"users {text} {seed}"] = np.concatenate(users).astype(np.int32)
            arrays[f"counts {text} {seed}"] = np.array([len(u) for u in users])
    np.savez_compressed(options.plans, record=np.array(json.dumps(record)), **arrays)


def train(options: argparse.Namespace) -> None:
    """Test accuracy of every point."""
    from noshuffle.strategies import from_dict

    with np.load(options.plans) as file:
        record = json.loads(str(file["record"]))
        cohorts = {
            name[6:]: np.split(
                file[name].astype(np.int64), np.cumsum(file["counts " + name[6:]])[:-1]
            )
            for name in file.files
            if name.startswith("users ")
        }
    names = [f"{point['mechanism']}/{point['cohort']}" for point in record]
    strategies = {name: from_dict(point.pop("encoder")) for name, point in zip(names, record)}
    settings = [
        many.Setting(
            mechanism=name,
            cohorts=f"{name} {seed}",
            noise_multiplier=point["noise"],
            # `run` divides every sum by CLIENTS
            server_rate=point["rate"] * CLIENTS / point["cohort"],
            client_rate=CLIENT_RATE,
            clip_norm=CLIP,
            momentum=MOMENTUM,
            seed=seed,
        )
        for name, point in zip(names, record)
        for seed in range(options.seeds)
    ]
    task = drama_data.load(options.data)
    found, _ = run(options, task, settings, strategies, cohorts)
    for i, point in enumerate(record):
        point["accuracy"] = found[i * options.seeds : (i + 1) * options.seeds]
    print(json.dumps(record))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("prepare", "train"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--plans", type=Path, required=True, help="what prepare writes")
    parser.add_argument("--cache", type=Path, help="what drama_table prepare wrote")
    parser.add_argument("--table", type=Path, help="what drama_table table wrote")
    parser.add_argument("--target", type=float, default=48.0, help="accuracy in %%")
    parser.add_argument("--points", nargs="*", default=[], help="such as blt/200")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-once", type=int, default=2400, help="slots trained together")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer only to try it out")
    parser.add_argument("--until", type=int, default=ROUNDS)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds to stop after")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    {"prepare": prepare, "train": train}[options.what](options)


if __name__ == "__main__":
    main()
