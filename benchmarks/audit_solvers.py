"""Every convex solver attacked from outside: the table of docs/audit.md.

    python benchmarks/audit_solvers.py [--only dp_gd] [--broken]

--broken halves all noise behind the solvers' backs: every row must then be REFUTED.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from solver_audit import DELTA, EPSILON, SOLVER_CASES, audit_solver

from noshuffle.accounting import gaussian
from noshuffle.convex.solvers.problem import Problem
from noshuffle.noise.laws import KeyedDraws

#: Lengths are roots of a gamma; `laplace` is made of `exponential`, `gamma` of `standard_gamma`.
_SHARES = {
    "exponential": 0.5,
    "gumbel": 0.5,
    "standard_normal": 0.5,
    "standard_gamma": 0.25,
    "gamma": 2.0,
}


@contextmanager
def halved_noise() -> Iterator[None]:
    """Half of the noise, normal or other, with statements as they were."""
    releases, old = Problem.releases, {name: getattr(KeyedDraws, name) for name in _SHARES}

    def less(law: Any, share: float) -> Any:
        return lambda self, *settings: share * law(self, *settings)

    def narrow(self: Problem, plan: Any, *, scale: float, **more: Any) -> Any:
        return releases(self, plan, scale=scale / 2, **more)

    changed: dict[str, Any] = {name: less(old[name], share) for name, share in _SHARES.items()}
    with (
        mock.patch.object(Problem, "releases", narrow),
        mock.patch.multiple(KeyedDraws, **changed),
    ):
        yield


def main(arguments: list[str]) -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--only")
    asked.add_argument("--broken", action="store_true")
    options = asked.parse_args(arguments)
    print(f"ε = {EPSILON:g}, δ = {DELTA:g}; a Gaussian mechanism has μ = ", end="")
    print(f"{gaussian.mu(epsilon=EPSILON, delta=DELTA):.3f} there")
    print("| solver | experiments | ε shown, at least | ε by counts | μ̂ | answer | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for name in SOLVER_CASES:
        if options.only in (None, name):
            print(row(name, broken=options.broken), flush=True)


def row(name: str, *, broken: bool = False) -> str:
    """One row of the table."""
    before = time.process_time()
    if broken:
        with halved_noise():
            found = audit_solver(name)
    else:
        found = audit_solver(name)
    seconds = time.process_time() - before
    return (
        f"| {name} | {found.experiments:,} | {found.shown:.2f} | {found.found:.2f} "
        f"| {found.mu:.3f} | {found.answer} | {seconds:.0f} |"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
