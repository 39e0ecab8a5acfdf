"""`sampling`: correlated noise under secret sampling, beside each of them alone, at small ε.

A banded strategy whose groups take turns with coin flips (cyclic Poisson, arXiv 2306.08153), with
as many groups as its plan says are best at that ε, and one with a secret position for every row
(balls in bins, arXiv 2410.06266), with bands fitted to its accountant, beside amplified DP-SGDM and
a BLT without sampling: MNIST and CIFAR-10 (`settings/sampling.toml`). The sampled line of a task is
at each ε the one whose plan has the least noise × rms, as `Plan.fit` would choose: no accuracy
decides. No state.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from noshuffle.experiments import accuracy
from noshuffle.experiments.accuracy import Point, curve
from noshuffle.experiments.curves import beside, draw, table
from noshuffle.experiments.figure import Claim, ClaimVerdict, Figure, Results, shipped, verdict

SAMPLED, OTHERS = ("cyclic", "bins"), ("amplified", "blt")


def least_noise(results: Results, task: str) -> dict[float, tuple[str, Point]]:
    """Line and point of the least noise × rms at every ε, of the sampled lines that are there."""
    found: dict[float, tuple[float, str, Point]] = {}
    for line in SAMPLED:
        with suppress(KeyError):
            levels = curve(results, task, line, of="noise_rms")
            for epsilon, point in curve(results, task, line).items():
                own = (levels[epsilon].mean, line, point)
                found[epsilon] = min(found.get(epsilon, own), own, key=lambda each: each[0])
    if not found:
        raise KeyError(f"{task}/{SAMPLED[0]}")
    return {epsilon: (line, point) for epsilon, (_, line, point) in sorted(found.items())}


def never_below(task: str, results: Results) -> ClaimVerdict:
    """Whether that line is at no ε below another by more than the larger of their deviations."""
    best, holds, told = least_noise(results, task), True, []
    for other in OTHERS:
        for epsilon, point in curve(results, task, other).items():
            line, own = best[epsilon]
            margin = max(own.deviation, point.deviation)
            holds = holds and own.mean >= point.mean - margin
            told.append(f"{beside(own, point)} ({line}, {other})")
    return verdict(holds, "; ".join(told))


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
            partial(never_below, task),
        )
        for task, record in shipped("sampling")["tasks"].items()
    ),
)
