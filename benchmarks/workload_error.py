"""Noise on the iterates of a run with momentum and a learning rate that falls, at equal privacy.

    m_t = β·m_{t−1} + (C⁻¹Z)_t,      θ_t = (1 − (1−α)·η_t)·θ_{t−1} + η_t·(1−β)·m_t

η is 1 and falls to a twentieth over the last quarter; rates of all momenta are compared at equal
η/(1−β). α = 1 is the workload of `strategies.workload`; with α < 1 the model forgets in 1/(1−α)
steps, as gradient descent does along a direction of that curvature. Every figure is z·‖row of the
map‖ in clip norms, z the noise multiplier at ε: over all iterates (rms), over the last quarter, and
of the last iterate. `floor`: only the last iterate is released, nothing else.

    python benchmarks/workload_error.py                         # 20 passes of 100 steps, ε = 1
    python benchmarks/workload_error.py --epochs 20 --steps 20 --momentum 0.5 --dense
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from noshuffle.participation import Epochs, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import Strategy, identity
from noshuffle.strategies.fit import fit
from noshuffle.strategies.recipe import Array
from noshuffle.strategies.workload import cooldown, momentum

DELTA = 1e-5
TAPPED: dict[str, Any] = {"buffers": 2, "taps": 6}


def carried(rows: Array, rates: Array, *, beta: float, alpha: float) -> Array:
    """The map above, from rows of noise to rows of iterates."""
    velocity, place = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    out = np.zeros_like(rows)
    for t, rate in enumerate(rates):
        velocity = beta * velocity + rows[t]
        place = (1 - (1 - alpha) * rate) * place + rate * (1 - beta) * velocity
        out[t] = place
    return out


def felt(strategy: Strategy, rates: Array, *, beta: float, alpha: float) -> tuple[float, ...]:
    """Noise of unit draws on all iterates, those of the last quarter, and the last."""
    n = len(rates)
    squared = np.sum(carried(strategy.noising(n), rates, beta=beta, alpha=alpha) ** 2, axis=1)
    return tuple(float(np.sqrt(part.mean())) for part in (squared, squared[-n // 4 :], squared[-1]))


def floor(rates: Array, *, epochs: int, beta: float, alpha: float) -> float:
    """Sensitivity of the last iterate alone: what a unit adds to it in all its steps."""
    last = carried(np.eye(len(rates)), rates, beta=beta, alpha=alpha)[-1]
    return float(np.abs(last).reshape(epochs, -1).sum(axis=0).max())


def rows(
    asked: argparse.Namespace, order: Epochs
) -> Iterator[tuple[str, Participation, Strategy, float]]:
    """Name, participation, strategy and momentum of every row."""
    n, beta = order.steps, asked.momentum
    sampled = Poisson(n, 1 / order.steps_per_epoch)
    for each in (beta, *asked.more):
        yield f"amplified, momentum {each:g}", sampled, identity(), each
    for each in (beta, *asked.more):
        found = fit("blt_tapped", order, workload=momentum(each), **TAPPED)
        yield f"BLT, 6 taps, momentum {each:g}", order, found.strategy, each
    schedule = momentum(0.0, learning_rates=cooldown(n))
    found = fit("blt_tapped", order, workload=schedule, **TAPPED)
    yield "BLT, 6 taps, fitted to the rates", order, found.strategy, beta
    found = fit("blt_gains", order, workload=schedule, **TAPPED)
    yield "… and a gain per step", order, found.strategy, beta
    if asked.dense:
        both = momentum(beta, learning_rates=cooldown(n))
        yield "dense, momentum and rates", order, fit("dense", order, workload=both).strategy, beta


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="steps of one pass")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--more", type=float, nargs="*", default=[0.97], help="other momenta")
    parser.add_argument("--forget", type=float, nargs="*", default=[1.0, 0.998, 0.99, 0.97])
    parser.add_argument("--dense", action="store_true", help="at most 512 steps")
    asked = parser.parse_args()
    order = Epochs(asked.epochs, asked.steps)
    rates = np.array(cooldown(order.steps))
    print("| row | " + " | ".join(f"α = {a:g}: rms, late, last" for a in asked.forget) + " |")
    print("|---|" + "---|" * len(asked.forget))
    for name, part, strategy, beta in rows(asked, order):
        z = Plan.fit(part, mechanism=strategy, epsilon=asked.epsilon, delta=DELTA).noise_multiplier
        told = (felt(strategy, rates, beta=beta, alpha=a) for a in asked.forget)
        cells = (", ".join(f"{z * value:.1f}" for value in values) for values in told)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    # A sum that is released once: z = sensitivity of the sum at unit clip, as one step.
    one = Plan.fit(Epochs(1, 1), mechanism="identity", epsilon=asked.epsilon, delta=DELTA)
    told_floor = (
        one.noise_multiplier * floor(rates, epochs=asked.epochs, beta=asked.momentum, alpha=a)
        for a in asked.forget
    )
    print("| floor | " + " | ".join(f"–, –, {value:.1f}" for value in told_floor) + " |")


if __name__ == "__main__":
    main()
