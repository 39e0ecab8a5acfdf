"""Next-character accuracy over ε on German drama roles, user-level privacy, many runs at once.

    python benchmarks/drama_table.py prepare --data gerdracor_roles.jsonl.gz --cache plans.npz
    python benchmarks/drama_table.py search --data … --cache … --device cuda --out search.json
    python benchmarks/drama_table.py table  --data … --cache … --device cuda --search search.json

Setting: 10,080 roles train, 1,120 test (every tenth, whole roles). 100 clients a round, 1,000
rounds; a role takes part at most 10 times, at least 100 rounds apart, whoever checks in. A client
trains once over its first 1,296 characters (16 windows of 80 targets, local batches of 8 windows:
two SGD steps) and sends its clipped difference. Server momentum 0.9, rate constant for three
quarters of the run, then linear down to a twentieth. δ = 1e-5, zero-out neighbours and the exact
curve; sampled: add-remove neighbours, Fourier accounting. Matrix products in TF32.

"Flower's fixed clipping" is what its `DifferentialPrivacyServerSideFixedClipping` can promise: 100
roles drawn afresh each round without a limit, so that one role may be in all 1,000 rounds, which is
also what its accountant charges. Here it is given our server rate, momentum and cool-down, which
the wrapper cannot have around FedAvg (`flower_baseline.py` runs the wrapper itself).

How rates were chosen: on 8,960 of the training roles, with the noise of the final runs, by accuracy
on the other 1,120 training roles (validation) after 899 of 1,000 rounds, one seed, six server rates
for each mechanism and ε. Strategies of BLT and tree were fixed before (see `error`). Test roles are
used once, for the table. The privacy cost of choosing is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import drama_data
import numpy as np
import torch
from scipy.signal import lfilter

from noshuffle.federated import many
from noshuffle.federated.char_models import build
from noshuffle.federated.clients import LocalTraining
from noshuffle.federated.simulate import in_random_order
from noshuffle.federated.tasks import without_validation
from noshuffle.participation import MinSeparation, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import Strategy, from_dict, identity, sensitivity, tree
from noshuffle.strategies.fit import fit
from noshuffle.strategies.workload import cooldown, momentum

ROUNDS, CLIENTS, DELTA, MOMENTUM = 1000, 100, 1e-5, 0.9
LIMITS = MinSeparation(ROUNDS, 100, 10)
FORGET = 0.99
#: Streamed by year: only so many roles are there at a time, each for about 175 rounds.
PRESENT, DRIFT = 1_500, MinSeparation(ROUNDS, 10, 10)
EPSILONS = (4.0, 8.0, 16.0)
MECHANISMS = {
    "blt": "DP-FTRL, BLT",
    "tree": "DP-FTRL, Honaker tree",
    "identity": "independent noise, not amplified",
    "poisson": "DP-FedAvg, amplified (Poisson)",
    "flower": "Flower's fixed clipping, every round charged",
}
#: What one user may do; who is sampled gets a law of its own in `participation_of`.
WHO = {"flower": MinSeparation(ROUNDS, 1, ROUNDS), "drift": DRIFT}
#: Chosen on the validation roles among client rates 1, 2, 4, 8 and clip norms 0.3, 1, in runs of
#: 270 rounds without noise and with that of a BLT at ε = 8; the same for every mechanism.
MODEL, CLIENT_RATE, CLIP = "char_lstm", 4.0, 1.0
LOCAL = LocalTraining(learning_rate=CLIENT_RATE, steps=2, batch_size=8)
#: Server rates tried: six a cell.
RATES = {
    "blt/4": (0.055, 0.087, 0.14, 0.22, 0.35, 0.55),
    "blt/8": (0.087, 0.14, 0.22, 0.34, 0.54, 0.85),
    "blt/16": (0.14, 0.22, 0.34, 0.52, 0.83, 1.3),
    "tree/4": (0.035, 0.057, 0.09, 0.15, 0.24, 0.38),
    "tree/8": (0.06, 0.095, 0.15, 0.24, 0.38, 0.6),
    "tree/16": (0.09, 0.14, 0.23, 0.37, 0.58, 0.92),
    "identity/4": (0.0045, 0.0091, 0.018, 0.036, 0.058, 0.09),
    "identity/8": (0.0081, 0.016, 0.032, 0.064, 0.1, 0.16),
    "identity/16": (0.014, 0.027, 0.055, 0.11, 0.17, 0.27),
    "poisson/4": (0.02, 0.039, 0.079, 0.16, 0.24, 0.36),
    "poisson/8": (0.024, 0.048, 0.096, 0.19, 0.3, 0.45),
    "poisson/16": (0.029, 0.058, 0.12, 0.23, 0.35, 0.55),
    "flower/4": (0.0009, 0.0018, 0.0036, 0.0072, 0.012, 0.019),
    "flower/8": (0.0016, 0.0032, 0.0064, 0.013, 0.02, 0.032),
    "flower/16": (0.0028, 0.0055, 0.011, 0.022, 0.035, 0.055),
    "identity/inf": (0.21, 0.42, 0.84, 1.7, 3.4, 6.8),
}


def error(strategy: Strategy) -> float:
    """Rms over the rounds of Σ_s 0.99^(t−s) · momentum(noise)_s, for unit draws.

    A first search, with strategies fitted to the noise of all rounds together, had shown that noise
    of long ago is forgotten: its accuracies were ordered by this figure times the noise multiplier,
    whatever the mechanism, and not by that of the plain sum.
    """
    noise = lfilter([1.0], [1.0, -MOMENTUM], strategy.noising(ROUNDS), axis=0)
    noise = lfilter([1.0], [1.0, -FORGET], noise, axis=0)
    return float(np.sqrt(np.square(noise).sum(1).mean()))


def short_blt(limits: MinSeparation) -> Strategy:
    """A BLT as if a run had 200 rounds, since older noise is forgotten; sensitivity is of all."""
    most = min(limits.max_participations, -(-200 // limits.separation))
    apart = min(limits.separation, 200)
    part = MinSeparation(200, apart, most)
    found = fit("blt", part, workload=momentum(MOMENTUM)).strategy
    return replace(found, normalized=0)  # columns scaled for 200 rounds would not do for 1,000


def short_tree(limits: MinSeparation) -> Strategy:
    """Trees of the length, a power of two, with the least error × sensitivity."""
    trees = [tree(restart_every=1 << e) for e in range(3, 11)]
    return min(trees, key=lambda t: error(t) * sensitivity(t, limits).value)


def fitted() -> dict[str, Strategy]:
    """The strategy of every mechanism."""
    alone = dict.fromkeys(("identity", "poisson", "flower"), identity())
    return {
        "blt": short_blt(LIMITS),
        "tree": short_tree(LIMITS),
        **alone,
        "drift": short_blt(DRIFT),
    }


def participation_of(name: str, population: int) -> Participation:
    """What one user may do under a mechanism."""
    return Poisson(ROUNDS, CLIENTS / population) if name == "poisson" else WHO.get(name, LIMITS)


def prepare(options: argparse.Namespace) -> None:
    """Strategies, noise multipliers and cohorts: everything that needs no GPU."""
    from noshuffle.noise import new_key
    from noshuffle.release.sampler_kinds import PoissonSampler

    task = drama_data.load(options.data)
    strategies = fitted()
    noise = {}
    for name, strategy in strategies.items():
        part = participation_of(name, len(task))
        for target in EPSILONS:
            plan = Plan.fit(part, mechanism=strategy, epsilon=target, delta=DELTA, unit="user")
            noise[f"{name}/{target:g}"] = plan.noise_multiplier
    small = without_validation(task)
    loose = MinSeparation(ROUNDS, len(small) // CLIENTS, ROUNDS)
    orders = {"search": many.admitted_cohorts(
        loose, small, size=CLIENTS, check_ins=in_random_order(small.users, seed=99))}  # fmt: skip
    for seed in range(options.seeds):
        order = in_random_order(task.users, seed=seed)
        orders[f"final/{seed}"] = many.admitted_cohorts(LIMITS, task, size=CLIENTS, check_ins=order)
    for seed in range(options.seeds):
        order = drama_data.drifting(task, rounds=ROUNDS, present=PRESENT, seed=seed)
        orders[f"drift/{seed}"] = many.admitted_cohorts(DRIFT, task, size=CLIENTS, check_ins=order)
    populations = {"search": len(small), **{f"final/{s}": len(task) for s in range(options.seeds)}}
    for name, population in populations.items():
        part = Poisson(ROUNDS, CLIENTS / population)
        sampler = PoissonSampler(part, population, key=new_key())
        orders[f"{name}/poisson"] = [sampler.draw(t) for t in range(ROUNDS)]
        rng = np.random.default_rng((len(orders), population))
        orders[f"{name}/flower"] = [
            np.sort(rng.choice(population, CLIENTS, replace=False)) for _ in range(ROUNDS)
        ]
    arrays = {}
    for name, cohorts in orders.items():
        arrays[f"users {name}"] = np.concatenate(cohorts).astype(np.int32)
        arrays[f"counts {name}"] = np.array([len(c) for c in cohorts])
        print(name, "clients a round:", min(map(len, cohorts)), "to", max(map(len, cohorts)))
    record = {"strategies": {n: s.to_dict() for n, s in strategies.items()}, "noise": noise}
    np.savez_compressed(options.cache, record=np.array(json.dumps(record)), **arrays)
    print(json.dumps(noise, indent=1))


def load_cache(path: Path):
    """Strategies, noise multipliers and cohorts that `prepare` wrote."""
    with np.load(path) as file:
        record = json.loads(str(file["record"]))
        cohorts = {}
        for name in file.files:
            if name.startswith("users "):
                counts = file["counts " + name[6:]]
                cohorts[name[6:]] = np.split(file[name].astype(np.int64), np.cumsum(counts)[:-1])
    strategies = {n: from_dict(d) for n, d in record["strategies"].items()}
    return strategies, record["noise"], cohorts


def setting(cell: str, noise: dict[str, float], rate: float, order: str, seed: int) -> many.Setting:
    name, epsilon = cell.split("/")
    own = {**{n: f"{order}/{n}" for n in ("poisson", "flower")}, "drift": f"drift/{seed}"}
    return many.Setting(
        mechanism=name,
        cohorts=own.get(name, order),
        noise_multiplier=0.0 if epsilon == "inf" else noise[cell],
        server_rate=rate,
        client_rate=CLIENT_RATE,
        clip_norm=CLIP,
        momentum=MOMENTUM,
        seed=seed,
    )


class _Stop(Exception):
    pass


def run(options, task, settings, strategies, cohorts) -> tuple[list[float], list[float]]:
    """Accuracy in % of every setting, on the held-out roles and on their latest tenth alone."""
    began = time.perf_counter()
    rounds = options.rounds
    factors = cooldown(rounds)
    state: dict[str, object] = {}

    def on_round(done: int, params) -> None:
        state.update(params=params, done=done)
        seconds = time.perf_counter() - began
        if done in (10, 30, 100) or done % 250 == 0:
            print(f"  {done} rounds, {seconds:.0f} s", file=sys.stderr, flush=True)
        if seconds > options.limit or rounds > done == options.until:
            raise _Stop

    try:
        many.train_many(
            lambda: build(MODEL, classes=task.classes, length=80),
            task,
            settings,
            cohorts=cohorts,
            strategies=strategies,
            rounds=rounds,
            cohort_size=CLIENTS,
            local=LOCAL,
            learning_rates=factors,
            horizon=ROUNDS,
            device=options.device,
            at_once=options.at_once,
            on_round=on_round,
        )
    except _Stop:
        print(f"stopped after {state['done']} of {rounds} rounds: figures are of that model")
    model = build(MODEL, classes=task.classes, length=80)
    x, y = task.x_test, task.y_test
    late = len(x) - len(x) // 10  # in order of year
    found = [
        many.accuracies(model, state["params"], x[at:], y[at:])[1].cpu().tolist()
        for at in (0, late)
    ]
    seconds = time.perf_counter() - began
    print(f"  {len(settings)} runs, {state['done']} rounds in {seconds:.0f} s", file=sys.stderr)
    everywhere, latest = ([round(100 * a, 3) for a in part] for part in found)
    return everywhere, latest


def search(options: argparse.Namespace) -> None:
    """The best server rate of every cell on the validation roles."""
    strategies, noise, cohorts = load_cache(options.cache)
    task = without_validation(drama_data.load(options.data))
    known = json.loads(options.known.read_text()) if options.known else {}
    result: dict[str, dict[str, float]] = {cell: known.get(cell, {}) for cell in options.cells}
    grid = [(cell, r) for cell in result for r in RATES[cell] if f"{r:g}" not in result[cell]]
    settings = [setting(cell, noise, r, "search", 99) for cell, r in grid]
    found, _ = run(options, task, settings, strategies, cohorts)
    for (cell, r), accuracy in zip(grid, found):
        result[cell][f"{r:g}"] = accuracy
    print(json.dumps(result))
    for cell, by_rate in result.items():
        print(cell, dict(sorted(by_rate.items(), key=lambda pair: float(pair[0]))))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


def table(options: argparse.Namespace) -> None:
    """Test accuracy at the rates that `search` chose."""
    strategies, noise, cohorts = load_cache(options.cache)
    task = drama_data.load(options.data)
    searched = json.loads(options.search.read_text())
    best = {cell: float(max(tried, key=tried.get)) for cell, tried in searched.items()}
    best["poisson/inf"] = best["drift/inf"] = best["identity/inf"]
    best["drift/8"] = best["blt/4"]  # about the same noise on the iterates
    chosen = [f"{name}/{e:g}" for name in MECHANISMS for e in EPSILONS]
    chosen += ["identity/inf", "poisson/inf", "drift/8", "drift/inf"]
    runs = [
        (cell, setting(cell, noise, best[cell], f"final/{seed}", seed))
        for cell in chosen
        for seed in range(options.seeds)
    ]
    found = run(options, task, [s for _, s in runs], strategies, cohorts)
    result: dict[str, dict] = {}
    for (cell, s), accuracy, late in zip(runs, *found):
        empty = {"rate": s.server_rate, "noise": s.noise_multiplier, "accuracy": [], "late": []}
        record = result.setdefault(cell, empty)
        record["accuracy"].append(accuracy)
        record["late"].append(late)
    show(result)
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


def show(result: dict[str, dict]) -> None:
    """The table in Markdown."""

    def entry(cell: str, what: str = "accuracy") -> str:
        values = result[cell][what]
        spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
        return f"{np.mean(values):.2f}{spread} ({result[cell]['rate']:g})"

    print("| mechanism |", " | ".join(f"ε = {e:g}" for e in EPSILONS), "| ε = ∞ |")
    print("|---" * (len(EPSILONS) + 2) + "|")
    for name, title in MECHANISMS.items():
        free = "poisson/inf" if name == "poisson" else "identity/inf"
        columns = [entry(f"{name}/{e:g}") for e in EPSILONS] + [entry(free)]
        print(f"| {title} |", " | ".join(columns), "|")
    print("latest tenth of the test roles:", entry("blt/8", "late"), entry("identity/inf", "late"))
    for cell in ("drift/8", "drift/inf"):
        print(f"{cell}, streamed by year: {entry(cell)}; latest tenth {entry(cell, 'late')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("prepare", "search", "table"))
    parser.add_argument(
        "--data", type=Path, required=True, help="roles: .jsonl.gz, or compact .npz"
    )
    parser.add_argument("--cache", type=Path, required=True, help="what prepare writes")
    parser.add_argument("--search", type=Path, help="what search wrote")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", nargs="*", default=[*RATES], help="such as blt/8")
    parser.add_argument(
        "--known", type=Path, help="an earlier search, whose rates are not repeated"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="fewer only to try it out")
    parser.add_argument("--until", type=int, default=ROUNDS, help="stop after so many of them")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds to stop after")
    parser.add_argument("--at-once", type=int, default=2400, help="slots trained together")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    {"prepare": prepare, "search": search, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
