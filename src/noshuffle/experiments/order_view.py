"""Table, picture and claims of `order`, from its results alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.experiments.figure import Claim, ClaimVerdict, Results, deviation, verdict
from noshuffle.experiments.panels import COLOURS, legend_below, markdown, panels

ORDERS = ("file", "shuffled once", "by writer", "by class", "adversarial", "sampled")
TITLES = {
    "blt": "DP-FTRL, BLT",
    "tree": "DP-FTRL, tree",
    "identity": "DP-SGD, not amplified",
    "sampled": "DP-SGD, sampled",
    "none": "no privacy",
}
MARKS = {"blt": "o", "tree": "s", "identity": "D", "sampled": "*", "none": "^"}


def _finals(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """Results by order, of the largest model that was trained."""
    heads = [key.partition("/")[0] for key in results if "/final/" in key]
    if not heads:
        raise KeyError("final")
    head = heads[-1] + "/final/"
    return {order: results[head + order] for order in ORDERS if head + order in results}


def _mean(found: Mapping[str, Any], name: str) -> float:
    return float(np.mean(found[name]["accuracy"]))


def _entry(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "–"
    values = record["accuracy"]
    spread = f" ± {deviation(values):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread} ({record['rate']:g})"


def table(results: Results) -> str:
    try:
        finals = _finals(results)
    except KeyError:
        return "no order is trained yet"
    names = {"sampled": "drawn by secret coin flips"}
    rows = [
        (names.get(order, order), *(_entry(found.get(name)) for name in TITLES))
        for order, found in finals.items()
    ]
    lines = [*markdown(("order", *TITLES.values()), rows), ""]
    return "\n".join([*lines, "test accuracy in %, mean ± deviation over seeds (rate)"])


def draw(results: Results, path: Path) -> None:
    colours = {**COLOURS, "sampled": COLOURS["poisson"], "none": "0.6"}
    try:
        finals = _finals(results)
    except KeyError:
        return
    orders = [order for order in finals if order != "sampled"]
    with panels(path, 1, 1, size=(7.0, 3.6)) as (axis,):
        names = [name for name in TITLES if any(name in finals[order] for order in orders)]
        for place, name in enumerate(names):
            at = np.arange(len(orders)) + (place - (len(names) - 1) / 2) * 0.8 / len(names)
            means = [_mean(finals[order], name) for order in orders]
            spread = [deviation(finals[order][name]["accuracy"]) for order in orders]
            # Dots: bars would have to begin at zero, where no difference can be seen.
            axis.errorbar(at, means, yerr=spread, fmt=MARKS[name], color=colours[name],
                          label=TITLES[name], ms=6, elinewidth=1.0, capsize=2)  # fmt: skip
        if "sampled" in finals:
            level = _mean(finals["sampled"], "sampled")
            axis.axhline(level, color=colours["sampled"], lw=1.2, ls="--",
                         label="DP-SGD, sampled (no order)")  # fmt: skip
        axis.set_xticks(range(len(orders)), orders)
        axis.set(ylabel="test accuracy, %", title="the same ε in every order of the rows")
        legend_below(axis, columns=3)


def _same_guarantee(results: Results) -> ClaimVerdict:
    finals = _finals(results)
    values = {order: f["blt"]["epsilon"] for order, f in finals.items() if "blt" in f}
    if len(values) < 2:
        raise KeyError("two orders")
    told = ", ".join(f"{order}: {value:.4f}" for order, value in values.items())
    return verdict(len(set(values.values())) == 1, f"ε after checked participation, {told}")


def _beats_unamplified(results: Results) -> ClaimVerdict:
    finals = _finals(results)
    pairs = {o: (_mean(f, "tree"), _mean(f, "blt"), _mean(f, "identity"))
             for o, f in finals.items() if "blt" in f}  # fmt: skip
    told = ", ".join(f"{o}: {t:.1f} and {b:.1f} / {i:.1f}" for o, (t, b, i) in pairs.items())
    return verdict(
        all(min(t, b) > i for t, b, i in pairs.values()),
        f"tree and BLT / DP-SGD not amplified: {told}",
    )


def _as_it_comes(results: Results) -> ClaimVerdict:
    finals = _finals(results)
    file, shuffled = (_mean(finals[order], "blt") for order in ("file", "shuffled once"))
    return verdict(abs(file - shuffled) <= 1, f"BLT: file {file:.2f}, shuffled {shuffled:.2f} %")


def _optimizer_pays(results: Results) -> ClaimVerdict:
    finals = _finals(results)
    lost = {name: _mean(finals["shuffled once"], name) - _mean(finals["by class"], name)
            for name in ("blt", "none")}  # fmt: skip
    return verdict(
        lost["none"] >= lost["blt"] / 2,
        f"by class costs {lost['none']:.2f} points without noise, {lost['blt']:.2f} with a BLT",
    )


def _bought(results: Results) -> ClaimVerdict:
    finals = _finals(results)
    ours, sampled = _mean(finals["file"], "blt"), _mean(finals["sampled"], "sampled")
    epsilon = finals["file"]["blt"]["epsilon"]
    return verdict(
        ours >= sampled - 0.5,
        f"BLT in file order {ours:.2f} %, DP-SGD with secret sampling {sampled:.2f} % at ε = "
        f"{epsilon:.2f}",
    )


CLAIMS = (
    Claim("the guarantee does not depend on the order of the rows", "section 1", _same_guarantee),
    Claim(
        "DP-FTRL is above DP-SGD without amplification, in every order",
        "section 5.2",
        _beats_unamplified,
    ),
    Claim("file order is as good as a shuffled one (within a point)", "section 1", _as_it_comes),
    Claim(
        "what sorting by class costs, it costs without noise too (half at least)",
        "this library",
        _optimizer_pays,
    ),
    Claim("secret sampling would have bought less than half a point", "this library", _bought),
)
