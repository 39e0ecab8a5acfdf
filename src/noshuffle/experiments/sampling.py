"""`sampling`: correlated noise under secret sampling, beside each of them alone, at small ε.

A banded strategy whose groups take turns with coin flips (cyclic Poisson, arXiv 2306.08153), with
as many groups as its plan says are best at that ε, beside amplified DP-SGDM and a BLT without
sampling: MNIST and CIFAR-10 (`settings/sampling.toml`). No state.
"""

from __future__ import annotations

from collections.abc import Callable

from noshuffle.experiments import accuracy
from noshuffle.experiments.accuracy import curve
from noshuffle.experiments.curves import beside, draw, table
from noshuffle.experiments.figure import Claim, ClaimVerdict, Figure, Results, shipped, verdict


def never_below(task: str, line: str, others: tuple[str, ...]) -> Callable[[Results], ClaimVerdict]:
    """Whether a line is at no ε below another by more than the larger of their deviations."""

    def decide(results: Results) -> ClaimVerdict:
        own, holds, told = curve(results, task, line), True, []
        for other in others:
            for epsilon, point in curve(results, task, other).items():
                margin = max(own[epsilon].deviation, point.deviation)
                holds = holds and own[epsilon].mean >= point.mean - margin
                told.append(f"{beside(own[epsilon], point)} ({other})")
        return verdict(holds, "; ".join(told))

    return decide


FIGURE = Figure(
    name="sampling",
    title="correlated noise under secret sampling",
    cells=accuracy.cells,
    table=lambda results: table("sampling", results),
    draw=lambda results, path: draw("sampling", results, path),
    claims=tuple(
        Claim(
            "sampled correlated noise is never below DP-SGDM or unsampled noise by more than the "
            f"deviation on {record['title']}",
            "this library",
            never_below(task, "cyclic", ("amplified", "blt")),
        )
        for task, record in shipped("sampling")["tasks"].items()
    ),
)
