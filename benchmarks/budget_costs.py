"""What runs cost in a budget beside their own ε, and what one run of a search may cost.

    python benchmarks/budget_costs.py

Sampled runs have the ε of their loss distribution when they are alone, and the (μ, s) that bounds
it in the books of a budget (docs/budget.md). Searches: the whole at ε = 2, δ = 1e-5.
"""

from __future__ import annotations

import math

from noshuffle import Plan, Poisson
from noshuffle.accounting import gaussian
from noshuffle.accounting.selection import LAWS, Repetitions, largest_mu
from noshuffle.budget.cost import cost_of
from noshuffle.strategies import identity

DELTA = 1e-5
SAMPLED = (
    (250 / 60_000, 1.0, 4_800),
    (250 / 60_000, 0.7, 4_800),
    (0.01, 1.5, 10_000),
    (0.1, 2.0, 500),
)


def main() -> None:
    print("| rate | noise multiplier | steps | own ε | ε in a budget |\n|---|---|---|---|---|")
    for rate, noise, steps in SAMPLED:
        plan = Plan(
            participation=Poisson(steps, rate),
            strategy=identity(),
            noise_multiplier=noise,
            delta=DELTA,
        )
        cost = cost_of(plan.statement(), delta=DELTA, plan=plan, steps=steps)
        shown = f"{plan.epsilon():.3f} | {cost.epsilon(DELTA):.3f}"
        print(f"| {rate:.5g} | {noise:g} | {steps:,} | {shown} |", flush=True)
    print(f"\n| runs on average | {' | '.join(LAWS)} | side by side (geometric) |")
    print("|---" * (len(LAWS) + 2) + "|")
    for mean in (5, 20, 100):
        laws = {law: Repetitions.named(law, mean=mean) for law in LAWS}
        mus = {law: largest_mu(own, epsilon=2.0, delta=DELTA) for law, own in laws.items()}
        one = [f"{gaussian.epsilon(mu=mu, delta=DELTA):.3f}" for mu in mus.values()]
        all_of_them = gaussian.epsilon(mu=mus["geometric"] * math.sqrt(mean), delta=DELTA)
        print(f"| {mean} | {' | '.join(one)} | {all_of_them:.2f} |", flush=True)


if __name__ == "__main__":
    main()
