"""`beyond`: correlated noise since the paper, on the axes of figure 1.

BLT fitted to momentum or to prefix sums, with gains per step and per draw, bands, beside the trees
of the paper and amplified DP-SGDM, at equal ε, computation and tuning (`settings/beyond.toml`); and
the average of iterates, which is post-processing and costs no privacy. No state.
"""

from __future__ import annotations

from collections.abc import Callable

from noshuffle.experiments import accuracy
from noshuffle.experiments.accuracy import curve
from noshuffle.experiments.curves import compare, draw, table
from noshuffle.experiments.figure import Claim, ClaimVerdict, Figure, Results, verdict


def _averaging(task: str, line: str) -> Callable[[Results], ClaimVerdict]:
    def decide(results: Results) -> ClaimVerdict:
        last, mean = (curve(results, task, line, of=of) for of in ("accuracy", "averaged"))
        gains = {e: 100 * (mean[e].mean - last[e].mean) for e in last}
        told = "; ".join(f"ε = {e:g}: {gain:+.2f}" for e, gain in gains.items())
        return verdict(all(gain >= 0 for gain in gains.values()), told)

    return decide


def _claim(line: str, other: str, text: str, place: str) -> Claim:
    return Claim(f"{text} on MNIST", place, compare("mnist", line, other))


FIGURE = Figure(
    name="beyond",
    title="correlated noise since the paper",
    cells=accuracy.cells,
    table=lambda results: table("beyond", results, averaged=("blt", "tree", "amplified")),
    draw=lambda results, path: draw("beyond", results, path),
    claims=(
        _claim("blt", "tree", "BLT noise is at or above trees at every ε", "arXiv 2408.08868"),
        _claim("blt", "amplified", "BLT noise is at or above amplified DP-SGDM", "past the paper"),
        _claim("blt", "blt_prefix", "fitting to momentum is at or above prefix sums", "2405.13763"),
        _claim("two_sided", "blt_prefix", "gains are at or above none", "past the paper"),
        _claim("blt", "banded", "a BLT is at or above 16 bands at less memory", "2404.16706"),
        Claim(
            "averaging iterates helps a BLT on MNIST",
            "arXiv 2204.13650 (De et al., for DP-SGD)",
            _averaging("mnist", "blt"),
        ),
    ),
)
