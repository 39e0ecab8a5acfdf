"""`beyond`: correlated noise since the paper, on the axes of figure 1.

BLT fitted to momentum or to prefix sums, with gains per step and per draw, bands, beside the trees
of the paper and amplified DP-SGDM, at equal ε, computation and tuning (`settings/beyond.toml`); the
average of iterates, which is post-processing and free; and recipes (features by wavelets or from
images of random processes, augmented copies), beside the best published accuracy. Which recipe
stands for an ε is decided by held-out training rows. No state.
"""

from __future__ import annotations

from functools import partial

from noshuffle.experiments import accuracy
from noshuffle.experiments.accuracy import Point, best_held_out, curve
from noshuffle.experiments.curves import beside, compare, draw, table
from noshuffle.experiments.figure import Claim, ClaimVerdict, Figure, Results, shipped, verdict

#: Published accuracy in % on CIFAR-10 without other data, with Poisson samples: De et al. 2022
#: (arXiv 2204.13650), wide residual nets, 16 copies a row; Tramèr and Boneh 2021 (2011.11660), the
#: same features as here; Tang et al. 2023 (2306.06076), nets that were first trained on images of
#: random processes, which are nobody's data (the figure of their abstract).
PUBLISHED = {
    "Tang et al. 2023 (sampled, pre-trained on random images)": {1.0: 72.3},
    "De et al. 2022 (sampled)": {1.0: 56.8, 2.0: 64.9, 4.0: 73.5, 8.0: 81.4},
    "Tramèr and Boneh 2021 (sampled)": {3.0: 69.3},
}


def best_recipes(results: Results, data: str, line: str = "blt") -> dict[float, tuple[str, Point]]:
    """By ε, the task of a data set that was best on held-out rows, and its test accuracy."""
    tasks = (t for t, record in shipped("beyond")["tasks"].items() if record["data"] == data)
    found = best_held_out(results, ((task, line) for task in tasks))
    if not found:
        raise KeyError(f"{data}/{line}")
    return {epsilon: (task, point) for epsilon, (task, _, point) in found.items()}


def _beside_published(name: str, results: Results) -> ClaimVerdict:
    best, known = best_recipes(results, "cifar10"), PUBLISHED[name]
    both = [e for e in best if e in known]
    told = "; ".join(f"ε = {e:g}: {best[e][1]} against {known[e]:.1f} ({best[e][0]})" for e in both)
    return verdict(all(100 * best[e][1].mean >= known[e] for e in both), told)


def _own_recipes(data: str, results: Results) -> ClaimVerdict:
    """Each line with the recipe that was best for it, of those that both were trained with."""
    tasks = {key.split("/")[0] for key in results if "/amplified/final/" in key}
    both = {k: v for k, v in results.items() if k.split("/")[0] in tasks - {data}}
    own, other = (best_recipes(both, data, line) for line in ("blt", "amplified"))
    told = "; ".join(f"{beside(own[e][1], other[e][1])} ({own[e][0]}, {other[e][0]})" for e in own)
    return verdict(all(own[e][1].mean >= other[e][1].mean for e in own), told)


def _averaging(task: str, line: str, results: Results) -> ClaimVerdict:
    last, mean = (curve(results, task, line, of=of) for of in ("accuracy", "averaged"))
    gains = {e: 100 * (mean[e].mean - last[e].mean) for e in last}
    told = "; ".join(f"ε = {e:g}: {gain:+.2f}" for e, gain in gains.items())
    return verdict(all(gain >= 0 for gain in gains.values()), told)


def _claim(line: str, other: str, text: str, place: str) -> Claim:
    return Claim(f"{text} on MNIST", place, partial(compare, "mnist", line, other))


FIGURE = Figure(
    name="beyond",
    title="correlated noise since the paper",
    cells=accuracy.cells,
    table=lambda results: table("beyond", results, averaged=("blt", "tree", "amplified")),
    draw=lambda results, path: draw(
        "beyond", results, path, published={"cifar10_prior": PUBLISHED}
    ),
    claims=(
        *(
            Claim(
                f"BLT noise is at or above amplified DP-SGDM at every ε on {title}",
                "past the paper",
                partial(compare, task, "blt", "amplified"),
            )
            for task, title in (
                ("cifar10_prior", "a prior from dead leaves, CIFAR-10"),
                ("cifar10_prior_10000", "the same prior, batches of 10,000"),
                ("cifar10_patches", "patches of dead leaves, CIFAR-10"),
                ("mnist_scattered", "scattering features of MNIST"),
                ("cifar10_scattered", "scattering features of CIFAR-10, 40 epochs"),
                ("cifar10_scattered_100", "scattering features of CIFAR-10, 100 epochs"),
                ("cifar10_mirrored", "mirrored scattering features of CIFAR-10"),
                ("mnist_scattered_5000", "scattering features of MNIST, batches of 5,000"),
                ("cifar10_mirrored_10000", "mirrored features of CIFAR-10, batches of 10,000"),
                ("mnist_scattered_10000", "scattering features of MNIST, batches of 10,000"),
            )
        ),
        *(
            Claim(
                f"at its own best batch and passes, BLT noise is at or above amplified DP-SGDM on "
                f"{title}, linear models",
                "past the paper; recipes chosen on held-out rows",
                partial(_own_recipes, data),
            )
            for data, title in (("mnist", "MNIST"), ("cifar10", "CIFAR-10"))
        ),
        Claim(
            "without sampling, the recipe best on held-out rows is at or above sampled DP-SGD",
            "De et al. 2022, CIFAR-10 without other data",
            partial(_beside_published, "De et al. 2022 (sampled)"),
        ),
        Claim(
            "and at or above sampled DP-SGD on a net that was first trained on random images",
            "Tang et al. 2023, CIFAR-10 without other data",
            partial(_beside_published, "Tang et al. 2023 (sampled, pre-trained on random images)"),
        ),
        _claim("blt", "tree", "BLT noise is at or above trees at every ε", "arXiv 2408.08868"),
        _claim("blt", "amplified", "BLT noise is at or above amplified DP-SGDM", "past the paper"),
        _claim("blt", "blt_prefix", "fitting to momentum is at or above prefix sums", "2405.13763"),
        _claim("two_sided", "blt_prefix", "gains are at or above none", "past the paper"),
        _claim("blt", "banded", "a BLT is at or above 16 bands at less memory", "2404.16706"),
        Claim(
            "averaging iterates helps a BLT on MNIST",
            "arXiv 2204.13650 (De et al., for DP-SGD)",
            partial(_averaging, "mnist", "blt"),
        ),
    ),
)
